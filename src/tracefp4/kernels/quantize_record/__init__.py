"""Quantizing activations, K and V in one pass, with the guidance record of what was chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.formats.spec import EncodeScale
from tracefp4.kernels.backend import kernel_module
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.paged_attention.cache import PagedCache
from tracefp4.kernels.quantize_record import ref
from tracefp4.kernels.quantize_record.ref import RecordTarget, payload_rows, planes

__all__ = ["TRITON_FORMATS", "RecordTarget", "check_record", "payload_rows", "quantize_record", "write_kv"]

TRITON_FORMATS = ("nvfp4", "nvfp4-exact")
"""Formats with a kernel; all others are computed by the torch reference whatever the backend: the bits are the same."""


def quantize_record(
    x_NK: Tensor,
    format: str,
    encode_scale: EncodeScale = "row",
    *,
    backend: str,
    record: RecordTarget | None = None,
) -> QuantizedBlocks:
    """Quantizes rows to nearest and records the chosen slots; the bits of `Format.quantize` and `guidance.pack_rows`.

    Args:
        x_NK: floating [N, K], last dimension contiguous.
        format: a registered name; only TRITON_FORMATS have a kernel.
        encode_scale: "row", "row-pow2", or a static number or 0-d tensor; None for MX formats.
        backend: "torch" or "triton".
        record: where the guidance of the rows goes; NVFP4 formats only.

    Returns:
        QuantizedBlocks of shape [N, K].

    Raises:
        KernelError: shapes, dtypes or a record that do not fit. FormatError: as `Format.quantize`.
    """
    if x_NK.ndim != 2 or (x_NK.shape[1] > 1 and x_NK.stride(1) != 1):
        raise KernelError(f"x must be [N, K] with contiguous rows, got {tuple(x_NK.shape)}, strides {x_NK.stride()}")
    if record is not None:
        check_record(record, format, *x_NK.shape)
    kernel = kernel_module(backend, "quantize_record", x_NK)
    if kernel is None or format not in TRITON_FORMATS:
        return ref.quantize_record(x_NK, format, encode_scale, record)
    fmt = get_format(format)
    if not x_NK.is_floating_point() or x_NK.shape[1] == 0 or x_NK.shape[1] % fmt.block_size:
        fmt.block_amax(x_NK)  # raises by name
    if isinstance(encode_scale, str):
        if encode_scale not in ("row", "row-pow2"):
            raise KernelError(f'the triton backend takes "row", "row-pow2" or a static scale, got {encode_scale!r}')
    elif encode_scale is None or (isinstance(encode_scale, Tensor) and encode_scale.ndim):
        raise KernelError("a static encode scale is a number or a 0-d tensor")
    return kernel.quantize_record(x_NK, format, encode_scale, record)


def write_kv(
    k_NGD: Tensor,
    v_NGD: Tensor,
    cache: PagedCache,
    slots_N: Tensor,
    *,
    backend: str,
    format: str = "nvfp4",
    encode_scales: tuple[float, float] = (1.0, 1.0),
    records: tuple[RecordTarget, RecordTarget] | None = None,
) -> None:
    """Writes K and V to a paged cache, quantized where it is FP4, and records the chosen slots.

    Args:
        k_NGD, v_NGD: floating [N, G, D], each row's G * D values contiguous (a slice of a fused QKV product is fine).
        cache: one layer; a dense one is written as it is, by torch on either backend.
        slots_N: int64 [N]; page * page_size + place. A negative slot is skipped.
        backend: "torch" or "triton".
        format: "nvfp4" or "nvfp4-exact".
        encode_scales: static S of K and of V; the cache's epilogues are 1/S.
        records: targets of K and of V, rows of G * D values.

    Raises:
        KernelError: shapes, dtypes, formats or records that do not fit.
    """
    N = slots_N.shape[0]
    shape = (N, cache.heads, cache.head_dim)
    for name, x in (("k", k_NGD), ("v", v_NGD)):
        if tuple(x.shape) != shape or x.stride()[1:] != (cache.head_dim, 1):
            raise KernelError(f"{name} must be {shape} with contiguous rows, got {tuple(x.shape)}, {x.stride()}")
    if slots_N.dtype != torch.int64 or slots_N.ndim != 1:
        raise KernelError(f"slots must be int64 [N], got {slots_N.dtype} {tuple(slots_N.shape)}")
    if cache.fp4 and format not in TRITON_FORMATS:
        raise KernelError(f"a packed cache holds {' or '.join(TRITON_FORMATS)}, not {format!r}")
    if records is not None:
        if not cache.fp4:
            raise KernelError("a dense cache chooses no slots: there is nothing to record")
        if records[0].bits != records[1].bits:
            raise KernelError("K and V are recorded at one width")
        if records[0].payload.stride(0) != records[1].payload.stride(0):
            raise KernelError("the payloads of K and V must have one row stride")
        for target in records:
            check_record(target, format, N, cache.heads * cache.head_dim)
    kernel = kernel_module(backend, "quantize_record", k_NGD, v_NGD, cache.k, slots_N)
    chosen = ref if kernel is None or not cache.fp4 else kernel
    chosen.write_kv(k_NGD, v_NGD, cache, slots_N, format, encode_scales, records)


def check_record(target: RecordTarget, format: str, N: int, K: int) -> None:
    code_planes, scale_planes = planes(format, target.bits)
    size = code_planes * (-(-K // 8)) + scale_planes * (-(-K // 16 // 8))
    p = target.payload
    if p.dtype != torch.uint8 or p.ndim != 2 or p.shape[1] != size or p.stride(1) != 1:
        raise KernelError(f"the payload must be uint8 [slots, {size}] of contiguous rows: {p.dtype} {tuple(p.shape)}")
    if target.slots.dtype != torch.int64 or tuple(target.slots.shape) != (N,):
        raise KernelError(f"a record's slots must be int64 [{N}], got {target.slots.dtype} {tuple(target.slots.shape)}")
    s = target.encode_scale
    if s is not None and (s.dtype != torch.float32 or tuple(s.shape) != (p.shape[0],)):
        raise KernelError(f"a record's encode scales must be f32 [{p.shape[0]}], got {s.dtype} {tuple(s.shape)}")
