"""Grouped products of sorted rows with packed FP4 or BF16 expert weights, strip by strip.

Legend: M rows sorted by expert, K experts per token, O output and I input features, R rows of a block, T = I/128.

A strip is one block of rows of one expert times BO output features, summed over all inputs. Products are computed
transposed, [O, R] = W x^T. FP4 weights are unpacked in registers, where the tensor core takes them from as its first
operand: value j of every unit of eight forms a matrix [O, 16] of its own, and some of them, side by side, a part of a
tile [O, 128], whose partner is x in that order (`triton._operand_rows`). Nothing of it moves to another thread. How
the compiler orders all this depends on the parts: of a whole tile each matrix is unpacked while the tensor core has the
ones before, with a wait of its own; of a tile in parts a part follows the other. With too few registers for what is on
its way it waits until the tensor core has done with every matrix.

Strips lie in groups of GROUP blocks of rows, with all columns of a group one behind the other, so that the weights and
rows that programs of one time read are few. The last block of an expert may have few rows: it runs as a narrower strip.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tracefp4.kernels.triton_layout import Checked
from tracefp4.kernels.triton_math import dot, follow, from_bf16, settled, to_bf16
from tracefp4.kernels.triton_unpack import block_scales, spread_columns, unpack

GROUP = tl.constexpr(8)
UP = tl.constexpr(2.0**14)
"""What undoes the factor of an FP16 operand."""


@triton.jit
def silu_mul(gate, up):
    """silu(gate) * up of sums rounded to BF16, as a model that stores them computes it."""
    gate, up = from_bf16(to_bf16(gate)), from_bf16(to_bf16(up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _two(w0, w1, BO: tl.constexpr):
    """Matrices [BO, 16] side by side."""
    return tl.reshape(tl.permute(tl.join(w0, w1), (0, 2, 1)), (BO, 32))


@triton.jit
def _four(w0, w1, w2, w3, BO: tl.constexpr):
    x = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    return tl.reshape(tl.permute(x, (0, 3, 2, 1)), (BO, 64))


@triton.jit
def _eight(w0, w1, w2, w3, w4, w5, w6, w7, BO: tl.constexpr):
    x = tl.join(tl.join(tl.join(w0, w1), tl.join(w2, w3)), tl.join(tl.join(w4, w5), tl.join(w6, w7)))
    return tl.reshape(tl.permute(x, (0, 4, 3, 2, 1)), (BO, 128))


@triton.jit
def _add_part(acc, more, part, at_x, at_more, real, real_more, MORE: tl.constexpr):
    """Both sums with the product of a part of a tile and the rows at its inputs."""
    acc = dot(part, tl.load(at_x, mask=real[None, :], other=0.0), acc)
    if MORE > 0:
        more = dot(part, tl.load(at_more, mask=real_more[None, :], other=0.0), more)
    return acc, more


@triton.jit
def _rows(order, start, stop, K: tl.constexpr, R: tl.constexpr, GATED: tl.constexpr):
    """(which of R rows are real, the row of the input that each reads, the row of the output it writes)."""
    m = start + tl.arange(0, R)
    real = m < stop
    position = tl.load(order + m, mask=real, other=0)
    if GATED:  # of tokens, to sorted rows
        return real, (position // K).to(tl.int64), m.to(tl.int64)
    else:
        return real, m.to(tl.int64), position.to(tl.int64)


@triton.jit
def _finish_fp4(
    acc, owed_R, out, owed_e, real, target, o,
    O: tl.constexpr, GATED: tl.constexpr, BO: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = O // 2 if GATED else O
    y = acc * owed_e * owed_R[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, BO, R)), (1, 2, 0)))
        y = silu_mul(gate, up)
    wanted = real[None, :]
    if WIDTH % BO != 0:
        wanted = wanted & (o < WIDTH)[:, None]
    tl.store(out + target[None, :] * WIDTH + o[:, None], to_bf16(y), mask=wanted)


@triton.jit
def _strip_fp4(
    x, factor, words, weight_scales, epilogue, out, order, e, start, stop, column,
    K: tl.constexpr, I: tl.constexpr, O: tl.constexpr, GATED: tl.constexpr, BO: tl.constexpr, R: tl.constexpr,
    MORE: tl.constexpr, ASM: tl.constexpr, PARTS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """R rows, and MORE behind them, which share what is unpacked; MORE 0: none.

    GATED: BO rows of gate above BO of up are one operand; a thread holds the sums of both.
    """
    T: tl.constexpr = I // 128
    WIDTH: tl.constexpr = O // 2 if GATED else O
    BW: tl.constexpr = 2 * BO if GATED else BO
    o = column * BO + tl.arange(0, BO)
    row = column * BO + tl.arange(0, BW) % BO
    if WIDTH % BO != 0:
        row = tl.minimum(row, WIDTH - 1)  # rows past the end repeat the last and are not stored
    if GATED:
        row += tl.arange(0, BW) // BO * WIDTH
    w, p, i = tl.arange(0, 16), tl.arange(0, 4), tl.arange(0, 128 // PARTS)
    words += e * (T * O * 16)
    weight_scales += e * (T * O * 4)
    at_w, at_s = row[:, None] * 16 + w[None, :], row[:, None] * 4 + p[None, :]
    real, source, target = _rows(order, start, stop, K, R, GATED)
    at_x = x + (source[None, :] * I + i[:, None])
    owed_e = tl.load(epilogue + e) * UP  # before the loop: its wait is for all
    owed_R = tl.load(factor + source, mask=real, other=0.0)
    acc = tl.zeros([BW, R], tl.float32)
    real_more, at_more, more = real, at_x, acc
    if MORE > 0:
        real_more, source_more, target_more = _rows(order, start + R, stop, K, MORE, GATED)
        at_more = x + (source_more[None, :] * I + i[:, None])
        owed_more = tl.load(factor + source_more, mask=real_more, other=0.0)
        more = tl.zeros([BW, MORE], tl.float32)
    for t in tl.range(0, T, loop_unroll_factor=UNROLL):
        u = tl.load(words + t * (O * 16) + at_w)
        s = tl.load(weight_scales + t * (O * 4) + at_s)
        s = block_scales(s, BW, 16, True)
        w0, w1, w2, w3, w4, w5, w6, w7 = unpack(spread_columns(u, BW, 16), s, False, ASM)
        x_t, m_t = at_x + t * 128, at_more + t * 128
        if PARTS == 1:
            tile = _eight(w0, w1, w2, w3, w4, w5, w6, w7, BW)
            acc, more = _add_part(acc, more, tile, x_t, m_t, real, real_more, MORE)
        elif PARTS == 2:
            acc, more = _add_part(acc, more, _four(w0, w1, w2, w3, BW), x_t, m_t, real, real_more, MORE)
            acc, more = _add_part(acc, more, _four(w4, w5, w6, w7, BW), x_t + 64, m_t + 64, real, real_more, MORE)
        else:
            acc, more = _add_part(acc, more, _two(w0, w1, BW), x_t, m_t, real, real_more, MORE)
            acc, more = _add_part(acc, more, _two(w2, w3, BW), x_t + 32, m_t + 32, real, real_more, MORE)
            acc, more = _add_part(acc, more, _two(w4, w5, BW), x_t + 64, m_t + 64, real, real_more, MORE)
            acc, more = _add_part(acc, more, _two(w6, w7, BW), x_t + 96, m_t + 96, real, real_more, MORE)
        acc = settled(acc)
        if MORE > 0:
            more = settled(more)
    _finish_fp4(acc, owed_R, out, owed_e, real, target, o, O, GATED, BO, R)
    if MORE > 0:
        _finish_fp4(more, owed_more, out, owed_e, real_more, target_more, o, O, GATED, BO, MORE)


@triton.jit
def _strip_dense(
    x, weights, out, order, e, start, stop, column,
    K: tl.constexpr, I: tl.constexpr, O: tl.constexpr, GATED: tl.constexpr, BO: tl.constexpr, R: tl.constexpr,
    BI: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = O // 2 if GATED else O
    real, source, target = _rows(order, start, stop, K, R, GATED)
    o, i = column * BO + tl.arange(0, BO), tl.arange(0, BI)
    wanted = real[None, :]
    x += source[None, :] * I + i[:, None]
    if not BULK:
        some = o
        if WIDTH % BO != 0:
            some = tl.minimum(o, WIDTH - 1)
        weights += e * (O * I)
        at_w = some[:, None] * I + i[None, :]
    acc = tl.zeros([BO, R], tl.float32)
    acc_up = acc
    for first in tl.range(0, I, BI):
        inner = wanted
        if I % BI != 0:
            inner = wanted & (first + i < I)[:, None]
        if BULK:  # rows past the end are those of the next matrix, or zeros, and are not stored
            row = (e * O + column * BO).to(tl.int32)
            w_t = weights.load([row, first])
            if GATED:
                v_t = weights.load([row + WIDTH, first])
        else:
            if I % BI != 0:
                some_i = (first + i < I)[None, :]
                w_t = tl.load(weights + first + at_w, mask=some_i, other=0.0)
                if GATED:
                    v_t = tl.load(weights + first + (at_w + WIDTH * I), mask=some_i, other=0.0)
            else:
                w_t = tl.load(weights + first + at_w)
                if GATED:
                    v_t = tl.load(weights + first + (at_w + WIDTH * I))
        x_t = tl.load(x + first, mask=inner, other=0.0)
        acc = dot(w_t, x_t, acc)
        if GATED:
            acc_up = dot(v_t, x_t, acc_up)
    y = acc
    if GATED:
        y = silu_mul(acc, acc_up)
    tl.store(out + target[None, :] * WIDTH + o[:, None], to_bf16(y), mask=wanted & (o < WIDTH)[:, None])


@triton.jit
def table_entry(table, block):
    """(expert int64, first row, end of the rows) of a block; the expert is -1 where there is no such block."""
    entry = tl.load(table + block)
    start = entry.to(tl.int32)
    return entry >> 48, start, start + ((entry >> 32) & 0xFFFF).to(tl.int32)


@Checked
@triton.jit(do_not_specialize=["blocks"])
def products_fp4(
    x, factor, words, weight_scales, epilogue, out, order, table, blocks,
    K: tl.constexpr, I: tl.constexpr, O: tl.constexpr, GATED: tl.constexpr, BO: tl.constexpr, R: tl.constexpr,
    TAILS: tl.constexpr, ASM: tl.constexpr, PARTS: tl.constexpr, UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """GATED: rows of tokens -> silu(gate) * up [M, O/2], in sorted order; else sorted rows -> [M, O] by position.

    x FP16 [., I] and factor f32 as `_operand_rows` leaves them; words int32 [E, T, O, 16], weight_scales int16
    [E, T, O, 4]. TAILS: how often the rows of a strip may be halved for a block that has no more. R may be 3 * 2^n:
    then a strip has R rows in two widths, two thirds of them, or (TAILS) one. PARTS: of a tile: 1, 2 or 4. UNROLL:
    tiles of a step.
    """
    follow(PDL)
    block, column = tl.program_id(1) * GROUP + tl.program_id(0) % GROUP, tl.program_id(0) // GROUP
    if block >= blocks:
        return
    e, start, stop = table_entry(table, block)
    if e < 0:
        return
    if R & (R - 1) != 0:
        if (TAILS >= 1) & (stop - start <= R // 3):
            _strip_fp4(
                x, factor, words, weight_scales, epilogue, out, order, e, start, stop, column,
                K, I, O, GATED, BO, R // 3, 0, ASM, PARTS, UNROLL,
            )  # fmt: skip
        elif stop - start <= R // 3 * 2:
            _strip_fp4(
                x, factor, words, weight_scales, epilogue, out, order, e, start, stop, column,
                K, I, O, GATED, BO, R // 3 * 2, 0, ASM, PARTS, UNROLL,
            )  # fmt: skip
        else:
            _strip_fp4(
                x, factor, words, weight_scales, epilogue, out, order, e, start, stop, column,
                K, I, O, GATED, BO, R // 3 * 2, R // 3, ASM, PARTS, UNROLL,
            )  # fmt: skip
    elif (TAILS >= 2) & (stop - start <= R // 4):
        _strip_fp4(
            x, factor, words, weight_scales, epilogue, out, order, e, start, stop, column,
            K, I, O, GATED, BO, R // 4 if TAILS >= 2 else R, 0, ASM, PARTS, UNROLL,
        )  # fmt: skip
    elif (TAILS >= 1) & (stop - start <= R // 2):
        _strip_fp4(
            x, factor, words, weight_scales, epilogue, out, order, e, start, stop, column,
            K, I, O, GATED, BO, R // 2 if TAILS >= 1 else R, 0, ASM, PARTS, UNROLL,
        )  # fmt: skip
    else:
        _strip_fp4(
            x, factor, words, weight_scales, epilogue, out, order, e, start, stop, column,
            K, I, O, GATED, BO, R, 0, ASM, PARTS, UNROLL,
        )  # fmt: skip


@Checked
@triton.jit(do_not_specialize=["blocks"])
def products_dense(
    x, weights, out, order, table, blocks,
    K: tl.constexpr, I: tl.constexpr, O: tl.constexpr, GATED: tl.constexpr, BO: tl.constexpr, R: tl.constexpr,
    TAILS: tl.constexpr, BI: tl.constexpr, BULK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same over BF16 weights [E, O, I] and BF16 rows in their own order.

    BULK: weights is a tensor descriptor of [E * O, I] in blocks of [BO, BI].
    """
    follow(PDL)
    block, column = tl.program_id(1) * GROUP + tl.program_id(0) % GROUP, tl.program_id(0) // GROUP
    if block >= blocks:
        return
    e, start, stop = table_entry(table, block)
    if e < 0:
        return
    if (TAILS >= 2) & (stop - start <= R // 4):
        _strip_dense(
            x, weights, out, order, e, start, stop, column,
            K, I, O, GATED, BO, R // 4 if TAILS >= 2 else R, BI, BULK,
        )  # fmt: skip
    elif (TAILS >= 1) & (stop - start <= R // 2):
        _strip_dense(
            x, weights, out, order, e, start, stop, column,
            K, I, O, GATED, BO, R // 2 if TAILS >= 1 else R, BI, BULK,
        )  # fmt: skip
    else:
        _strip_dense(x, weights, out, order, e, start, stop, column, K, I, O, GATED, BO, R, BI, BULK)
