"""A random Qwen3-MoE of a few thousand weights, and engines over it. In a test: ``from tiny import tiny_config``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracefp4.guidance.store import GuidanceStore
from tracefp4.methods import QuantConfig, get_method
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.engine import RolloutConfig, RolloutEngine
from tracefp4.tasks import build_tokenizer
from tracefp4.types import Request, SamplingParams

STOP = 1


def tiny_config(**overrides: Any) -> Qwen3MoeConfig:
    """hidden 64, 2 layers, 4 query heads on 2 KV heads of 32, 8 experts of 32 (2 per token), vocabulary 32.

    initializer_range .08 spreads the logits, so that greedy choices are no ties.
    """
    sizes: dict[str, Any] = dict(  # noqa: C408
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        initializer_range=0.08,
        pad_token_id=0,
        eos_token_id=STOP,
    )
    return Qwen3MoeConfig(**{**sizes, **overrides})


def tiny_weights(config: Qwen3MoeConfig, seed: int = 0) -> dict[str, Tensor]:
    """FP32 state dict of random weights.

    Norm weights are random too, so that a forgotten one shows, and so is the embedding of the padding token, which
    transformers sets to 0: its rows would be all zeros.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = Qwen3MoeForCausalLM(config).state_dict()
        embed = state["model.embed_tokens.weight"]  # the head's memory too, where they are tied
        embed[config.pad_token_id] = config.initializer_range * torch.randn_like(embed[0])
        weights = {name: w.clone() for name, w in state.items()}
        if config.tie_word_embeddings:
            weights["lm_head.weight"] = embed.clone()
        for name in weights:
            if "norm" in name:
                weights[name] = 1.0 + 0.2 * torch.randn_like(weights[name])
    return weights


def tiny_model(config: Qwen3MoeConfig, dtype: str | torch.dtype = torch.float32, seed: int = 0) -> Qwen3MoeForCausalLM:
    """The transformers model with ``tiny_weights(config, seed)``, in eval mode."""
    model = Qwen3MoeForCausalLM(config)
    model.load_state_dict(tiny_weights(config, seed))
    for p in model.parameters():  # not model.to(dtype): the rotary frequencies are FP32 buffers
        p.data = p.data.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    return model.eval()


def tiny_checkpoint(directory: Path) -> Path:
    """Writes ``tiny_model`` in BF16 and the arithmetic tokenizer as a Hugging Face directory; returns it."""
    tiny_model(tiny_config(), torch.bfloat16).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def tiny_requests(
    n: int,
    min_prompt: int = 4,
    max_prompt: int = 20,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop: bool = False,
    probe_every: int = 0,
    seed: int = 0,
    vocab: int = 32,
) -> list[Request]:
    """Random prompts of [min_prompt, max_prompt] tokens, ids "r0", "r1", ...; request i samples with seed i.

    stop: whether token 1 ends a response. probe_every: every k-th request keeps full codes (0: none).
    """
    g = torch.Generator().manual_seed(seed)
    requests = []
    for i in range(n):
        length = int(torch.randint(min_prompt, max_prompt + 1, (1,), generator=g))
        prompt = tuple(torch.randint(2, vocab, (length,), generator=g).tolist())
        sampling = SamplingParams(temperature, top_p, max_new_tokens, (STOP,) if stop else (), seed=i)
        requests.append(Request(f"r{i}", prompt, sampling, probe=probe_every > 0 and i % probe_every == 0))
    return requests


def tiny_recipe(method: str, num_layers: int, **quant: Any) -> QuantRecipe:
    """Recipe of a method; quant: settings of QuantConfig."""
    return get_method(method).recipe(QuantConfig(**quant), num_layers)


def make_engine(
    method: str = "trace-all",
    dtype: str = "bfloat16",
    *,
    config: Qwen3MoeConfig | None = None,
    quant: dict[str, Any] | None = None,
    store: GuidanceStore | None = None,
    load: bool = True,
    **rollout_config: Any,
) -> RolloutEngine:
    """An engine holding ``tiny_weights(config)`` as version 0 (load=False: no weights yet).

    rollout_config: settings of RolloutConfig; by default 16 sequences of up to 64 tokens.
    """
    config = config or tiny_config()
    recipe = tiny_recipe(method, config.num_hidden_layers, **(quant or {}))
    settings = {"max_num_seqs": 16, "max_model_len": 64, **rollout_config}
    engine = RolloutEngine(config, recipe, RolloutConfig(dtype=dtype, **settings), store)
    if load:
        engine.update_weights(tiny_weights(config).items(), 0)
    return engine
