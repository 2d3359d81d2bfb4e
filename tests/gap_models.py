"""Small random models of several architectures, with a tokenizer of printable ASCII."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tracefp4.tasks.tokenizer import CHAT_TEMPLATE, build_text_tokenizer

COMMON: dict[str, Any] = {"vocab_size": 98, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 1}
SIZES: dict[str, Any] = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "tie_word_embeddings": True,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def config_of(kind: str) -> Any:
    if kind == "gpt2":
        return GPT2Config(**COMMON, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.12)
    if kind == "qwen3":
        return Qwen3Config(**{**SIZES, "head_dim": 32})
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(**{**SIZES, "head_dim": 32}, **MOE)
    return LlamaConfig(**SIZES)


def checkpoint(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, chat: bool = True, seed: int = 0
) -> Path:
    """A checkpoint directory of random weights that answers with some spread."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(kind)).to(dtype)
    model.save_pretrained(folder)
    build_text_tokenizer(CHAT_TEMPLATE if chat else None).save_pretrained(folder)
    return folder
