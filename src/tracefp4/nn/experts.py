"""Quantized routed experts as a registered transformers experts implementation.

Legend: N tokens, K experts per token, E experts, H hidden size, F expert width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from tracefp4.formats import get_format
from tracefp4.nn.context import GuidanceContext
from tracefp4.recipe import quantize_expert_weights

EXPERTS_NAME = "tracefp4"


class _SubstituteValue(torch.autograd.Function):
    """y = value, dy/dx = 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def fake_quantized_weights(module: nn.Module, names: tuple[str, ...], format_name: str, pow2: bool) -> list[Tensor]:
    """Weights as the rollout uses them, gradient straight through; names: dotted parameters of ``module``.

    Each is [E, out, in], or [out, in] for the one expert of a dense MLP; together they are stacked in ``out`` and
    share the expert's encode scale. The dequantized copies are kept on the module until a parameter changes (in place,
    by a cast, or by another parameter in its stead): one quantization per optimizer step, not one per micro-batch.
    """
    weights = [module.get_parameter(name) for name in names]
    cache: dict[tuple[str, ...], tuple[list[nn.Parameter], list[tuple[int, int]], list[Tensor]]]
    cache = module.__dict__.setdefault("_tracefp4_weights", {})
    # A cast and `.data = ...` leave the version as it is, but not the address; a new parameter starts at version 0.
    state = [(w._version, w.data_ptr()) for w in weights]
    held = cache.get(names)
    if held is None or any(a is not b for a, b in zip(held[0], weights, strict=True)) or held[1] != state:
        with torch.no_grad():
            w_EOI = weights[0] if len(weights) == 1 else torch.cat(tuple(weights), dim=-2)
            w_EOI = w_EOI if w_EOI.ndim == 3 else w_EOI[None]
            blocks = quantize_expert_weights(w_EOI, format_name, pow2)
            value_EOI = get_format(format_name).dequantize(blocks, dtype=w_EOI.dtype)
            values = value_EOI.split([w.shape[-2] for w in weights], dim=-2)
            held = (weights, state, [v.reshape(w.shape) for v, w in zip(values, weights, strict=True)])
        cache[names] = held
    return [_SubstituteValue.apply(w, value) for w, value in zip(weights, held[2], strict=True)]


def fake_quantized_weight(module: nn.Module, name: str, format_name: str, pow2: bool) -> Tensor:
    """``fake_quantized_weights`` of one parameter."""
    return fake_quantized_weights(module, (name,), format_name, pow2)[0]


def quantized_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of an experts module; hidden_states [N, H], index int64 and weights [N, K] -> [N, H].

    The input is rounded once per token, before dispatch, as the rollout does it.
    """
    context: GuidanceContext = self.tracefp4_context  # type: ignore[assignment]
    gate_up_EOI, down_EOI = self.gate_up_proj, self.down_proj
    if context.weight_format is not None:
        pow2 = context.recipe.pow2
        gate_up_EOI = fake_quantized_weight(self, "gate_up_proj", context.weight_format, pow2)
        down_EOI = fake_quantized_weight(self, "down_proj", context.weight_format, pow2)
    x = context.round_site("expert_input", self.tracefp4_layer, hidden_states)  # type: ignore[arg-type]
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    token = order // top_k_index.shape[-1]
    bounds = torch.bincount(flat, minlength=self.num_experts).cumsum(0).tolist()  # type: ignore[arg-type]
    spans = [(e, a, b) for e, (a, b) in enumerate(pairwise([0, *bounds])) if b > a]
    x_M, hidden = x[token], []
    for e, start, stop in spans:
        gate, up = F.linear(x_M[start:stop], gate_up_EOI[e]).chunk(2, dim=-1)  # type: ignore[index]
        hidden.append(self.act_fn(gate) * up)  # type: ignore[operator]
    # One rounding for all experts: rows are quantized independently of one another.
    a_M = context.round_activation(torch.cat(hidden))
    outputs = [F.linear(a_M[start:stop], down_EOI[e]) for e, start, stop in spans]  # type: ignore[index]
    y = torch.cat(outputs) * top_k_weights.reshape(-1)[order, None].to(hidden_states.dtype)
    return torch.zeros_like(hidden_states).index_add(0, token, y)


ExpertsInterface.register(EXPERTS_NAME, quantized_experts)
