"""A larger policy with the skill of the built-in one, for runs whose time is to be measured.

    python benchmarks/larger_policy.py OUT_DIR    # of recipes/large.toml: OUT_DIR is runs/large-policy

Twice the hidden size, heads, head_dim, experts (and experts per token) and expert width, and two more layers. Every
width holds its weights twice, halved where they are summed, but for a head's: the new ones are zeros between the old,
which thus keep their frequencies of rotation. The new layers add little, so that the function is nearly the
built-in one's; 2 % of noise on every weight makes the copies differ.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, Qwen3MoeForCausalLM

from tracefp4.assets import builtin_model_path
from tracefp4.nn.loading import load_policy

NOISE, NEW_LAYER = 0.02, 0.05
"""Relative noise on every weight, and what a new layer's output is scaled by."""


def twice(w: Tensor, *dims: int) -> Tensor:
    for dim in dims:
        w = torch.cat([w, w], dim)
    return w


def halves(w: Tensor) -> Tensor:
    """Twice along the inputs, which are doubled too: the sum stays."""
    return twice(w, -1) / 2


def wider_heads(w: Tensor, head_dim: int) -> Tensor:
    """[heads * head_dim, ...] -> [heads * 2 head_dim, ...]: a zero behind every value."""
    heads = w.view(-1, head_dim, *w.shape[1:])
    return torch.stack([heads, torch.zeros_like(heads)], dim=2).reshape(2 * len(w), *w.shape[1:])


def grown_layer(name: str, w: Tensor, head_dim: int) -> Tensor:
    """A weight of a decoder layer at twice the widths. name: after `model.layers.N.`."""
    if name.endswith("layernorm.weight"):
        return twice(w, 0)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        # Zeros halve the mean square, which makes q k^T twice as large; attention divides by sqrt(2) more.
        return wider_heads(w, head_dim) * 2**-0.25
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return halves(twice(wider_heads(w, head_dim), 0))
    if name.endswith("o_proj.weight"):
        return halves(twice(wider_heads(w.T, head_dim).T, 0))
    if name.endswith("experts.gate_up_proj"):
        gate, up = w.chunk(2, dim=1)
        return halves(twice(torch.cat([twice(gate, 1), twice(up, 1)], 1), 0))
    if name.endswith("experts.down_proj"):
        return halves(twice(w, 0, 1))
    return halves(twice(w, 0))  # the router: more experts


def grow(layers: int = 6, noise: float = NOISE, new_layer: float = NEW_LAYER) -> Qwen3MoeForCausalLM:
    """The larger policy in FP32."""
    path = builtin_model_path("sums-moe")
    small = load_policy(path, "float32")
    weights: dict[str, Tensor] = {}
    depth = small.config.num_hidden_layers
    for name, w in small.state_dict().items():
        if name.startswith("model.layers."):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            grown = grown_layer(rest, w, small.config.head_dim)
            weights[name] = grown
            if int(number) == depth - 1:
                scale = new_layer if rest.endswith(("o_proj.weight", "down_proj")) else 1.0
                weights |= {f"model.layers.{i}.{rest}": scale * grown for i in range(depth, layers)}
        elif name == "model.norm.weight":
            weights[name] = twice(w, 0) / 2  # the tied head sums over twice the width
        else:
            weights[name] = twice(w, -1)
    config: Any = AutoConfig.from_pretrained(path)
    for field in ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "head_dim"):
        setattr(config, field, 2 * getattr(config, field))
    for field in ("num_key_value_heads", "num_experts", "num_experts_per_tok"):
        setattr(config, field, 2 * getattr(config, field))
    config.num_hidden_layers = layers
    model = Qwen3MoeForCausalLM(config).float()
    model.load_state_dict(weights)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p *= 1 + noise * torch.randn(p.shape, generator=g)
    return model


def main(out: str) -> None:
    model = grow()
    Path(out).mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(out)
    AutoTokenizer.from_pretrained(builtin_model_path("sums-moe")).save_pretrained(out)
    print(f"wrote {out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/larger_policy.py OUT_DIR")
    main(sys.argv[1])
