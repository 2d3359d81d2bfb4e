"""A Hugging Face directory in BF16 from a Llama-architecture GGUF file with a byte-level BPE tokenizer.

transformers reads GGUF too, but needs accelerate for it, cannot save what it read, and takes this file's start token
for its end token, so that answers would not end where they should.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type


def convert(source: Path, target: Path) -> None:
    """Writes target (config, weights in BF16, tokenizer with its chat template) from a GGUF file, whole or not at all.

    Raises KeyError for a file that lacks what a tied-embedding Llama with a GPT-2 tokenizer has, ValueError for
    another architecture, and RuntimeError where a tensor is missing or has another shape.
    """
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if (fields["general.architecture"], fields["tokenizer.ggml.model"]) != ("llama", "gpt2"):
        raise ValueError(f"{source} is no Llama checkpoint with a byte-level BPE tokenizer")
    config = _config(fields)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: weight.to(torch.bfloat16) for name, weight in _weights(reader, config).items()}
    model.load_state_dict(weights | {"lm_head.weight": weights[_WHOLE["token_embd.weight"]]}, assign=True)
    model.tie_weights()
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        model.save_pretrained(partial)
        _tokenizer(fields).save_pretrained(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(fields: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


def _weights(reader: gguf.GGUFReader, config: LlamaConfig) -> dict[str, Tensor]:
    """FP32 tensors by their transformers names."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in _WHOLE:
            weights[_WHOLE[tensor.name]] = weight
            continue
        _, layer, part, kind = tensor.name.split(".")
        if part in heads:
            weight = _rope_halves(weight, heads[part])
        weights[f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"] = weight
    return weights


def _rope_halves(weight: Tensor, heads: int) -> Tensor:
    """[H*D, K]: each head's rotary pairs side by side -> its first elements, then its second ones."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])

    def named(what: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{what}_token_id"]]

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        model_max_length=fields["llama.context_length"],
        padding_side="left",
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer
