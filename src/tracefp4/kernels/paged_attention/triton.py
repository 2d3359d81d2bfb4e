"""Decode attention over a paged cache: one query token per sequence, split over the context.

Legend: B sequences, H query heads, G KV heads, R = H/G query heads of each, D head_dim, N tokens of a tile, U values
of an unpacking unit (a word of 8, or half a word of 4 where D = 64), W = D/U units of a row.

Each program takes one share of one (sequence, KV head)'s context and all R query heads of it. Scores are computed
transposed, [N, R] = K q^T, and so are outputs, [D, R] = V^T p^T: the cache is the large operand and sits in the
tensor core's row dimension, R in the column dimension, which may be as narrow as 8, so no work goes into padding.
Of an FP4 row, value j of every unit forms a matrix [N, W] of its own: unpacking a register of units gives U registers
of BF16 pairs, none of which has to move to another thread. The dots over j then add up (scores) or stay apart
(outputs, un-permuted by the second kernel). A second kernel adds the shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.paged_attention.cache import PagedCache
from tracefp4.kernels.triton_math import dot, from_bf16, to_bf16

INTERPRETED = triton.knobs.runtime.interpret


def _unpack_ptx(words: int) -> str:
    """PTX that turns `words` registers' values of two neighbouring units into U registers of scaled BF16 pairs.

    Outputs $0.., then the units (two 32-bit words, or one register with two half words), then the pair of scales.
    """
    u = 4 * words
    body = ["{", ".reg .b32 p, q, s, t, r;", f"mov.b32 s, ${u + words};"]
    if words == 2:
        body += [f"prmt.b32 p, ${u}, ${u + 1}, 0x5410;", f"prmt.b32 q, ${u}, ${u + 1}, 0x7632;"]
    else:
        body += [f"mov.b32 p, ${u};"]
    out = 0
    for half in ("p", "q")[:words]:
        for shift in (0, 3, 6):
            body += [f"shl.b32 t, {half}, {shift};", "and.b32 t, t, 0x81C081C0;", f"mul.bf16x2 ${out}, t, s;"]
            out += 1
        body += [f"shl.b32 t, {half}, 1;", "and.b32 t, t, 0x80008000;"]
        body += [f"shr.u32 r, {half}, 3;", "and.b32 r, r, 0x01800180;", "or.b32 t, t, r;"]
        body += [f"shr.u32 r, {half}, 7;", "and.b32 r, r, 0x00400040;", "or.b32 t, t, r;"]
        body += [f"mul.bf16x2 ${out}, t, s;"]
        out += 1
    return "\n".join([*body, "}"])


# "&": outputs are written while inputs are still to be read.
_PTX8 = tl.constexpr(_unpack_ptx(2))
_PTX8_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 3))
_PTX4 = tl.constexpr(_unpack_ptx(1))
_PTX4_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 2))

# Four E4M3 bytes -> SF * 2^119 as BF16. A byte shifted by 4 is a BF16 worth SF * 2^-120 (subnormals too); multiplied
# by 2^120 and by 2^119 in turn, since 2^239 is no BF16.
_PTX_SCALE = tl.constexpr(
    """{
    .reg .b32 a, b, c;
    mov.b32 c, $2;
    prmt.b32 a, c, 0, 0x4140;
    prmt.b32 b, c, 0, 0x4342;
    shl.b32 a, a, 4;
    shl.b32 b, b, 4;
    mov.b32 c, 0x7B807B80;
    mul.bf16x2 a, a, c;
    mul.bf16x2 b, b, c;
    mov.b32 c, 0x7B007B00;
    mul.bf16x2 $0, a, c;
    mul.bf16x2 $1, b, c;
    }"""
)


@triton.jit
def _unit_scales(byte, ASM: tl.constexpr):
    """E4M3 uint8 -> BF16 worth SF * 2^119."""
    if ASM:
        return tl.inline_asm_elementwise(_PTX_SCALE, "=&r,=&r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        sf = (byte.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        return (sf * 6.646139978924579e35).to(tl.bfloat16)


@triton.jit
def _value(half, scale, J: tl.constexpr):
    """Value J of half words (int32), times the block scale, * 2^-7, as BF16; exact. The plain form of the PTX."""
    if J == 3:
        bits = ((half << 1) & 0x8000) | ((half >> 3) & 0x0180) | ((half >> 7) & 0x0040)
    else:
        bits = (half << (3 * J)) & 0x81C0
    return ((bits << 16).to(tl.float32, bitcast=True) * from_bf16(scale)).to(tl.bfloat16)


@triton.jit
def _unpack8(words, scale, ASM: tl.constexpr):
    """int32 [N, W] words, BF16 [N, W] scales -> eight BF16 [N, W]."""
    if ASM:
        return tl.inline_asm_elementwise(
            _PTX8, _PTX8_CONSTRAINTS, [words, scale],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = words & 0xFFFF, (words >> 16) & 0xFFFF
        return (
            _value(low, scale, 0), _value(low, scale, 1), _value(low, scale, 2), _value(low, scale, 3),
            _value(high, scale, 0), _value(high, scale, 1), _value(high, scale, 2), _value(high, scale, 3),
        )  # fmt: skip


@triton.jit
def _unpack4(halves, scale, ASM: tl.constexpr):
    """int16 [N, W] half words, BF16 [N, W] scales -> four BF16 [N, W]."""
    if ASM:
        return tl.inline_asm_elementwise(
            _PTX4, _PTX4_CONSTRAINTS, [halves, scale],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        h = halves.to(tl.int32) & 0xFFFF
        return _value(h, scale, 0), _value(h, scale, 1), _value(h, scale, 2), _value(h, scale, 3)


@triton.jit
def _softmax_step(s_NR, tokens, stop, m, l, scale_log2):
    """Online softmax over one tile: (p BF16 [N, R], new maximum, new sum, factor on what was summed before)."""
    s = tl.where((tokens < stop)[:, None], s_NR * scale_log2, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, axis=0))
    p = tl.exp2(s - m_new[None, :])
    factor = tl.exp2(m - m_new)
    return to_bf16(p), m_new, l * factor + tl.sum(p, axis=0), factor


@triton.jit
def _page(tables, tokens, stop, PAGE: tl.constexpr, TILE: tl.constexpr, first, WIDE: tl.constexpr):
    """Pages of a tile's tokens; those past the end stay in the last page. WIDE: 64-bit offsets are needed."""
    if PAGE % TILE == 0:  # the tile lies within one page
        page = tl.load(tables + first // PAGE)
    else:
        page = tl.load(tables + tl.minimum(tokens, stop - 1) // PAGE)
        page = tl.max_constancy(page, 16)
    if WIDE:
        page = page.to(tl.int64)
    return page


@triton.jit
def _share(length, split, SPLITS, TILE: tl.constexpr):
    """Whole tiles [start, stop) of one split."""
    tiles = tl.cdiv(tl.cdiv(length, TILE), SPLITS)
    start = split * tiles * TILE
    return start, tl.minimum(start + tiles * TILE, length)


@triton.jit
def _attend_fp4(
    q, k, v, k_scales, v_scales, tables, lengths, partial, lse, scale_log2, table_stride, SPLITS,
    G: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, U: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """k int32 (U = 8) or int16 (U = 4) [P, G, PAGE, W], v [P, G, D/8, PAGE] words.

    partial f32 [B, G, SPLITS, R, U, W] holds each share's own softmax; lse f32 [B, G, SPLITS, R] its log2 weight.
    """
    W: tl.constexpr = D // U
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = _share(tl.load(lengths + b), split, SPLITS, TILE)
    at = ((b * G + g) * SPLITS + split) * R
    i, r, n = tl.arange(0, W), tl.arange(0, RP), tl.arange(0, TILE)
    if start >= stop:
        tl.store(lse + at + r, tl.full([RP], float("-inf"), tl.float32), mask=r < R)
        return
    q_WR = q + ((b * G + g) * R + r[None, :]) * D + i[:, None] * U
    real = (r < R)[None, :]
    q0 = tl.load(q_WR, mask=real, other=0.0)
    q1 = tl.load(q_WR + 1, mask=real, other=0.0)
    q2 = tl.load(q_WR + 2, mask=real, other=0.0)
    q3 = tl.load(q_WR + 3, mask=real, other=0.0)
    o0 = tl.zeros([W, RP], tl.float32)
    o1, o2, o3 = o0, o0, o0
    if U == 8:
        q4 = tl.load(q_WR + 4, mask=real, other=0.0)
        q5 = tl.load(q_WR + 5, mask=real, other=0.0)
        q6 = tl.load(q_WR + 6, mask=real, other=0.0)
        q7 = tl.load(q_WR + 7, mask=real, other=0.0)
        o4, o5, o6, o7 = o0, o0, o0, o0
    m = tl.full([RP], float("-inf"), tl.float32)
    l = tl.zeros([RP], tl.float32)
    tables += b.to(tl.int64) * table_stride
    block = tl.arange(0, D // 16)
    for first in tl.range(start, stop, TILE):
        tokens = first + n
        # Stale slots past the end hold some finite FP4 value, whose p is 0.
        row = _page(tables, tokens, stop, PAGE, TILE, first, WIDE) * G + g
        place = tokens % PAGE
        k_u = tl.load(k + (row * (PAGE * W) + place * W)[:, None] + i[None, :])
        k_s = tl.load(k_scales + (row * (PAGE * D // 16) + place * (D // 16))[:, None] + block[None, :])
        if U == 8:
            v_u = tl.load(v + (row * (PAGE * W) + place)[None, :] + (i * PAGE)[:, None])
        else:  # v holds words of two units
            v_u = tl.load(v + (row * (PAGE * W) + place * 2)[None, :] + (i // 2 * (PAGE * 2) + i % 2)[:, None])
        v_s = tl.load(v_scales + (row * (PAGE * D // 16) + place)[None, :] + (block * PAGE)[:, None])
        k_s, v_s = _unit_scales(k_s, ASM), _unit_scales(v_s, ASM)
        k_s = tl.reshape(tl.broadcast_to(k_s[:, :, None], (TILE, D // 16, 16 // U)), (TILE, W))
        v_s = tl.reshape(tl.broadcast_to(v_s[:, None, :], (D // 16, 16 // U, TILE)), (W, TILE))
        zero = tl.zeros([TILE, RP], tl.float32)
        if U == 8:
            k0, k1, k2, k3, k4, k5, k6, k7 = _unpack8(k_u, k_s, ASM)
            s = dot(k0, q0, zero)
            s = dot(k1, q1, s)
            s = dot(k2, q2, s)
            s = dot(k3, q3, s)
            s = dot(k4, q4, s)
            s = dot(k5, q5, s)
            s = dot(k6, q6, s)
            s = dot(k7, q7, s)
        else:
            k0, k1, k2, k3 = _unpack4(k_u, k_s, ASM)
            s = dot(k0, q0, zero)
            s = dot(k1, q1, s)
            s = dot(k2, q2, s)
            s = dot(k3, q3, s)
        p, m, l, factor = _softmax_step(s, tokens, stop, m, l, scale_log2)
        f = factor[None, :]
        if U == 8:
            v0, v1, v2, v3, v4, v5, v6, v7 = _unpack8(v_u, v_s, ASM)
            o4 = dot(v4, p, o4 * f)
            o5 = dot(v5, p, o5 * f)
            o6 = dot(v6, p, o6 * f)
            o7 = dot(v7, p, o7 * f)
        else:
            v0, v1, v2, v3 = _unpack4(v_u, v_s, ASM)
        o0 = dot(v0, p, o0 * f)
        o1 = dot(v1, p, o1 * f)
        o2 = dot(v2, p, o2 * f)
        o3 = dot(v3, p, o3 * f)
    # Sum and outputs of this share relative to its maximum; the second kernel needs the maximum and the sum as one.
    tl.store(lse + at + r, m + tl.log2(l), mask=r < R)
    inverse = (1.0 / l)[None, :]
    out = partial + (at + r[None, :]).to(tl.int64) * D + i[:, None]
    tl.store(out, o0 * inverse, mask=real)
    tl.store(out + W, o1 * inverse, mask=real)
    tl.store(out + 2 * W, o2 * inverse, mask=real)
    tl.store(out + 3 * W, o3 * inverse, mask=real)
    if U == 8:
        tl.store(out + 4 * W, o4 * inverse, mask=real)
        tl.store(out + 5 * W, o5 * inverse, mask=real)
        tl.store(out + 6 * W, o6 * inverse, mask=real)
        tl.store(out + 7 * W, o7 * inverse, mask=real)


@triton.jit
def _attend_dense(
    q, k, v, tables, lengths, partial, lse, scale_log2, table_stride, SPLITS,
    G: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """k, v BF16 [P, G, PAGE, D]; partial f32 [B, G, SPLITS, R, D]; scores upright, [R, N], as there is time to pad."""
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = _share(tl.load(lengths + b), split, SPLITS, TILE)
    at = ((b * G + g) * SPLITS + split) * R
    d, r, n = tl.arange(0, D), tl.arange(0, RP), tl.arange(0, TILE)
    if start >= stop:
        tl.store(lse + at + r, tl.full([RP], float("-inf"), tl.float32), mask=r < R)
        return
    real = (r < R)[:, None]
    q_RD = tl.load(q + ((b * G + g) * R + r[:, None]) * D + d[None, :], mask=real, other=0.0)
    o = tl.zeros([RP, D], tl.float32)
    m = tl.full([RP], float("-inf"), tl.float32)
    l = tl.zeros([RP], tl.float32)
    tables += b.to(tl.int64) * table_stride
    for first in tl.range(start, stop, TILE):
        tokens = first + n
        # Past the end the last token again: a stale slot may hold a NaN, which p = 0 would not hide.
        row = _page(tables, tokens, stop, PAGE, TILE, first, WIDE) * G + g
        at_N = row * (PAGE * D) + tl.minimum(tokens, stop - 1) % PAGE * D
        k_DN = tl.load(k + at_N[None, :] + d[:, None])
        v_ND = tl.load(v + at_N[:, None] + d[None, :])
        s = dot(q_RD, k_DN, tl.zeros([RP, TILE], tl.float32))
        s = tl.where((tokens < stop)[None, :], s * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        factor = tl.exp2(m - m_new)
        m, l = m_new, l * factor + tl.sum(p, axis=1)
        o = dot(to_bf16(p), v_ND, o * factor[:, None])
    tl.store(lse + at + r, m + tl.log2(l), mask=r < R)
    out = partial + (at + r[:, None]).to(tl.int64) * D + d[None, :]
    tl.store(out, o * (1.0 / l)[:, None], mask=real)


@triton.jit
def _combine(
    partial, lse, out, v_epilogue, SPLITS,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, U: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds the shares of one (sequence, query head): out [B, H, D]; 0 where the context is empty."""
    h, b = tl.program_id(0), tl.program_id(1)
    base = ((b * G + h // R) * SPLITS).to(tl.int64)
    c, d = tl.arange(0, CHUNK), tl.arange(0, D)
    m = -float("inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for first in tl.range(0, SPLITS, CHUNK):
        at = (base + first + c) * R + h % R
        x = tl.load(lse + at, mask=first + c < SPLITS, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(x, axis=0))
        # Shares without tokens were never written: neither their weight nor a stray NaN may count.
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.where(x == float("-inf"), 0.0, tl.exp2(x - reference))
        rows = tl.load(partial + at[:, None] * D + d[None, :], mask=(x != float("-inf"))[:, None], other=0.0)
        factor = tl.exp2(m - reference)
        acc = acc * factor + tl.sum(rows * weight[:, None], axis=0)
        total = total * factor + tl.sum(weight, axis=0)
        m = m_new
    y = tl.where(total == 0.0, 0.0, acc / tl.where(total == 0.0, 1.0, total)) * v_epilogue
    # Column u * (D / U) + i of a share is value u of unit i.
    place = (d % (D // U)) * U + d // (D // U)
    tl.store(out + (b * G * R + h).to(tl.int64) * D + place, to_bf16(y))


@dataclass(frozen=True)
class AttentionConfig:
    """How the work is cut: tokens of a tile, warps and pipeline stages of a program, programs wanted on the device."""

    tile: int
    num_warps: int
    num_stages: int
    programs: int
    asm: bool = True


def default_config(fp4: bool, head_dim: int, device: torch.device) -> AttentionConfig:
    """Settings meant for Hopper, as many programs as fit on it at once; under the interpreter small ones."""
    if INTERPRETED:
        return AttentionConfig(tile=32, num_warps=1, num_stages=1, programs=8, asm=False)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if fp4 and head_dim <= 128:
        return AttentionConfig(tile=64, num_warps=1, num_stages=2, programs=12 * sms)
    if fp4:
        return AttentionConfig(tile=32, num_warps=2, num_stages=2, programs=7 * sms)
    return AttentionConfig(tile=64, num_warps=4, num_stages=3, programs=4 * sms)


def paged_decode(
    q_BHD: Tensor,
    cache: PagedCache,
    tables_BP: Tensor,
    lengths_B: Tensor,
    scaling: float,
    max_length: int,
    config: AttentionConfig | None = None,
) -> Tensor:
    """See `tracefp4.kernels.paged_attention.paged_decode`; operands are checked there."""
    B, H, D = q_BHD.shape
    G = cache.heads
    R = H // G
    fp4 = cache.fp4
    config = config or default_config(fp4, D, q_BHD.device)
    splits = max(1, min(config.programs // (B * G), -(-max_length // max(config.tile, 256))))
    partial = torch.empty(B, G, splits, R, D, dtype=torch.float32, device=q_BHD.device)
    lse = torch.empty(B, G, splits, R, dtype=torch.float32, device=q_BHD.device)
    out = torch.empty_like(q_BHD)
    log2e = 1.4426950408889634
    rp = max(8 if fp4 else 16, triton.next_power_of_2(R))
    common = {"G": G, "R": R, "RP": rp, "D": D, "PAGE": cache.page_size, "TILE": config.tile}
    common["WIDE"] = 2 * cache.k.numel() >= 2**31
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    grid = (splits, G, B)
    unit = 1
    if fp4:
        unit = 8 if D >= 128 else 4
        k, v = (cache.k, cache.v) if unit == 8 else (cache.k.view(torch.int16), cache.v.view(torch.int16))
        scale = scaling * cache.k_epilogue * log2e * 2.0**7  # operands are E2M1 * SF * 2^-7
        _attend_fp4[grid](
            q_BHD, k, v, cache.k_scales, cache.v_scales, tables_BP, lengths_B, partial, lse, scale,
            tables_BP.stride(0), splits, U=unit, ASM=config.asm, **common, **launch,
        )  # fmt: skip
    else:
        scale = scaling * cache.k_epilogue * log2e
        _attend_dense[grid](
            q_BHD, cache.k, cache.v, tables_BP, lengths_B, partial, lse, scale, tables_BP.stride(0), splits,
            **common, **launch,
        )  # fmt: skip
    epilogue = cache.v_epilogue * (2.0**7 if fp4 else 1.0)
    _combine[(H, B)](partial, lse, out, epilogue, splits, G=G, R=R, D=D, U=unit, CHUNK=16, num_warps=4)
    return out
