"""Rounding ops of the trainer: the value of an FP4 slot going forward, the gradient of the identity back.

The forward value is the dequantized slot itself, not `x + (v - x)`, which in floating point is another
number. Each op has two backends of equal bits: plain torch (`guidance.decode`, `Format`), and a Triton kernel that
reads the packed record and writes nothing but the output.

``clipped=True`` is the other common straight-through rule: no gradient where x lies beyond the largest value that its
block's scale can represent (and the forward saturates). It is an ablation, computed by torch on every backend.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.formats.spec import EncodeScale
from tracefp4.guidance import CompactGuidance, decode
from tracefp4.guidance.codec import check_request
from tracefp4.kernels.backend import BACKENDS
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.guided_round import (
    FORMATS,
    OwnScale,
    fake_quantize_groups,
    fake_quantize_rows,
    group_amax,
    guided_round_rows,
)
from tracefp4.recipe import quantize_expert_weights

AUTO = "auto"
"""Backend that takes the kernels for tensors on a GPU and the reference for all others."""


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_kernel(backend: str, format: str, x: Tensor) -> bool:
    """Whether a backend rounds x by the Triton kernels; formats without one are computed by torch on every backend.

    Raises KernelError for an unknown backend.
    """
    if backend not in (AUTO, *BACKENDS):
        raise KernelError(f"unknown rounding backend {backend!r}; one of {', '.join((AUTO, *BACKENDS))}")
    if format not in FORMATS or x.dtype not in (torch.bfloat16, torch.float32):
        return False
    return backend == "triton" or (backend == AUTO and x.is_cuda and _triton_is_installed())


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
    backend: str = AUTO,
    *,
    clipped: bool = False,
    band: float | None = None,
) -> Tensor:
    """Round the trainer's activations to the slots the rollout picked (TRACE, arXiv 2610.07767).

    x [..., K], f32 or bf16, of the record's shape; the other arguments are those of `guidance.decode`. backend: "auto"
    (by x's device), "torch" or "triton".
    Returns a tensor of x's shape and dtype whose value is exactly `Format.dequantize` of the decoded blocks,
    with the gradient of the identity. Rows without a valid record are rounded to nearest.
    Raises GuidanceError as `decode` does, KernelError for an unknown backend.
    """
    kernel = uses_kernel(backend, guidance.header.format, x) and _own(own_encode_scale)

    def blocks_of(values: Tensor) -> QuantizedBlocks:
        return decode(guidance, values, rule, recipe_hash, own_encode_scale, band)[0]

    def by_kernel(values: Tensor) -> Tensor:
        check_request(guidance, values, rule, recipe_hash, band)
        here = guidance if guidance.payload.device == values.device else guidance.to(values.device, non_blocking=True)
        assert here.encode_scale is not None
        own: OwnScale = own_encode_scale  # type: ignore[assignment]  # `_own` has seen it
        header, rows = here.header, _rows(values)
        scale = here.encode_scale.to(values.device)
        args = (here.payload.contiguous(), scale, here.valid, header.format, header.bits, rule, own, band, here.stale)
        return guided_round_rows(rows, *args).view(values.shape)

    if kernel and not clipped:
        return _StraightThrough.apply(x, by_kernel)
    return _straight_through(x, blocks_of, clipped)


def _rows(x: Tensor) -> Tensor:
    """[N, K], a view wherever the values of a row lie side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _own(scale: EncodeScale) -> bool:
    """Whether the kernels take an encode scale: all that a recipe says, not a tensor of many or "tensor"."""
    if isinstance(scale, str):
        return scale in ("row", "row-pow2")
    return isinstance(scale, float | int) or (isinstance(scale, Tensor) and scale.ndim == 0)


def fake_quantize(
    x: Tensor, format: str, encode_scale: EncodeScale = "row", backend: str = AUTO, *, clipped: bool = False
) -> Tensor:
    """Round to nearest in a format and back (vanilla QAT), with the gradient of the identity.

    x [..., K], f32 or bf16; format: a name `get_format` knows; encode_scale: what `Format.quantize` takes,
    ignored by MX formats. backend: "auto" (by x's device), "torch" or "triton". Returns x's shape and dtype. Raises
    FormatError as `Format.quantize` does, KernelError for an unknown backend.
    """
    fmt = get_format(format)

    def blocks_of(values: Tensor) -> QuantizedBlocks:
        scale = encode_scale if fmt.scale_kind == "e4m3" else None
        return fmt.quantize(values, encode_scale=scale)

    def by_kernel(values: Tensor) -> Tensor:
        rows = _rows(values)
        scale: OwnScale = encode_scale  # type: ignore[assignment]  # `_own` has seen it
        return fake_quantize_rows(rows, format, scale).view(values.shape)

    whole = x.ndim > 0 and x.shape[-1] > 0 and x.shape[-1] % fmt.block_size == 0  # else torch refuses it by name
    kernel = uses_kernel(backend, format, x) and _own(encode_scale) and whole
    if kernel and not clipped:
        return _StraightThrough.apply(x, by_kernel)
    return _straight_through(x, blocks_of, clipped)


def fake_quantized_matrices(
    weights: Sequence[Tensor], format: str, pow2: bool = False, backend: str = AUTO
) -> list[Tensor]:
    """Weights as the rollout uses them: `recipe.quantize_expert_weights`, dequantized; no gradient.

    weights: [E, out, in] each, or [out, in] for one expert; together they are stacked in ``out`` and share the expert's
    encode scale. pow2: round it down to a power of two. Returns tensors of their shapes and dtypes. Raises FormatError
    where ``in`` is no multiple of the block.
    """
    fmt = get_format(format)
    stacked = [(w if w.ndim == 3 else w[None]).detach() for w in weights]
    with torch.no_grad():
        if uses_kernel(backend, format, weights[0]) and weights[0].shape[-1] % fmt.block_size == 0:
            stacked = [w.contiguous() for w in stacked]
            amax_E = torch.stack([group_amax(w.flatten(1)) for w in stacked]).amax(0)
            # As of a row whose values all are its amax: the very operations of the reference.
            row_EB = amax_E[:, None].expand(-1, fmt.block_size)
            scale_E1 = fmt.resolve_encode_scale(row_EB, "row-pow2" if pow2 else "row")
            assert scale_E1 is not None
            values = [fake_quantize_groups(w, format, scale_E1[:, 0]) for w in stacked]
        else:
            w_EOI = stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=-2)
            blocks = quantize_expert_weights(w_EOI, format, pow2)
            values = list(fmt.dequantize(blocks, dtype=w_EOI.dtype).split([w.shape[-2] for w in stacked], dim=-2))
    return [v.reshape(w.shape) for v, w in zip(values, weights, strict=True)]
