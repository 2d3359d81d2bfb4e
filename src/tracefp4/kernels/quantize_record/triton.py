"""One pass from activations to packed codes, block scales, encode scale and guidance bits; K and V into the cache.

One program per row, the row held whole as its blocks, [NB, 16] with NB a power of two. Padding values are zeros, whose
codes, scales and plane bits are zeros too, so a plane's last byte is padded as the record wants it. A thread loads
eight consecutive values (16 bytes of BF16), which are what a word of codes or a byte of a plane needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.kernels.paged_attention.cache import PagedCache
from tracefp4.kernels.quantize_record.ref import RecordTarget, planes
from tracefp4.kernels.triton_layout import Checked
from tracefp4.kernels.triton_math import (
    IEEE,
    block_amax,
    encode_e2m1,
    encode_e4m3,
    encode_scale_of,
    follow,
    following,
    load_f32,
    multiplier,
    unrounded_scale,
)


@triton.jit
def _gather_bits(values, NB: tl.constexpr, PER: tl.constexpr, WIDTH: tl.constexpr):
    """int32 [NB, 16], each below 2^WIDTH -> int32 [NB, 16/PER]: PER neighbours in one number, the first lowest."""
    shifted = values << (tl.arange(0, 16) % PER * WIDTH)[None, :]
    return tl.sum(tl.reshape(shifted, (NB, 16 // PER, PER)), axis=2)


@triton.jit
def round_row(x, s, amax, EXACT: tl.constexpr):
    """(codes int32 [NB, 16], scale bytes int32 [NB]) of f32 x at encode scale s [1]."""
    byte = encode_e4m3(unrounded_scale(amax, s, EXACT))
    return encode_e2m1(x * multiplier(byte, s, EXACT)[:, None]), byte


@triton.jit
def store_record(
    payload, codes, byte, K: tl.constexpr, NB: tl.constexpr, CODE_PLANES: tl.constexpr, SCALE_PLANES: tl.constexpr
):
    """The planes of one row, from its first byte on."""
    code_bytes: tl.constexpr = K // 8
    scale_bytes: tl.constexpr = (K // 16 + 7) // 8
    c = tl.arange(0, NB)[:, None] * 2 + tl.arange(0, 2)[None, :]
    b = tl.arange(0, NB // 8)
    for bit in tl.static_range(CODE_PLANES):
        plane = _gather_bits((codes >> bit) & 1, NB, 8, 1)
        tl.store(payload + bit * code_bytes + c, plane.to(tl.uint8), mask=c < code_bytes)
    for bit in tl.static_range(SCALE_PLANES):
        plane = tl.sum(tl.reshape((byte >> bit) & 1, (NB // 8, 8)) << tl.arange(0, 8)[None, :], axis=1)
        tl.store(payload + CODE_PLANES * code_bytes + bit * scale_bytes + b, plane.to(tl.uint8), mask=b < scale_bytes)


@Checked
@triton.jit
def _quantize_rows(
    x, codes_out, scales_out, encode_out, static_scale, payload, record_scale, slots, x_stride,
    K: tl.constexpr, NB: tl.constexpr, EXACT: tl.constexpr, STATIC: tl.constexpr, POW2: tl.constexpr,
    ENCODE_MAX: tl.constexpr, RECORD: tl.constexpr, RECORD_SCALE: tl.constexpr,
    RECORD_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, CODE_PLANES: tl.constexpr, SCALE_PLANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, NB)
    i = b[:, None] * 16 + tl.arange(0, 16)[None, :]
    values = load_f32(x + row * x_stride + i, i < K)
    amax = block_amax(values)
    if STATIC:
        s = tl.load(static_scale + tl.arange(0, 1))
    else:
        s = encode_scale_of(tl.max(amax, axis=0, keep_dims=True), ENCODE_MAX, POW2)
        tl.store(encode_out + row + tl.arange(0, 1), s)
    codes, byte = round_row(values, s, amax, EXACT)
    w = b[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(codes_out + row * (K // 8) + w, _gather_bits(codes, NB, 8, 4), mask=w < K // 8)
    tl.store(scales_out + row * (K // 16) + b, byte.to(tl.uint8), mask=b < K // 16)
    if RECORD:
        slot = tl.load(slots + row)
        if slot >= 0:
            store_record(payload + slot * RECORD_STRIDE, codes, byte, K, NB, CODE_PLANES, SCALE_PLANES)
            if RECORD_SCALE:
                tl.store(record_scale + slot * SCALE_STRIDE + tl.arange(0, 1), s)


@triton.jit
def _cache_halves(codes, NB: tl.constexpr):
    """int32 codes [NB, 16] -> int32 [NB, 4]: half words of the cache's bit order."""
    j = (tl.arange(0, 16) % 4)[None, :]
    a = ((codes & 8) << 4) | ((codes & 7) << 1)
    b = ((codes & 7) << 4) | (codes >> 3)
    placed = tl.where(j < 2, a, b) << tl.where(j % 2 == 0, 8, 0)
    return tl.sum(tl.reshape(placed, (NB, 4, 4)), axis=2)


