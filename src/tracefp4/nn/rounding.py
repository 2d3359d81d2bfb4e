"""Rounding ops of the trainer: the value of an FP4 slot going forward, the gradient of the identity back.

The forward value is the dequantized slot itself, not `x + (v - x)`, which in floating point is another
number.

``clipped=True`` is the other common straight-through rule: no gradient where x lies beyond the largest value that its
block's scale can represent (and the forward saturates).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.formats.spec import EncodeScale
from tracefp4.guidance import CompactGuidance, decode


class _StraightThrough(torch.autograd.Function):
    """y = rounding(x), dy/dx = 1. Nothing is saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ClippedStraightThrough(torch.autograd.Function):
    """y = rounding(x)[0], dy/dx = rounding(x)[1]: 1 inside the representable range, 0 outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        y, inside = rounding(x)
        ctx.save_for_backward(inside)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None


def _straight_through(x: Tensor, blocks_of: Callable[[Tensor], QuantizedBlocks], clipped: bool) -> Tensor:
    """The dequantized blocks of x, gradient straight through."""

    def rounding(values: Tensor) -> Tensor:
        blocks = blocks_of(values)
        return get_format(blocks.format).dequantize(blocks, dtype=values.dtype)

    def rounding_and_range(values: Tensor) -> tuple[Tensor, Tensor]:
        blocks = blocks_of(values)
        fmt = get_format(blocks.format)
        largest = fmt.element_max * fmt.effective_scale(blocks.scales, blocks.encode_scale)
        inside = values.float().unflatten(-1, (-1, fmt.block_size)).abs() <= largest[..., None]
        return fmt.dequantize(blocks, dtype=values.dtype), inside.flatten(-2)

    if clipped:
        return _ClippedStraightThrough.apply(x, rounding_and_range)
    return _StraightThrough.apply(x, rounding)


def guided_round(
    x: Tensor,
    guidance: CompactGuidance,
    rule: str = "cell",
    recipe_hash: str | None = None,
    own_encode_scale: EncodeScale = "row",
    clipped: bool = False,
) -> Tensor:
    """Round the trainer's activations to the slots the rollout picked (TRACE, arXiv 2610.07767).

    x [..., K], f32 or bf16, of the record's shape; the other arguments are those of `guidance.decode`.
    Returns a tensor of x's shape and dtype whose value is exactly `Format.dequantize` of the decoded blocks,
    with the gradient of the identity. Rows without a valid record are rounded to nearest.
    Raises GuidanceError as `decode` does.
    """

    return _straight_through(
        x, lambda values: decode(guidance, values, rule, recipe_hash, own_encode_scale)[0], clipped
    )


def fake_quantize(x: Tensor, format: str, encode_scale: EncodeScale = "row", clipped: bool = False) -> Tensor:
    """Round to nearest in a format and back (vanilla QAT), with the gradient of the identity.

    x [..., K], f32 or bf16; format: a name `get_format` knows; encode_scale: what `Format.quantize` takes,
    ignored by MX formats. Returns x's shape and dtype. Raises FormatError as `Format.quantize` does.
    """
    fmt = get_format(format)
    scale = encode_scale if fmt.scale_kind == "e4m3" else None
    return _straight_through(x, lambda values: fmt.quantize(values, encode_scale=scale), clipped)
