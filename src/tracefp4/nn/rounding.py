"""Rounding ops of the trainer: the value of an FP4 slot going forward, the gradient of the identity back.

The forward value is the dequantized slot itself, not `x + (v - x)`, which in floating point is another
number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tracefp4.formats import get_format
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


def guided_round(
    x: Tensor,
    guidance: CompactGuidance,
    rule: str = "cell",
    recipe_hash: str | None = None,
    own_encode_scale: EncodeScale = "row",
) -> Tensor:
    """Round the trainer's activations to the slots the rollout picked (TRACE, arXiv 2610.07767).

    x [..., K], f32 or bf16, of the record's shape; the other arguments are those of `guidance.decode`.
    Returns a tensor of x's shape and dtype whose value is exactly `Format.dequantize` of the decoded blocks,
    with the gradient of the identity. Rows without a valid record are rounded to nearest.
    Raises GuidanceError as `decode` does.
    """

    def rounding(values: Tensor) -> Tensor:
        blocks, _ = decode(guidance, values, rule, recipe_hash, own_encode_scale)
        return get_format(blocks.format).dequantize(blocks, dtype=values.dtype)

    return _StraightThrough.apply(x, rounding)


def fake_quantize(x: Tensor, format: str, encode_scale: EncodeScale = "row") -> Tensor:
    """Round to nearest in a format and back (vanilla QAT), with the gradient of the identity.

    x [..., K], f32 or bf16; format: a name `get_format` knows; encode_scale: what `Format.quantize` takes,
    ignored by MX formats. Returns x's shape and dtype. Raises FormatError as `Format.quantize` does.
    """
    fmt = get_format(format)

    def rounding(values: Tensor) -> Tensor:
        scale = encode_scale if fmt.scale_kind == "e4m3" else None
        return fmt.dequantize(fmt.quantize(values, encode_scale=scale), dtype=values.dtype)

    return _StraightThrough.apply(x, rounding)
