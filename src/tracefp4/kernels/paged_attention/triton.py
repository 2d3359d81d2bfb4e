"""Decode attention over a paged cache: one query token per sequence, split over the context.

Legend: B sequences, H query heads, G KV heads, R = H/G query heads of each, D head_dim, N tokens of a tile, U values
of an unpacking unit (a word of 8, or half a word of 4 where D = 64), W = D/U units of a row.

A share is a part of one (sequence, KV head)'s context with all R query heads of it. Either every program has one share,
contexts being cut into SPLITS, or the tiles of all contexts, one behind the other, are cut into as many equal parts as
there are programs, and a program has the shares that its part consists of. Scores are computed transposed, [N, R] =
K q^T, and so are outputs, [D, R] = V^T p^T: the cache is the large operand and sits in the tensor core's row
dimension, R in the column dimension, which may be as narrow as 8, so no work goes into padding. Of an FP4 row, value j
of every unit forms a matrix [N, W] of its own: unpacking a register of units gives U registers of FP16 pairs, none of
which has to move to another thread. The dots over j then add up (scores) or stay apart (outputs, until a share is
stored). A second kernel adds the shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.paged_attention.cache import PagedCache
from tracefp4.kernels.triton_layout import Checked, require_pairs
from tracefp4.kernels.triton_math import dot, follow, following, from_bf16, to_bf16
from tracefp4.kernels.triton_unpack import (
    VALUE_EXPONENT,
    block_rows,
    block_scales,
    spread,
    spread_columns,
    spread_rows,
    token_scales,
    unpack,
)

INTERPRETED = triton.knobs.runtime.interpret
P_EXPONENT = tl.constexpr(8)
HIGHEST = tl.constexpr(15)


@triton.jit
def _pages(tables, tokens, stop, PAGE: tl.constexpr, TILE: tl.constexpr, first, WIDE: tl.constexpr):
    """Pages of a tile's tokens; those past the end stay in the last page. WIDE: 64-bit offsets are needed."""
    if PAGE % TILE == 0:  # the tile lies within one page
        page = tl.load(tables + tl.minimum(first, stop - 1) // PAGE)
    else:
        page = tl.load(tables + tl.minimum(tokens, stop - 1) // PAGE)
        page = tl.max_constancy(page, 4)
    if WIDE:
        page = page.to(tl.int64)
    return page


@triton.jit
def _tiles_of_split(length, SPLITS, TILE: tl.constexpr):
    """Whole tiles of every split but the last ones, which may have fewer or none."""
    return tl.cdiv(tl.cdiv(length, TILE), SPLITS)


@triton.jit
def _second_operand(x, ROWS: tl.constexpr):
    """FP16 [ROWS, 8], which lies in registers as a dot left it -> the same as the next dot's second operand wants it.

    Triton would do with shuffles what one instruction does for 8 x 8 values: it transposes them in place, whereupon
    the transposition is undone in name only. This holds for one warp, whose dot results all lie in one known layout.
    """
    y = tl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2
    )
    return tl.reshape(tl.permute(tl.reshape(y, (ROWS // 8, 8, 8)), (0, 2, 1)), (ROWS, 8))


@triton.jit
def _query_part(q, X: tl.constexpr, MOVE: tl.constexpr):
    """FP16 [X, 8] as the loop's dots want their second operand: once, and not in every turn."""
    if MOVE:
        unit = (tl.arange(0, X)[:, None] == tl.arange(0, X)[None, :]).to(tl.float16)
        q = _second_operand(tl.dot(unit, q).to(tl.float16), X)
    return q


@triton.jit
def _two_halves(a, b, ROWS: tl.constexpr, N: tl.constexpr):
    """Stacks two FP16 matrices of 8 units into one of 16: [8, N] twice -> [16, N] if ROWS, else [N, 8] -> [N, 16]."""
    x = tl.join(a, b)
    if ROWS:
        return tl.reshape(tl.permute(x, (2, 0, 1)), (16, N))
    else:
        return tl.reshape(x, (N, 16))


@triton.jit
def _share_fp4(
    q, k, v, k_scales, v_scales, tables, partial, lse, scale_log2, table_stride, b, g, start, stop, at,
    G: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr, ASM: tl.constexpr, MOVE: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """Tokens [start, stop) of sequence b and KV head g, to share number `at`.

    k int32 [P, G, PAGE, W], v int32 [P, G, W, PAGE]; k_scales and v_scales seen as int16, two bytes in one. partial
    f32 [shares, R, D] holds each share's own softmax; lse f32 [shares, R] its log2 weight.
    """
    W: tl.constexpr = D // 8  # words of a row
    SPREAD: tl.constexpr = W >= 16
    X: tl.constexpr = W if W >= 16 else 16  # units of a part: below 16 words, half words
    ALIGNED: tl.constexpr = PAGE % TILE == 0
    at *= R
    x, r, n = tl.arange(0, X), tl.arange(0, RP), tl.arange(0, TILE)
    tables += b.to(tl.int64) * table_stride
    i, block, pair, n2 = tl.arange(0, W), tl.arange(0, D // 16), tl.arange(0, D // 32), tl.arange(0, TILE // 2)
    nk = spread(n) if SPREAD else n  # rows of K in the order that makes p's rows those of V
    # Asked for before the queries: the first tile's loads wait for it.
    k_page = _pages(tables, start + nk, stop, PAGE, TILE, start, WIDE)
    if not ALIGNED:
        v_page = _pages(tables, start + n, stop, PAGE, TILE, start, WIDE)
        s_page = _pages(tables, start + 2 * n2, stop, PAGE, TILE, start, WIDE)
    # Queries, times a power of two that brings the largest of each into [1, 2): FP16 then holds their BF16 values.
    J: tl.constexpr = 8 if SPREAD else 4
    if SPREAD:
        unit = spread(x)
        q_d = unit // 4 * 32 + unit % 4 * 4
    else:
        q_d = x // 8 * 32 + x % 2 * 16 + x // 2 % 4 * 4
    v_d = tl.arange(0, J) % 4 + tl.arange(0, J) // 4 * 16  # value 4 lies in the next block
    q_XRJ = q + (b * G + g) * R * D + r[None, :, None] * D + q_d[:, None, None] + v_d[None, None, :]
    all_q = from_bf16(tl.load(q_XRJ, mask=(r < R)[None, :, None], other=0.0))
    exponent = (tl.max(tl.max(tl.abs(all_q), axis=2), axis=0).to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = (exponent << 23).to(tl.float32, bitcast=True) * scale_log2
    all_q = (all_q * up[None, :, None]).to(tl.float16)
    o0 = tl.zeros([X, RP], tl.float32)
    o1, o2, o3 = o0, o0, o0
    if SPREAD:
        even, odd = tl.split(tl.reshape(all_q, (X, RP, 2, 2, 2)))
        q_04, q_26 = tl.split(even)
        q_15, q_37 = tl.split(odd)
        q0, q4 = tl.split(q_04)
        q1, q5 = tl.split(q_15)
        q2, q6 = tl.split(q_26)
        q3, q7 = tl.split(q_37)
        q4, q5 = _query_part(q4, X, MOVE), _query_part(q5, X, MOVE)
        q6, q7 = _query_part(q6, X, MOVE), _query_part(q7, X, MOVE)
        o4, o5, o6, o7 = o0, o0, o0, o0
    else:
        even, odd = tl.split(tl.reshape(all_q, (X, RP, 2, 2)))
        q0, q2 = tl.split(even)
        q1, q3 = tl.split(odd)
    q0, q1 = _query_part(q0, X, MOVE), _query_part(q1, X, MOVE)
    q2, q3 = _query_part(q2, X, MOVE), _query_part(q3, X, MOVE)
    m = tl.full([RP], float("-inf"), tl.float32)
    ones = tl.full([16, TILE], 1.0, tl.float16)
    l = tl.zeros([16, RP], tl.float32)  # every row the sum of p
    for first in tl.range(start, stop, TILE):
        # Stale slots past the end hold some finite FP4 value, whose p is 0.
        if ALIGNED:
            row, place = k_page * G + g, (first // TILE) % (PAGE // TILE) * TILE
            k_at, v_at = row * (PAGE * W) + place * W, row * (PAGE * W) + place
            # Whole tiles lie side by side in memory: addresses that differ by constants.
            k_u = tl.reshape(tl.load(k + k_at + tl.arange(0, TILE * W)), (TILE, W))
            ks_at, vs_at = (
                row * (PAGE * D // 32) + place * (D // 32),
                row * (PAGE * D // 32) + ((first // TILE) % (PAGE // TILE) * (TILE // 2)),
            )
            k_s = tl.reshape(tl.load(k_scales + ks_at + tl.arange(0, TILE * (D // 32))), (TILE, D // 32))
            if SPREAD:
                k_u, k_s = spread_rows(k_u, TILE, W), spread_rows(k_s, TILE, D // 32)
            if PAGE == TILE:
                v_u = tl.reshape(tl.load(v + v_at + tl.arange(0, TILE * W)), (W, TILE))
                v_s = tl.reshape(tl.load(v_scales + vs_at + tl.arange(0, TILE * (D // 32))), (D // 16, TILE // 2))
            else:
                v_u = tl.load(v + v_at + (n[None, :] + i[:, None] * PAGE))
                v_s = tl.load(v_scales + vs_at + (n2[None, :] + block[:, None] * (PAGE // 2)))
        else:
            k_row, v_row, s_row = k_page * G + g, v_page * G + g, s_page * G + g
            k_place, v_place, s_place = (first + nk) % PAGE, (first + n) % PAGE, (first // 2 + n2) % (PAGE // 2)
            k_u = tl.load(k + (k_row * (PAGE * W) + k_place * W)[:, None] + i[None, :])
            v_u = tl.load(v + (v_row * (PAGE * W) + v_place)[None, :] + (i * PAGE)[:, None])
            k_s = tl.load(k_scales + (k_row * (PAGE * D // 32) + k_place * (D // 32))[:, None] + pair[None, :])
            v_s = tl.load(v_scales + (s_row * (PAGE * D // 32) + s_place)[None, :] + (block * (PAGE // 2))[:, None])
            v_page = _pages(tables, first + TILE + n, stop, PAGE, TILE, first, WIDE)
            s_page = _pages(tables, first + TILE + 2 * n2, stop, PAGE, TILE, first, WIDE)
        # Wanted by the next tile's loads: known an iteration before.
        k_page = _pages(tables, first + TILE + nk, stop, PAGE, TILE, first + TILE, WIDE)
        if SPREAD:
            k_u = spread_columns(k_u, TILE, W)
        k0, k1, k2, k3, k4, k5, k6, k7 = unpack(k_u, block_scales(k_s, TILE, W, SPREAD), False, ASM)
        zero = tl.zeros([TILE, RP], tl.float32)
        if SPREAD:
            s = dot(k0, q0, zero)
            s = dot(k1, q1, s)
            s = dot(k2, q2, s)
            s = dot(k3, q3, s)
            s = dot(k4, q4, s)
            s = dot(k5, q5, s)
            s = dot(k6, q6, s)
            s = dot(k7, q7, s)
        else:
            s = dot(_two_halves(k0, k4, False, TILE), q0, zero)
            s = dot(_two_halves(k1, k5, False, TILE), q1, s)
            s = dot(_two_halves(k2, k6, False, TILE), q2, s)
            s = dot(_two_halves(k3, k7, False, TILE), q3, s)
        if first + TILE > stop:
            s = tl.where((first + nk < stop)[:, None], s, float("-inf"))
        # p = 2^(s - m) lies below 2^P_EXPONENT, so that FP16 keeps all bits of small ones. LAZY: m stays as long as p
        # lies below 2^HIGHEST, which FP16 holds too; then nothing is exchanged between threads but one vote.
        if LAZY:
            own = tl.max(tl.reshape(s, (TILE // 8, 8, RP)), axis=0)
            outgrown = own * scale[None, :] > (m + HIGHEST)[None, :]
            outgrown = tl.max(tl.reshape(outgrown.to(tl.int32), (8, RP // 2, 2)), axis=2)
            if tl.max(outgrown) > 0:
                m_new = tl.maximum(m, tl.max(s, axis=0) * scale - P_EXPONENT)
                f = tl.exp2(m - m_new)[None, :]
                m = m_new
                l *= f
                o0, o1, o2, o3 = o0 * f, o1 * f, o2 * f, o3 * f
                if SPREAD:
                    o4, o5, o6, o7 = o4 * f, o5 * f, o6 * f, o7 * f
            p = tl.exp2(s * scale[None, :] - m[None, :]).to(tl.float16)
        else:
            m_new = tl.maximum(m, tl.max(s, axis=0) * scale - P_EXPONENT)
            p = tl.exp2(s * scale[None, :] - m_new[None, :]).to(tl.float16)
            f = tl.exp2(m - m_new)[None, :]
            m = m_new
            l *= f
            o0, o1, o2, o3 = o0 * f, o1 * f, o2 * f, o3 * f
            if SPREAD:
                o4, o5, o6, o7 = o4 * f, o5 * f, o6 * f, o7 * f
        if MOVE:
            p = _second_operand(p, TILE)
        if SPREAD:
            v_u = spread_columns(block_rows(v_u, W, TILE), W, TILE)
        v0, v1, v2, v3, v4, v5, v6, v7 = unpack(v_u, token_scales(v_s, W, TILE, SPREAD), True, ASM)
        l = dot(ones, p, l)
        if SPREAD:
            o0 = dot(v0, p, o0)
            o1 = dot(v1, p, o1)
            o2 = dot(v2, p, o2)
            o3 = dot(v3, p, o3)
            o4 = dot(v4, p, o4)
            o5 = dot(v5, p, o5)
            o6 = dot(v6, p, o6)
            o7 = dot(v7, p, o7)
        else:
            o0 = dot(_two_halves(v0, v4, True, TILE), p, o0)
            o1 = dot(_two_halves(v1, v5, True, TILE), p, o1)
            o2 = dot(_two_halves(v2, v6, True, TILE), p, o2)
            o3 = dot(_two_halves(v3, v7, True, TILE), p, o3)
    # Sum and outputs of this share relative to its maximum; the second kernel needs the maximum and the sum as one.
    l_R = tl.max(l, axis=0)
    tl.store(lse + at + r, m + tl.log2(l_R), mask=r < R)
    inverse = (1.0 / l_R)[None, :]
    o0, o1, o2, o3 = o0 * inverse, o1 * inverse, o2 * inverse, o3 * inverse
    out = partial + (at + r[None, :, None]).to(tl.int64) * D
    if SPREAD:
        o4, o5, o6, o7 = o4 * inverse, o5 * inverse, o6 * inverse, o7 * inverse
        o = tl.join(tl.join(tl.join(o0, o4), tl.join(o2, o6)), tl.join(tl.join(o1, o5), tl.join(o3, o7)))
        o = tl.reshape(o, (X, RP, 8))
        d = ((x & ~15) | (x & 7) << 1 | (x & 8) >> 3)[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
    else:
        o = tl.reshape(tl.join(tl.join(o0, o2), tl.join(o1, o3)), (X, RP, 4))
        d = (x % 8 * 8 + x // 8 * 4)[:, None, None] + tl.arange(0, 4)[None, None, :]
    tl.store(out + d, o, mask=(r < R)[None, :, None])


@triton.jit
def _share_dense(
    q, k, v, tables, partial, lse, scale_log2, table_stride, b, g, start, stop, at,
    G: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """k, v BF16 [P, G, PAGE, D]; partial f32 [shares, R, D]; scores upright, [R, N], as there is time to pad."""
    at *= R
    d, r, n = tl.arange(0, D), tl.arange(0, RP), tl.arange(0, TILE)
    real = (r < R)[:, None]
    q_RD = tl.load(q + ((b * G + g) * R + r[:, None]) * D + d[None, :], mask=real, other=0.0)
    o = tl.zeros([RP, D], tl.float32)
    m = tl.full([RP], float("-inf"), tl.float32)
    l = tl.zeros([RP], tl.float32)
    tables += b.to(tl.int64) * table_stride
    page = _pages(tables, start + n, stop, PAGE, TILE, start, WIDE)
    for first in tl.range(start, stop, TILE):
        # Past the end the last token again: a stale slot may hold a NaN, which p = 0 would not hide.
        tokens = tl.minimum(first + n, stop - 1)
        if PAGE % TILE == 0:
            tile = (page * G + g) * (PAGE * D) + (first // TILE) % (PAGE // TILE) * (TILE * D)
            at_N = (tokens - first) * D
            k_DN = tl.load(k + tile + (at_N[None, :] + d[:, None]))
            v_ND = tl.load(v + tile + (at_N[:, None] + d[None, :]))
        else:
            at_N = (page * G + g) * (PAGE * D) + tokens % PAGE * D
            k_DN = tl.load(k + at_N[None, :] + d[:, None])
            v_ND = tl.load(v + at_N[:, None] + d[None, :])
        # Wanted by the next tile's loads: known an iteration before.
        page = _pages(tables, first + TILE + n, stop, PAGE, TILE, first + TILE, WIDE)
        s = dot(q_RD, k_DN, tl.zeros([RP, TILE], tl.float32))
        s = tl.where((first + n < stop)[None, :], s * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        factor = tl.exp2(m - m_new)
        m, l = m_new, l * factor + tl.sum(p, axis=1)
        o = dot(to_bf16(p), v_ND, o * factor[:, None])
    tl.store(lse + at + r, m + tl.log2(l), mask=r < R)
    out = partial + (at + r[:, None]).to(tl.int64) * D + d[None, :]
    tl.store(out, o * (1.0 / l)[:, None], mask=real)


@Checked
@triton.jit
def _attend(
    q, k, v, k_scales, v_scales, tables, lengths, partial, lse, scale_log2, table_stride, SPLITS,
    G: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr, FP4: tl.constexpr, ASM: tl.constexpr, MOVE: tl.constexpr, LAZY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One share a program: split, KV head, sequence; shares [B, G, SPLITS]."""
    follow(PDL)
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + b)
    tokens = _tiles_of_split(length, SPLITS, TILE) * TILE
    start, stop = split * tokens, tl.minimum((split + 1) * tokens, length)
    at = (b * G + g) * SPLITS + split
    if start >= stop:
        return
    if FP4:
        _share_fp4(
            q, k, v, k_scales, v_scales, tables, partial, lse, scale_log2, table_stride, b, g, start, stop, at,
            G, R, RP, D, PAGE, TILE, WIDE, ASM, MOVE, LAZY,
        )  # fmt: skip
    else:
        _share_dense(
            q, k, v, tables, partial, lse, scale_log2, table_stride, b, g, start, stop, at,
            G, R, RP, D, PAGE, TILE, WIDE,
        )  # fmt: skip


@triton.jit
def _add_shares(
    partial, lse, out, v_epilogue, context, first, count, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """A context's output from its shares first to first + count - 1, in that order, by whichever program is last."""
    r, d = tl.arange(0, RP), tl.arange(0, D)
    real = r < R
    m = tl.full([RP], float("-inf"), tl.float32)
    total = tl.zeros([RP], tl.float32)
    acc = tl.zeros([RP, D], tl.float32)
    for i in tl.range(0, count, num_stages=1):
        row = (first + i) * R + r
        x = tl.load(lse + row, mask=real, other=0.0)
        values = tl.load(partial + row.to(tl.int64)[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
        m_new = tl.maximum(m, x)
        weight, factor = tl.exp2(x - m_new), tl.exp2(m - m_new)
        acc, total = acc * factor[:, None] + values * weight[:, None], total * factor + weight
        m = m_new
    y = acc / total[:, None] * v_epilogue
    tl.store(out + (context * R + r).to(tl.int64)[:, None] * D + d[None, :], to_bf16(y), mask=real[:, None])


@triton.jit
def _clear_empty(lengths, out, b, B, STEP, G: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr):
    """Outputs of sequences b, b + STEP, ... that have no tokens: 0."""
    r, d = tl.arange(0, RP), tl.arange(0, D)
    while b < B:
        if tl.load(lengths + b) == 0:
            for g in tl.range(0, G):
                at = ((b * G + g) * R + r).to(tl.int64)[:, None] * D + d[None, :]
                tl.store(out + at, tl.zeros([RP, D], tl.bfloat16), mask=(r < R)[:, None])
        b += STEP


@Checked
@triton.jit(do_not_specialize=["B"])
def _attend_evenly(
    q, k, v, k_scales, v_scales, tables, lengths, partial, lse, spans, out, v_epilogue, scale_log2, table_stride, B,
    PROGRAMS, BP: tl.constexpr, LEAST: tl.constexpr, FUSED: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr, FP4: tl.constexpr, ASM: tl.constexpr, MOVE: tl.constexpr, LAZY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Equal parts of all tiles, at least LEAST tiles each; in order of sequence, KV head, token.

    Program p's share of context c = b * G + g has the number p + c: no two have the same, since the next program's
    first context is this one's last or a later one. spans int32 [B, G, 2]: first and last program of a context. FUSED:
    instead [B, G], all 0, and left so: how many of a context's programs are done; the last one adds up out [B, H, D].
    """
    follow(PDL)
    p = tl.program_id(0)
    i = tl.arange(0, BP)
    tiles_B = tl.cdiv(tl.load(lengths + i, mask=i < B, other=0), TILE) * G
    after_B = tl.cumsum(tiles_B, axis=0)
    total = tl.sum(tiles_B, axis=0)
    part = tl.maximum(tl.cdiv(total, PROGRAMS), LEAST)
    here, end = p * part, tl.minimum((p + 1) * part, total)
    before = after_B <= here
    b = tl.sum(before.to(tl.int32), axis=0)
    base = tl.max(tl.where(before, after_B, 0), axis=0)  # tiles of the sequences before b
    while here < end:
        length = tl.load(lengths + b)
        tiles = tl.cdiv(length, TILE)
        if tiles > 0:
            g = (here - base) // tiles
            first = here - base - g * tiles
            last = tl.minimum(tiles, first + end - here)
            c = b * G + g
            if not FUSED:
                if first == 0:
                    tl.store(spans + 2 * c, p)
                if last == tiles:
                    tl.store(spans + 2 * c + 1, p)
            start, stop = first * TILE, tl.minimum(last * TILE, length)
            if FP4:
                _share_fp4(
                    q, k, v, k_scales, v_scales, tables, partial, lse, scale_log2, table_stride, b, g, start, stop,
                    p + c, G, R, RP, D, PAGE, TILE, WIDE, ASM, MOVE, LAZY,
                )  # fmt: skip
            else:
                _share_dense(
                    q, k, v, tables, partial, lse, scale_log2, table_stride, b, g, start, stop, p + c,
                    G, R, RP, D, PAGE, TILE, WIDE,
                )  # fmt: skip
            if FUSED:
                begin = here - first  # of the context, among all tiles
                first_program = begin // part
                count = (begin + tiles - 1) // part - first_program + 1
                tl.debug_barrier()  # all threads' shares are written before one thread says so
                if tl.atomic_add(spans + c, 1, sem="acq_rel") == count - 1:
                    tl.store(spans + c, 0)
                    _add_shares(partial, lse, out, v_epilogue, c, first_program + c, count, R, RP, D)
            here += last - first
        if here >= base + tiles * G:
            base += tiles * G
            b += 1
    if FUSED:
        _clear_empty(lengths, out, p, B, PROGRAMS, G, R, RP, D)


@Checked
@triton.jit
def _combine(
    partial, lse, lengths, spans, out, v_epilogue, SPLITS,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    HEADS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds the shares of HEADS query heads of a sequence, CHUNK at a time: out [B, H, D]; 0 where it is empty."""
    follow(PDL)
    h, b = tl.program_id(0) * HEADS, tl.program_id(1)
    context = b * G + h // R
    length = tl.load(lengths + b)
    if EVEN:
        first_program = tl.load(spans + 2 * context)  # not written where the context is empty
        count = tl.where(length > 0, tl.load(spans + 2 * context + 1) - first_program + 1, 0)
        base = context + tl.where(length > 0, first_program, 0)
    else:
        count = tl.cdiv(length, TILE * tl.maximum(_tiles_of_split(length, SPLITS, TILE), 1))
        base = context * SPLITS
    row = base.to(tl.int64) * R + h % R
    n = tl.arange(0, HEADS * D)
    lse += row
    partial += row * D
    if CHUNK <= 8:  # one share after the other, every value's thread with its own copy of the weight
        m = tl.full([HEADS * D], float("-inf"), tl.float32)
        total = tl.zeros([HEADS * D], tl.float32)
        acc = total
        for first in tl.range(0, count, CHUNK):
            for i in tl.static_range(CHUNK):
                there = n * 0 + (first + i) < count
                x = tl.load(lse + (first + i) * R + n // D, mask=there, other=float("-inf"))
                values = tl.load(partial + (first + i) * (R * D) + n, mask=there, other=0.0)
                m_new = tl.maximum(m, x)
                weight, factor = tl.exp2(x - m_new), tl.exp2(m - m_new)
                acc, total = acc * factor + values * weight, total * factor + weight
                m = m_new
    else:
        tl.static_assert(HEADS == 1)
        c = tl.arange(0, CHUNK)
        m = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([D], tl.float32)
        for first in tl.range(0, count, CHUNK):
            there = first + c < count
            x = tl.load(lse + (first + c) * R, mask=there, other=float("-inf"))
            at = (first + c)[:, None] * (R * D) + n[None, :]
            values = tl.load(partial + at, mask=there[:, None], other=0.0)
            m_new = tl.maximum(m, tl.max(x, axis=0))
            weight, factor = tl.exp2(x - m_new), tl.exp2(m - m_new)
            acc = acc * factor + tl.sum(values * weight[:, None], axis=0)
            total = total * factor + tl.sum(weight, axis=0)
            m = m_new
    y = tl.where(total == 0.0, 0.0, acc / tl.where(total == 0.0, 1.0, total)) * v_epilogue
    tl.store(out + (b * (G * R) + h).to(tl.int64) * D + n, to_bf16(y))


@dataclass(frozen=True)
class AttentionConfig:
    """How the work is cut: tokens of a tile, warps and pipeline stages of a program, programs wanted on the device.

    even: equal parts of all contexts, else one share a program. registers: at most so many a thread; a scheduler has
    16384, so 168 let three warps stay on each of the four, 128 four, and nothing between them brings another. asm:
    unpack with PTX; move: FP4 with one warp and at most 8 query heads per KV head turns operands with `movmatrix`.
    lazy: FP4 rescales its sums only where a score would else leave FP16's range; the same result, rounded elsewhere.
    fused: with equal parts of few shares a context, the last program of a context adds its shares; no second kernel.
    """

    tile: int
    num_warps: int
    num_stages: int
    programs: int
    asm: bool = True
    move: bool = True
    even: bool = False
    registers: int | None = None
    lazy: bool = False
    fused: bool = False


def default_config(fp4: bool, head_dim: int, device: torch.device) -> AttentionConfig:
    """The fastest of a few settings measured on an H200 (docs/benchmarks.md); under the interpreter small ones.

    Registers are limited where the programs of a multiprocessor would else not all be there at the same time.
    """
    if INTERPRETED:
        return AttentionConfig(32, 1, 1, programs=8, asm=False, even=head_dim <= 128)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if fp4 and head_dim <= 128:
        return AttentionConfig(64, 1, 2, programs=12 * sms, even=True, registers=168)
    if fp4:
        return AttentionConfig(64, 2, 2, programs=6 * sms)
    if head_dim <= 128:
        return AttentionConfig(64, 4, 2, programs=4 * sms, even=True)
    return AttentionConfig(32, 4, 3, programs=6 * sms)


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
    shares = config.programs + B * G if config.even else B * G * splits
    device = q_BHD.device
    partial = torch.empty(shares, R, D, dtype=torch.float32, device=device)
    lse = torch.empty(shares, R, dtype=torch.float32, device=device)
    # Contexts of equal length have at most so many shares each; longer ones take several turns.
    most = triton.next_power_of_2(config.programs // (B * G) + 2 if config.even else splits)
    fused = config.even and config.fused and most <= 8
    spans = None
    if config.even:
        spans = _arrivals(B * G, device) if fused else torch.empty(B, G, 2, dtype=torch.int32, device=device)
    out = torch.empty_like(q_BHD)
    rp = max(8 if fp4 else 16, triton.next_power_of_2(R))
    epilogue = cache.v_epilogue * (2.0**VALUE_EXPONENT if fp4 else 1.0)
    scale = scaling * cache.k_epilogue * 1.4426950408889634 * (2.0**VALUE_EXPONENT if fp4 else 1.0)
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if cache.k_scales is not None and cache.v_scales is not None:
        scales = (cache.k_scales.view(torch.int16), cache.v_scales.view(torch.int16))
    operands = (q_BHD, cache.k, cache.v, *scales, tables_BP, lengths_B, partial, lse)
    constants = {"G": G, "R": R, "RP": rp, "D": D, "PAGE": cache.page_size, "TILE": config.tile, "FP4": fp4}
    constants |= {"WIDE": 2 * cache.k.numel() >= 2**31, "ASM": config.asm}
    constants["LAZY"] = config.lazy
    constants["MOVE"] = fp4 and config.asm and config.move and config.num_warps == 1 and rp == 8
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, **following()}
    if config.registers is not None:
        launch["maxnreg"] = config.registers
    if config.even:
        kernel = _attend_evenly[(config.programs,)](
            *operands, spans, out, epilogue, scale, tables_BP.stride(0), B, config.programs, BP=_bins(B),
            LEAST=max(1, 256 // config.tile), FUSED=fused, **constants, **launch,
        )  # fmt: skip
    else:
        kernel = _attend[(splits, G, B)](*operands, scale, tables_BP.stride(0), splits, **constants, **launch)
    if fp4:
        require_pairs(kernel)
    if fused:
        return out
    heads = _heads_together(R, D) if most <= 8 else 1
    chunk = min(most, 64)
    _combine[(H // heads, B)](
        partial, lse, lengths_B, spans, out, epilogue, splits, G=G, R=R, D=D, TILE=config.tile, CHUNK=chunk,
        HEADS=heads, EVEN=config.even, num_warps=max(1, heads * D // 128) * max(1, chunk // 8), **following(),
    )  # fmt: skip
    return out


_done: dict[torch.device, list[Tensor]] = {}  # what a captured graph has seen must stay


def _arrivals(contexts: int, device: torch.device) -> Tensor:
    """int32 zeros, one for a context; kernels leave them so. One device's calls must not overlap."""
    known = _done.setdefault(device, [])
    if not known or known[-1].numel() < contexts:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise KernelError("attention in one kernel must have run at this size before it is captured")
        known.append(torch.zeros(max(1 << 14, contexts), dtype=torch.int32, device=device))
    return known[-1]


def _bins(B: int) -> int:
    """B sequences rounded up to one of few sizes: a kernel is compiled for each."""
    bins = 128
    while bins < B:
        bins *= 4
    return bins


def _heads_together(R: int, D: int) -> int:
    """Query heads that one program combines: a power of two that divides R, of at most 512 values."""
    heads = R & -R
    while heads > 1 and heads * D > 512:
        heads //= 2
    return heads
