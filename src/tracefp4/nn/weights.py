"""Fake-quantized weights of the trainer: one quantization per optimizer step, gradients straight to the parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.nn.context import GuidanceContext
from tracefp4.nn.rounding import AUTO, fake_quantized_matrices

_Cache = dict[tuple[Any, ...], tuple[list[nn.Parameter], list[tuple[int, int]], int, list[Tensor]]]


class _SubstituteValue(torch.autograd.Function):
    """y = value, dy/dx = 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def quantized_parameters(module: nn.Module, context: GuidanceContext, *groups: tuple[str, ...]) -> list[Tensor]:
    """A module's parameters as its context wants them in the forward: fake-quantized, or as they are.

    groups: dotted names; those of a group are stacked in ``out`` and share each expert's encode scale.
    """
    if context.weight_format is None:
        return [module.get_parameter(name) for names in groups for name in names]
    options = (context.weight_format, context.recipe.pow2)
    out: list[Tensor] = []
    for names in groups:
        out += fake_quantized_weights(
            module, names, *options, backend=context.backend, keep=context.keep_weights, epoch=context.weight_epoch
        )
    return out


def fake_quantized_weights(
    module: nn.Module,
    names: tuple[str, ...],
    format_name: str,
    pow2: bool,
    *,
    backend: str = AUTO,
    keep: bool = True,
    epoch: int = 0,
) -> list[Tensor]:
    """Weights as the rollout uses them, gradient straight through; names: dotted parameters of ``module``.

    Each is [E, out, in], or [out, in] for the one expert of a dense MLP; together they are stacked in ``out`` and
    share the expert's encode scale. keep: the dequantized copies stay on the module until a parameter changes (in
    place, by a cast, or by another parameter in its stead) or the epoch does: one quantization per optimizer step, not
    one per micro-batch, for as much memory as the weights take. Autograd holds the same copies from the forward to the
    end of the backward pass in any case, so that keeping them raises the peak only under gradient checkpointing, or
    where the optimizer's own peak is the higher one.
    """
    weights = [module.get_parameter(name) for name in names]
    cache: _Cache = module.__dict__.setdefault("_tracefp4_weights", {})
    # A cast and `.data = ...` leave the version as it is, but not the address; a new parameter starts at version 0.
    state = [(w._version, w.data_ptr()) for w in weights]
    key = (*names, format_name, pow2)
    held = cache.get(key) if keep else None
    stale = held is None or held[1] != state or held[2] != epoch
    if held is None or stale or any(a is not b for a, b in zip(held[0], weights, strict=True)):
        cache.pop(key, None)  # before the new ones are made, so that both never lie in memory together
        held = None
        held = (weights, state, epoch, fake_quantized_matrices(weights, format_name, pow2, backend))
        if keep:
            cache[key] = held
    return [_SubstituteValue.apply(w, value) for w, value in zip(weights, held[3], strict=True)]


def fake_quantized_weight(module: nn.Module, name: str, format_name: str, pow2: bool) -> Tensor:
    """``fake_quantized_weights`` of one parameter."""
    return fake_quantized_weights(module, (name,), format_name, pow2)[0]


def drop_kept_weights(model: nn.Module) -> None:
    """Frees the fake-quantized weights that a model's modules keep; the next forward makes them again."""
    for module in model.modules():
        module.__dict__.pop("_tracefp4_weights", None)
