"""Rounding to FP4 and back in one pass: to nearest, or to the slots that a guidance record names.

The reference is `tracefp4.guidance.decode` and `Format.dequantize`; `tracefp4.nn` chooses between it and this kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.formats import get_format
from tracefp4.kernels.backend import kernel_module
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.quantize_record.ref import planes

__all__ = ["FORMATS", "OwnScale", "fake_quantize_groups", "fake_quantize_rows", "group_amax", "guided_round_rows"]

FORMATS = ("nvfp4", "nvfp4-exact")
OwnScale = str | float | Tensor
"""Encode scale that this side computes or holds itself: "row", "row-pow2", a number or a 0-d tensor."""


def fake_quantize_rows(x_NK: Tensor, format: str, encode_scale: OwnScale = "row") -> Tensor:
    """Rounds rows to nearest and back, by the Triton kernel: the bits of `Format.quantize` and `Format.dequantize`.

    x_NK: BF16 or FP32 [N, K], last dimension contiguous, K a multiple of 16. Returns x's shape and dtype.
    Raises KernelError for other operands or formats.
    """
    _check(x_NK, format, encode_scale)
    kernel = kernel_module("triton", "guided_round", x_NK)
    assert kernel is not None
    out: Tensor = kernel.round_rows(x_NK, format, encode_scale, None, None, None, 0, 0, "cell")
    return out


def fake_quantize_groups(w_EOI: Tensor, format: str, encode_scale_E: Tensor) -> Tensor:
    """Rounds stacked matrices to nearest and back, one encode scale each, by the Triton kernel.

    w_EOI: BF16 or FP32 [E, O, I], contiguous, I a multiple of 16; encode_scale_E: f32 [E]. The bits are those of
    `Format.quantize(w, encode_scale=s[:, None, None])` and `Format.dequantize`; nothing but the output is allocated.
    Raises KernelError for other operands or formats.
    """
    if w_EOI.ndim != 3 or not w_EOI.is_contiguous():
        raise KernelError(f"stacked matrices must be contiguous [E, O, I], got {tuple(w_EOI.shape)}")
    E, O, I = w_EOI.shape
    if encode_scale_E.dtype != torch.float32 or tuple(encode_scale_E.shape) != (E,):
        raise KernelError(f"encode scales must be f32 [{E}], got {encode_scale_E.dtype} {tuple(encode_scale_E.shape)}")
    rows = w_EOI.view(E * O, I)
    _check(rows, format, "row")
    kernel = kernel_module("triton", "guided_round", w_EOI, encode_scale_E)
    assert kernel is not None
    scales = encode_scale_E.contiguous()
    out: Tensor = kernel.round_rows(rows, format, scales, None, None, None, 0, 0, "cell", rows_per_scale=O)
    return out.view(E, O, I)


def group_amax(w_EM: Tensor) -> Tensor:
    """f32 [E]: largest magnitude of each row of w, BF16 or FP32 [E, M], contiguous; NaN counts as 0. Reads w once.

    Raises KernelError for other operands.
    """
    if w_EM.ndim != 2 or not w_EM.is_contiguous() or w_EM.dtype not in (torch.bfloat16, torch.float32):
        raise KernelError(f"w must be contiguous BF16 or FP32 [E, M], got {w_EM.dtype} {tuple(w_EM.shape)}")
    kernel = kernel_module("triton", "guided_round", w_EM)
    assert kernel is not None
    out: Tensor = kernel.group_amax(w_EM)
    return out


def guided_round_rows(
    x_NK: Tensor,
    payload: Tensor,
    encode_scale: Tensor,
    valid_N: Tensor,
    format: str,
    bits: float,
    rule: str = "cell",
    own_encode_scale: OwnScale = "row",
    band: float | None = None,
    stale_N: Tensor | None = None,
) -> Tensor:
    """Rounds each row to the slots its record names, by the Triton kernel: the bits of `guidance.decode`, dequantized.

    Args:
        x_NK: BF16 or FP32 [N, K], last dimension contiguous, K a multiple of 16.
        payload: uint8 [N, row bytes], contiguous.
        encode_scale: f32 [] or [N, 1]: the rollout's S.
        valid_N: bool [N]; rows without a valid record are rounded to nearest at `own_encode_scale`.
        format, bits: of the record: 4.5, 1.5, 1.125 or 1.0625 bits of an NVFP4 format; 0.5 or 0.125, scales only.
        rule: "cell" or "bracket".
        band: as of `guidance.decode`. stale_N: bool [N], the rows that have it; None: no row.

    Raises:
        KernelError: operands that do not fit, other formats, widths, rules or own encode scales.
    """
    _check(x_NK, format, own_encode_scale)
    N, K = x_NK.shape
    code_planes, scale_planes = planes(format, bits)
    size = code_planes * (K // 8) + scale_planes * -(-K // 128)
    if payload.dtype != torch.uint8 or tuple(payload.shape) != (N, size) or not payload.is_contiguous():
        raise KernelError(f"the payload must be contiguous uint8 [{N}, {size}], got {payload.dtype} {payload.shape}")
    if encode_scale.dtype != torch.float32 or tuple(encode_scale.shape) not in ((), (N, 1)):
        raise KernelError(f"the encode scale must be f32 [] or [{N}, 1], got {encode_scale.dtype} {encode_scale.shape}")
    if valid_N.dtype != torch.bool or tuple(valid_N.shape) != (N,):
        raise KernelError(f"valid must be bool [{N}], got {valid_N.dtype} {tuple(valid_N.shape)}")
    if rule not in ("cell", "bracket"):
        raise KernelError(f"unknown decoding rule {rule!r}; valid rules: cell, bracket")
    if band is not None and not band > 0:
        raise KernelError(f"a band must be positive, got {band}")
    if stale_N is not None and (stale_N.dtype != torch.bool or tuple(stale_N.shape) != (N,)):
        raise KernelError(f"stale must be bool [{N}], got {stale_N.dtype} {tuple(stale_N.shape)}")
    encode_scale = encode_scale.contiguous()  # an expanded one would be read out of bounds
    kernel = kernel_module("triton", "guided_round", x_NK, payload, encode_scale, valid_N)
    assert kernel is not None
    out: Tensor = kernel.round_rows(
        x_NK, format, own_encode_scale, payload, encode_scale, valid_N, code_planes, scale_planes, rule,
        band=band, stale=stale_N,
    )  # fmt: skip
    return out


def _check(x: Tensor, format: str, scale: OwnScale) -> None:
    if format not in FORMATS:
        raise KernelError(f"no rounding kernel for format {format!r}; formats: {', '.join(FORMATS)}")
    if x.dtype not in (torch.bfloat16, torch.float32) or x.ndim != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise KernelError(f"x must be BF16 or FP32 [N, K] with contiguous rows, got {x.dtype} {tuple(x.shape)}")
    if x.shape[1] == 0 or x.shape[1] % get_format(format).block_size:
        raise KernelError(f"rows of {x.shape[1]} values are not whole blocks of {get_format(format).block_size}")
    if isinstance(scale, str):
        if scale not in ("row", "row-pow2"):
            raise KernelError(f'the triton backend takes "row", "row-pow2" or a static scale, got {scale!r}')
    elif isinstance(scale, Tensor) and scale.ndim:
        raise KernelError("a static encode scale is a number or a 0-d tensor")
