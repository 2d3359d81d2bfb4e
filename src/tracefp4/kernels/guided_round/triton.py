"""One program per row, the row held whole as its blocks, [NB, 16] with NB a power of two, as in `quantize_record`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.formats import get_format
from tracefp4.kernels.triton_layout import Checked
from tracefp4.kernels.triton_math import (
    IEEE,
    block_amax,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    encode_scale_of,
    load_f32,
    multiplier,
    to_bf16,
    unrounded_scale,
)


@triton.jit
def _e4m3_index(u):
    """Continuous code index of an unrounded scale, f32: `formats.e4m3_index`, and 0 for NaN."""
    u = tl.minimum(tl.where(u == u, u, 0.0), 448.0)
    # From 2^-6 on the bits themselves are linear between codes; below, the step is 2^-9 throughout.
    normal = (u.to(tl.int32, bitcast=True) - (120 << 23)).to(tl.float32) * 9.5367431640625e-07  # 2^-20
    return tl.where(u < 0.015625, u * 512.0, normal)


@triton.jit
def _resolve_scale(u, low, WIDTH: tl.constexpr):
    """E4M3 bytes with lowest WIDTH bits `low` (int32) nearest to the unrounded scale u: `codec.decode_scales`."""
    if WIDTH == 8:
        return low
    else:
        STEP: tl.constexpr = 1 << WIDTH
        index, low_f = _e4m3_index(u), low.to(tl.float32)
        below = low_f + STEP * tl.floor((index - low_f) * (1.0 / STEP))
        above = below + STEP
        take_above = (below < 0.0) | (((above - index) < (index - below)) & (above <= 126.0))
        nearest = tl.where(take_above, above, below)
        return tl.where(nearest > 126.0, nearest - STEP, nearest).to(tl.int32)


@triton.jit
def _cell_rule(own, a_bits, bit):
    """The own magnitude if its mantissa bit fits, else the neighbour whose cell is nearer; a_bits: of |z|."""
    m = own & 7
    value = decode_e2m1(m).to(tl.int32, bitcast=True)
    # Outward above the middle of the own cell: the value itself, 2.125 and 4.25 (included) for 2 and 4; 0 always.
    middle = tl.where((m == 4) | (m == 6), value + 0x7FFFF, tl.where(m == 0, -1, value))
    outward = (a_bits > middle) & (m != 7)
    return tl.where((m & 1) == bit, m, tl.where(outward, m + 1, m - 1))


@triton.jit
def _bracket_rule(own, a_bits, bits, FULL: tl.constexpr):
    """Of the two grid values around |z| the one with the recorded bit, or nearest to the recorded code."""
    m = own & 7
    value = decode_e2m1(m).to(tl.int32, bitcast=True)
    is_nan = a_bits > 0x7F800000
    lower = tl.minimum(tl.where((a_bits < value) | is_nan, m - 1, m), 6)
    if FULL:
        rollout = tl.where((bits & 8) == (own & 8), bits & 7, -(bits & 7))
        return lower + (rollout > lower).to(tl.int32)
    else:
        return tl.where((lower & 1) == bits, lower, lower + 1)


@triton.jit
def _within_band(z, own, chosen, BAND: tl.constexpr):
    """`codec._within_band`: codes int32 of z, own and chosen."""
    a = tl.where((own & 8) != 0, -(own & 7), own & 7)
    b = tl.where((chosen & 8) != 0, -(chosen & 7), chosen & 7)
    va, vb = decode_e2m1(own), decode_e2m1(chosen)
    far = tl.abs(z - (va + vb) * 0.5) > tl.abs(va - vb) * BAND
    return tl.where((a != b) & (far | (tl.abs(a - b) > 1)), own, chosen)


@triton.jit
def _own_scale(
    own_scale, row, amax, STATIC: tl.constexpr, ENCODE_MAX: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """S of a row without a record, f32 [1]; STATIC: one for all, or one for every ROWS rows."""
    if STATIC:
        group = row // ROWS if ROWS else 0
        return tl.load(own_scale + group + tl.arange(0, 1))
    else:
        return encode_scale_of(tl.max(amax, axis=0, keep_dims=True), ENCODE_MAX, POW2)


@Checked
@triton.jit
def _round_rows(
    x, out, own_scale, payload, record_scale, valid, stale, x_stride,
    K: tl.constexpr, NB: tl.constexpr, EXACT: tl.constexpr, OWN_STATIC: tl.constexpr, POW2: tl.constexpr,
    ENCODE_MAX: tl.constexpr, GUIDED: tl.constexpr, S_STRIDE: tl.constexpr, CODE_PLANES: tl.constexpr,
    SCALE_PLANES: tl.constexpr, CELL: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, NB)
    i = b[:, None] * 16 + tl.arange(0, 16)[None, :]
    values = load_f32(x + row * x_stride + i, i < K)
    amax = block_amax(values)
    if GUIDED:
        guided = tl.load(valid + row).to(tl.int32) != 0
        if guided:
            s = tl.load(record_scale + row * S_STRIDE + tl.arange(0, 1))
        else:
            s = _own_scale(own_scale, row, amax, OWN_STATIC, ENCODE_MAX, POW2, ROWS_PER_SCALE)
    else:
        s = _own_scale(own_scale, row, amax, OWN_STATIC, ENCODE_MAX, POW2, ROWS_PER_SCALE)
    unrounded = unrounded_scale(amax, s, EXACT)
    byte = encode_e4m3(tl.where(unrounded == unrounded, unrounded, 448.0))
    if GUIDED:
        CODE_BYTES: tl.constexpr = K // 8
        SCALE_BYTES: tl.constexpr = (K // 16 + 7) // 8
        at = payload + row * (CODE_PLANES * CODE_BYTES + SCALE_PLANES * SCALE_BYTES)
        scales_at = at + CODE_PLANES * CODE_BYTES
        if guided:
            low = tl.zeros([NB], tl.int32)
            for bit in tl.static_range(SCALE_PLANES):
                plane = tl.load(scales_at + bit * SCALE_BYTES + b // 8, mask=b < K // 16, other=0).to(tl.int32)
                low |= ((plane >> (b % 8)) & 1) << bit
            byte = _resolve_scale(unrounded, low, SCALE_PLANES)
    z = values * multiplier(byte, s, EXACT)[:, None]
    codes = encode_e2m1(z)
    if GUIDED and CODE_PLANES > 0:
        if guided:
            bits = tl.zeros([NB, 16], tl.int32)
            c = b[:, None] * 2 + tl.arange(0, 2)[None, :]
            for bit in tl.static_range(CODE_PLANES):
                plane = tl.load(at + bit * CODE_BYTES + c, mask=c < CODE_BYTES, other=0).to(tl.int32)
                spread = tl.reshape(tl.broadcast_to(plane[:, :, None], (NB, 2, 8)), (NB, 16))
                bits |= ((spread >> (tl.arange(0, 16) % 8)[None, :]) & 1) << bit
            own = codes
            if CELL and CODE_PLANES == 4:
                codes = bits
            else:
                a_bits = z.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                if CELL:
                    chosen = _cell_rule(codes, a_bits, bits)
                else:
                    chosen = _bracket_rule(codes, a_bits, bits, CODE_PLANES == 4)
                codes = tl.where((byte == 0)[:, None], codes, chosen | (codes & 8))
            if BAND > 0:
                codes = tl.where(tl.load(stale + row).to(tl.int32) != 0, _within_band(z, own, codes, BAND), codes)
    effective = decode_e4m3(byte) * tl.div_rn(tl.zeros_like(s) + 1.0, s)
    y = decode_e2m1(codes) * effective[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        y = to_bf16(y)
    tl.store(out + row * K + i, y, mask=i < K)


@Checked
@triton.jit
def _partial_amax(x, out, M, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Program (e, p): the largest magnitude of part p of row e; NaN counts as 0."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.zeros([BLOCK], tl.float32)
    for step in range(STEPS):
        i = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        v = tl.abs(load_f32(x + row * M + i, i < M))
        best = tl.maximum(best, tl.where(v == v, v, 0.0))
    tl.store(out + row * tl.num_programs(1) + part + tl.arange(0, 1), tl.max(best, axis=0, keep_dims=True))


def group_amax(w_EM: Tensor) -> Tensor:
    """See `tracefp4.kernels.guided_round`; operands are checked there."""
    E, M = w_EM.shape
    block, steps = 2048, 16
    parts = max(1, triton.cdiv(M, block * steps))
    out = torch.empty(E, parts, dtype=torch.float32, device=w_EM.device)
    if E:
        _partial_amax[(E, parts)](w_EM, out, M, BLOCK=block, STEPS=steps, num_warps=4)
    return out.amax(-1) if E else out[:, 0]


def round_rows(
    x_NK: Tensor,
    format: str,
    own_scale: str | float | Tensor,
    payload: Tensor | None,
    record_scale: Tensor | None,
    valid: Tensor | None,
    code_planes: int,
    scale_planes: int,
    rule: str,
    rows_per_scale: int = 0,
    band: float | None = None,
    stale: Tensor | None = None,
) -> Tensor:
    """See `tracefp4.kernels.guided_round`; operands are checked there. No record: to nearest.

    rows_per_scale: where not 0, own_scale is f32 [groups], one for as many rows each.
    """
    N, K = x_NK.shape
    out = torch.empty(N, K, dtype=x_NK.dtype, device=x_NK.device)
    own: Tensor | None = None
    if isinstance(own_scale, Tensor):
        own = own_scale.to(x_NK.device, torch.float32)
    elif not isinstance(own_scale, str):
        own = torch.full((), own_scale, dtype=torch.float32, device=x_NK.device)  # no copy from the host
    blocks = max(8, triton.next_power_of_2(K // 16))
    if N:
        _round_rows[(N,)](
            x_NK, out, own, payload, record_scale, valid, stale, x_NK.stride(0),
            K=K, NB=blocks, EXACT=format == "nvfp4-exact", OWN_STATIC=own is not None, POW2=own_scale == "row-pow2"
            if isinstance(own_scale, str) else False, ENCODE_MAX=get_format(format).encode_max,
            GUIDED=payload is not None, S_STRIDE=1 if record_scale is not None and record_scale.ndim else 0,
            CODE_PLANES=code_planes, SCALE_PLANES=scale_planes, CELL=rule == "cell",
            ROWS_PER_SCALE=rows_per_scale, BAND=band if band is not None and stale is not None else 0.0,
            num_warps=min(8, max(1, blocks // (64 if N >= 1024 else 32))), **IEEE,
        )  # fmt: skip
    return out
