"""A model that the kernels take, small enough for Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from tiny import tiny_recipe as recipe_of
from tiny import tiny_requests, tiny_weights
from tracefp4.guidance.store import GuidanceStore
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.config import RolloutConfig
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.kernel_model import KernelModel
from tracefp4.rollout.model import ModelShape
from tracefp4.types import Request

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_SIZES: dict[str, Any] = dict(  # noqa: C408
    vocab_size=32,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    initializer_range=0.08,
    pad_token_id=0,
    eos_token_id=1,
)


def moe(**overrides: Any) -> Qwen3MoeConfig:
    """hidden 128, 2 layers, 4 query heads on 2 KV heads of 64, 4 experts of 128, 2 per token."""
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeConfig(**{**_SIZES, **sizes, "norm_topk_prob": True, **overrides})


def dense(**overrides: Any) -> Qwen3Config:
    return Qwen3Config(**{**_SIZES, "intermediate_size": 128, **overrides})


def engine(
    method: str = "trace-all",
    backend: str = "triton",
    config: Any = None,
    quant: dict[str, Any] | None = None,
    load: bool = True,
    store: GuidanceStore | None = None,
    recipe: QuantRecipe | None = None,
    **settings: Any,
) -> RolloutEngine:
    """An engine holding random weights as version 0; up to 4 sequences of 48 tokens, pages of 16.

    backend: "torch"; "triton"; or "references": the engine of "triton" over the kernels' references, which are far
    faster than the interpreter and show the same of everything around the kernels.
    """
    config = config or moe()
    recipe = recipe or recipe_of(method, config.num_hidden_layers, **(quant or {}))
    name = "torch" if backend == "torch" else "triton"
    sizes = {"max_num_seqs": 4, "max_model_len": 48, "page_size": 16, "backend": name, **settings}
    device = DEVICE if backend == "triton" else "cpu"
    references = None
    if backend == "references":
        dtype = getattr(torch, RolloutConfig(**sizes).dtype)
        references = KernelModel(ModelShape.from_hf(config), recipe, dtype, device, "torch")
    made = RolloutEngine(config, recipe, RolloutConfig(**sizes), store, device, references)
    if load:
        made.update_weights(tiny_weights(config).items(), 0)
    return made


def requests(n: int, max_new_tokens: int = 4, **more: Any) -> list[Request]:
    return tiny_requests(n, max_new_tokens=max_new_tokens, **{"min_prompt": 3, "max_prompt": 9, **more})