@Checked
@triton.jit
def _write_kv(
    k, v, k_out, v_out, k_scales, v_scales, slots, k_stride, v_stride, k_static, v_static,
    k_payload, v_payload, k_slots, v_slots,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, NB: tl.constexpr, EXACT: tl.constexpr,
    RECORD: tl.constexpr, RECORD_STRIDE: tl.constexpr, CODE_PLANES: tl.constexpr, SCALE_PLANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, 0) quantizes a row's K, (row, 1) its V. k_out, v_out: the cache's words seen as int16."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_v = tl.program_id(1) == 1
    K: tl.constexpr = G * D
    b = tl.arange(0, NB)
    i = b[:, None] * 16 + tl.arange(0, 16)[None, :]
    start = tl.where(is_v, row * v_stride, row * k_stride)
    source = v if is_v else k
    values = load_f32(source + start + i, i < K)
    static = tl.where(is_v, v_static, k_static)
    s = tl.full([1], 0.0, tl.float32) + static
    codes, byte = round_row(values, s, block_amax(values), EXACT)
    slot = tl.load(slots + row)
    if slot >= 0:
        page, place = slot // PAGE, slot % PAGE
        halves = _cache_halves(codes, NB).to(tl.int16)
        h = b[:, None] * 4 + tl.arange(0, 4)[None, :]
        g, h_D = page * G + h // (D // 4), h % (D // 4)
        gs, block = page * G + b // (D // 16), b % (D // 16)
        if is_v:
            unit, half = h_D // 2, h_D % 2
            at = (g * (D // 8) + unit) * (2 * PAGE) + place // 2 * 4 + half * 2 + place % 2
            tl.store(v_out + at, halves, mask=h < K // 4)
            tl.store(v_scales + (gs * (D // 16) + block) * PAGE + place, byte.to(tl.uint8), mask=b < K // 16)
        else:
            unit, half = h_D // 8 * 4 + h_D % 4, h_D // 4 % 2
            at = (g * PAGE + place) * (D // 4) + unit // 2 * 4 + half * 2 + unit % 2
            tl.store(k_out + at, halves, mask=h < K // 4)
            tl.store(k_scales + (gs * PAGE + place) * (D // 16) + block, byte.to(tl.uint8), mask=b < K // 16)
    if RECORD:
        target = tl.load((v_slots if is_v else k_slots) + row)
        if target >= 0:
            payload = (v_payload if is_v else k_payload) + target * RECORD_STRIDE
            store_record(payload, codes, byte, K, NB, CODE_PLANES, SCALE_PLANES)


def row_blocks(K: int, N: int) -> tuple[int, int]:
    """(NB, warps) of a row: fewer warps spend fewer instructions, more of them finish a lone row sooner."""
    blocks = max(8, triton.next_power_of_2(K // 16))
    return blocks, min(8, max(1, blocks // (64 if N >= 1024 else 32)))


def quantize_record(
    x_NK: Tensor, format: str, encode_scale: str | Tensor | float, target: RecordTarget | None
) -> QuantizedBlocks:
    """See `tracefp4.kernels.quantize_record.quantize_record`; operands are checked there."""
    N, K = x_NK.shape
    fmt = get_format(format)
    device = x_NK.device
    codes = torch.empty(N, K // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(N, K // 16, dtype=torch.uint8, device=device)
    static = not isinstance(encode_scale, str)
    if isinstance(encode_scale, str):
        S = torch.empty(N, 1, dtype=torch.float32, device=device)
    elif isinstance(encode_scale, Tensor):
        S = encode_scale.to(device, torch.float32)
    else:
        S = torch.full((), encode_scale, dtype=torch.float32, device=device)  # no copy from the host
    blocks, warps = row_blocks(K, N)
    code_planes, scale_planes = (0, 0) if target is None else planes(format, target.bits)
    record_scale = None if target is None else target.encode_scale
    if N:
        _quantize_rows[(N,)](
            x_NK, codes.view(torch.int32), scales, S, S,
            None if target is None else target.payload, record_scale, None if target is None else target.slots,
            x_NK.stride(0), K=K, NB=blocks, EXACT=format == "nvfp4-exact", STATIC=static,
            POW2=encode_scale == "row-pow2" if not static else False, ENCODE_MAX=fmt.encode_max,
            RECORD=target is not None, RECORD_SCALE=record_scale is not None,
            RECORD_STRIDE=0 if target is None else target.payload.stride(0),
            SCALE_STRIDE=0 if record_scale is None else record_scale.stride(0),
            CODE_PLANES=code_planes, SCALE_PLANES=scale_planes, num_warps=warps, **IEEE, **following(),
        )  # fmt: skip
    return QuantizedBlocks(codes, scales, S, format, (N, K))


def write_kv(
    k_NGD: Tensor,
    v_NGD: Tensor,
    cache: PagedCache,
    slots_N: Tensor,
    format: str,
    encode_scales: tuple[float, float],
    targets: tuple[RecordTarget, RecordTarget] | None,
) -> None:
    """See `tracefp4.kernels.quantize_record.write_kv`; operands are checked there."""
    N, G, D = k_NGD.shape
    if N == 0:
        return
    blocks, warps = row_blocks(G * D, N)
    kt, vt = targets or (None, None)
    code_planes, scale_planes = (0, 0) if kt is None else planes(format, kt.bits)
    _write_kv[(N, 2)](
        k_NGD, v_NGD, cache.k.view(torch.int16), cache.v.view(torch.int16), cache.k_scales, cache.v_scales,
        slots_N, k_NGD.stride(0), v_NGD.stride(0), encode_scales[0], encode_scales[1],
        kt and kt.payload, vt and vt.payload, kt and kt.slots, vt and vt.slots,
        G=G, D=D, PAGE=cache.page_size, NB=blocks, EXACT=format == "nvfp4-exact", RECORD=kt is not None,
        RECORD_STRIDE=0 if kt is None else kt.payload.stride(0),
        CODE_PLANES=code_planes, SCALE_PLANES=scale_planes, num_warps=warps, **IEEE, **following(),
    )  # fmt: skip
