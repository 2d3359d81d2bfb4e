"""Routed experts over packed FP4 or BF16 weights: route, gate and up with SiLU, quantize, down, weighted sum.

Legend: N tokens, K experts per token, M = N * K rows sorted by expert, E experts, I input and O output features,
R rows of a program, T = I/128.

Products are computed transposed, [O, R] = W x^T: the weights are the large operand and are unpacked in registers, as
keys are in `paged_attention`, and the few rows of an expert sit in the tensor core's narrow dimension. Value j of every
unit of eight forms a matrix [O, 16] of its own, whose partner is x at those inputs: `_operand_rows` writes x in that
order, and as FP16: quantized, x is E2M1 * SF * 2^-14, else x times a power of two that brings its row into [-2, 2).
Nothing here asks the host anything: the number of rows of an expert, and of blocks of R rows, is found on the device,
the grid is as large as it could become and programs without work return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.kernels.grouped_experts.packed import PackedExperts
from tracefp4.kernels.grouped_experts.triton_products import (
    GROUP,
    UP,
    products_dense,
    products_fp4,
    silu_mul,
    table_entry,
)
from tracefp4.kernels.quantize_record.ref import RecordTarget, planes
from tracefp4.kernels.quantize_record.triton import store_record
from tracefp4.kernels.triton_layout import Checked, require_pairs
from tracefp4.kernels.triton_math import (
    IEEE,
    block_amax,
    code_of_e2m1,
    decode_e2m1,
    decode_e4m3,
    dot,
    encode_e4m3,
    encode_scale_of,
    follow,
    following,
    from_bf16,
    multiplier,
    round_e2m1,
    settled,
    to_bf16,
    unrounded_scale,
)
from tracefp4.kernels.triton_unpack import block_scales, spread_columns, unpack

INTERPRETED = triton.knobs.runtime.interpret
TWO_PHASES = 4096
"""Choices from which on they are counted chunk by chunk, and not by the program of every expert."""


@triton.jit
def _nobodys(table, first, stop):
    """Marks these entries as no block's."""
    i = tl.arange(0, 128)
    for at in tl.range(first, stop, 128):
        tl.store(table + at + i, -1, mask=at + i < stop)


@triton.jit
def _first_entry(e, start, R: tl.constexpr):
    """Where the blocks of expert e begin in the table, if its rows begin at `start`.

    At most min(e, start) experts before it have rows, and each of them at most one block that is not full. So nobody
    need know how many blocks those have; some entries stay empty.
    """
    return tl.minimum(e, start) + start // R


@triton.jit
def _entry(e, start, stop, R: tl.constexpr):
    """A block of at most R rows from `start` on, where the expert's end at `stop`: see `DeviceRouting`."""
    rows = tl.minimum(stop - start, R)
    return start.to(tl.int64) | (rows.to(tl.int64) << 32) | (e.to(tl.int64) << 48)


@triton.jit
def _route_expert(experts, order, table, e, M, limit, E: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr):
    """Lists the rows of expert e in order of (token, choice), and its blocks of R rows; M at most CHUNK.

    It looks at all choices for itself, so no program waits for another.
    """
    i = tl.arange(0, CHUNK)
    chosen = tl.load(experts + i, mask=i < M, other=E).to(tl.int32)
    start = tl.sum((chosen < e).to(tl.int32), axis=0)
    mine = (chosen == e).to(tl.int32)
    stop = start + tl.sum(mine, axis=0)
    tl.store(order + start + tl.cumsum(mine, axis=0) - 1, i, mask=mine != 0)
    first = _first_entry(e, start, R)
    blocks = (stop - start + R - 1) // R
    for n in tl.range(0, blocks):
        tl.store(table + first + n, _entry(e, start + n * R, stop, R))
    _nobodys(table, first + blocks, limit if e == E - 1 else _first_entry(e + 1, stop, R))


@Checked
@triton.jit(do_not_specialize=["M", "limit"])
def _route(experts, order, table, M, limit, E: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Program e: `_route_expert`."""
    follow(PDL)
    _route_expert(experts, order, table, tl.program_id(0), M, limit, E, R, CHUNK)


@Checked
@triton.jit(do_not_specialize=["M"])
def _route_counts(experts, counts, M, CHUNK, EP: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    """How often each expert is chosen among the CHUNK choices of program c: counts int32 [C, EP]."""
    follow(PDL)
    c = tl.program_id(0)
    i, bins = tl.arange(0, STEP), tl.arange(0, EP)
    stop = tl.minimum((c + 1) * CHUNK, M)
    found = tl.zeros([EP], tl.int32)
    for first in tl.range(c * CHUNK, stop, STEP):
        chosen = tl.load(experts + first + i, mask=first + i < stop, other=0).to(tl.int32)
        found += tl.histogram(chosen, EP, mask=first + i < stop)
    tl.store(counts + c * EP + bins, found)


@Checked
@triton.jit(do_not_specialize=["M", "C", "limit"])
def _route_ranks(
    experts, counts, order, table, M, C, CHUNK, limit,
    E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Places the choices of program c, in their order, behind those of its predecessors; every C-th block of rows.

    What lies before an expert's choices of this chunk follows from all counts, which every program adds for itself.
    """
    follow(PDL)
    c = tl.program_id(0)
    bins, chunks, i = tl.arange(0, EP), tl.arange(0, CHUNKS), tl.arange(0, STEP)
    total = tl.zeros([EP], tl.int32)
    before = total
    for first in tl.range(0, C, CHUNKS):
        there = first + chunks
        n = tl.load(counts + there[:, None] * EP + bins[None, :], mask=(there < C)[:, None], other=0)
        total += tl.sum(n, axis=0)
        before += tl.sum(tl.where((there < c)[:, None], n, 0), axis=0)
    start = tl.cumsum(total, axis=0) - total
    blocks = (total + R - 1) // R
    first = tl.cumsum(blocks, axis=0) - blocks
    if c == 0:
        _nobodys(table, tl.sum(blocks, axis=0), limit)
    for n in tl.range(c, tl.max(blocks, axis=0), C):
        tl.store(table + first + n, _entry(bins, start + n * R, start + total, R), mask=n < blocks)
    at = start + before
    stop = tl.minimum((c + 1) * CHUNK, M)
    for first in tl.range(c * CHUNK, stop, STEP):
        chosen = tl.load(experts + first + i, mask=first + i < stop, other=-1).to(tl.int32)
        mine = (chosen[:, None] == bins[None, :]).to(tl.int32)
        place = tl.sum(mine * (at[None, :] + tl.cumsum(mine, axis=0) - 1), axis=1)
        tl.store(order + place, first + i, mask=first + i < stop)
        at += tl.sum(mine, axis=0)


@triton.jit
def _in_order(y, NB: tl.constexpr):
    """FP16 [NB, 16], NB a multiple of 8, in the order of the inputs -> [NB * 16] in the order of the products.

    Bits of an input of 128: a1 a0 h c1 c0 j1 j0, unit a c and value h j; in the products' order h j1 j0 c1 a1 a0 c0.
    """
    y = tl.reshape(y, (NB // 8, 4, 2, 2, 2, 4))  # tile, a, h, c1, c0, j
    return tl.reshape(tl.permute(y, (0, 2, 5, 3, 1, 4)), (NB * 16,))


@Checked
@triton.jit(do_not_specialize=["M", "limit"])
def _operand_rows(
    x, codes_in, scales_in, s_in, out, factor_out, payload, record_scale, slots, x_stride,
    experts, order, table, M, limit, E: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    I: tl.constexpr, NB: tl.constexpr, CODES: tl.constexpr, QUANTIZE: tl.constexpr, S_STRIDE: tl.constexpr,
    STATIC: tl.constexpr, POW2: tl.constexpr, EXACT: tl.constexpr, ENCODE_MAX: tl.constexpr,
    RECORD: tl.constexpr, RECORD_SCALE: tl.constexpr, RECORD_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    CODE_PLANES: tl.constexpr, SCALE_PLANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row as FP16 [I] in the order of the products, and the f32 factor that its sums are owed.

    CODES: of quantized codes, scales and S; QUANTIZE: quantizes x first, and records what it chose if RECORD; neither:
    x as it is. The first E programs do what `_route` does instead, beside the others.
    """
    follow(PDL)
    if E > 0:
        if tl.program_id(0) < E:
            _route_expert(experts, order, table, tl.program_id(0), M, limit, E, R, CHUNK)
            return
    row = tl.program_id(0).to(tl.int64) - E
    b = tl.arange(0, NB)
    i = b[:, None] * 16 + tl.arange(0, 16)[None, :]
    one = tl.arange(0, 1)
    if CODES:
        w = b[:, None] * 2 + tl.arange(0, 2)[None, :]
        words = tl.load(codes_in + row * (I // 8) + w, mask=w < I // 8, other=0)
        words = tl.reshape(tl.broadcast_to(words[:, :, None], (NB, 2, 8)), (NB, 16))
        rounded = decode_e2m1((words >> (tl.arange(0, 16) % 8 * 4)[None, :]) & 15)
        byte = tl.load(scales_in + row * (I // 16) + b, mask=b < I // 16, other=0).to(tl.int32)
        s = tl.load(s_in + row * S_STRIDE + one)
    else:
        values = from_bf16(tl.load(x + row * x_stride + i, mask=i < I, other=0.0))
        amax = block_amax(values)
        largest = tl.max(amax, axis=0, keep_dims=True)
        if QUANTIZE:
            if STATIC:
                s = tl.load(s_in + one)
            else:
                s = encode_scale_of(largest, ENCODE_MAX, POW2)
            byte = encode_e4m3(unrounded_scale(amax, s, EXACT))
            rounded = round_e2m1(values * multiplier(byte, s, EXACT)[:, None])
    if CODES or QUANTIZE:
        y = rounded * (decode_e4m3(byte) * (1.0 / UP))[:, None]
        factor = tl.div_rn(tl.zeros_like(s) + 1.0, s) * UP
    else:
        exponent = tl.minimum(tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF, 1), 253)
        y = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        factor = (exponent << 23).to(tl.float32, bitcast=True)
    n = tl.arange(0, NB * 16)
    tl.store(out + row * I + n, _in_order(y.to(tl.float16), NB), mask=n < I)
    tl.store(factor_out + row + one, factor)
    if RECORD:
        slot = tl.load(slots + row)
        if slot >= 0:
            codes = code_of_e2m1(rounded)
            store_record(payload + slot * RECORD_STRIDE, codes, byte, I, NB, CODE_PLANES, SCALE_PLANES)
            if RECORD_SCALE:
                tl.store(record_scale + slot * SCALE_STRIDE + one, s)


@triton.jit
def _add_tile(acc, words, scale_pairs, x0, x1, x2, x3, x4, x5, x6, x7, BO: tl.constexpr, ASM: tl.constexpr):
    """acc [BO, R] + one tile of 128 inputs: words int32 [BO, 16], scale pairs int16 [BO, 4], x_j FP16 [16, R]."""
    s = block_scales(scale_pairs, BO, 16, True)
    w0, w1, w2, w3, w4, w5, w6, w7 = unpack(spread_columns(words, BO, 16), s, False, ASM)
    acc = dot(w0, x0, acc)
    acc = dot(w1, x1, acc)
    acc = dot(w2, x2, acc)
    acc = dot(w3, x3, acc)
    acc = dot(w4, x4, acc)
    acc = dot(w5, x5, acc)
    acc = dot(w6, x6, acc)
    return settled(dot(w7, x7, acc))


@triton.jit
def _block_of_rows(order, start, stop, R: tl.constexpr):
    """(rows [R], which are real, place of each in the (token, choice) order)."""
    m = start + tl.arange(0, R)
    real = m < stop
    return m, real, tl.load(order + m, mask=real, other=0)


@Checked
@triton.jit
def _products_fp4(
    x, factor, words, weight_scales, epilogue, out, order, table,
    K: tl.constexpr, I: tl.constexpr, O: tl.constexpr, GATED: tl.constexpr, BO: tl.constexpr, R: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: rows of tokens -> silu(gate) * up [M, O/2], in sorted order; else sorted rows -> [M, O] by position.

    words int32 [E, T, O, 16], weight_scales int16 [E, T, O, 4].
    """
    follow(PDL)
    e, start, stop = table_entry(table, tl.program_id(0))
    if e < 0:
        return
    T: tl.constexpr = I // 128
    WIDTH: tl.constexpr = O // 2 if GATED else O
    m, real, position = _block_of_rows(order, start, stop, R)
    source = (position // K if GATED else m).to(tl.int64)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    some = tl.minimum(o, WIDTH - 1)  # rows past the end repeat the last and are not stored
    w, p = tl.arange(0, 16), tl.arange(0, 4)
    x_WR = x + source[None, :] * I + w[:, None]
    wanted = real[None, :]
    words += e * (T * O * 16)
    weight_scales += e * (T * O * 4)
    acc = tl.zeros([BO, R], tl.float32)
    acc_up = acc
    for t in tl.range(0, T):
        u = tl.load(words + t * (O * 16) + (some[:, None] * 16 + w[None, :]))
        s = tl.load(weight_scales + t * (O * 4) + (some[:, None] * 4 + p[None, :]))
        if GATED:
            u_up = tl.load(words + (t * O + WIDTH) * 16 + (some[:, None] * 16 + w[None, :]))
            s_up = tl.load(weight_scales + (t * O + WIDTH) * 4 + (some[:, None] * 4 + p[None, :]))
        x_t = x_WR + t * 128
        x0 = tl.load(x_t, mask=wanted, other=0.0)
        x1 = tl.load(x_t + 16, mask=wanted, other=0.0)
        x2 = tl.load(x_t + 32, mask=wanted, other=0.0)
        x3 = tl.load(x_t + 48, mask=wanted, other=0.0)
        x4 = tl.load(x_t + 64, mask=wanted, other=0.0)
        x5 = tl.load(x_t + 80, mask=wanted, other=0.0)
        x6 = tl.load(x_t + 96, mask=wanted, other=0.0)
        x7 = tl.load(x_t + 112, mask=wanted, other=0.0)
        acc = _add_tile(acc, u, s, x0, x1, x2, x3, x4, x5, x6, x7, BO, ASM)
        if GATED:
            acc_up = _add_tile(acc_up, u_up, s_up, x0, x1, x2, x3, x4, x5, x6, x7, BO, ASM)
    owed_e = tl.load(epilogue + e) * UP
    owed_R = tl.load(factor + source, mask=real, other=0.0)[None, :]
    y = acc * owed_e * owed_R
    if GATED:
        y = silu_mul(y, acc_up * owed_e * owed_R)
        target = m.to(tl.int64)
    else:
        target = position.to(tl.int64)
    tl.store(out + target[None, :] * WIDTH + o[:, None], to_bf16(y), mask=wanted & (o < WIDTH)[:, None])


@Checked
@triton.jit
def _weighted_sum(rows, gates, out, K: tl.constexpr, O: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [N, O] = sum over k, in order, of gates [N, K] times rows BF16 [N, K, O]; FP32, rounded once."""
    follow(PDL)
    n = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        y = from_bf16(tl.load(rows + (n * K + k) * O + o, mask=o < O, other=0.0))
        total += y * tl.load(gates + n * K + k)
    tl.store(out + n * O + o, to_bf16(total), mask=o < O)


@dataclass(frozen=True)
class ExpertsConfig:
    """Output features and rows of a program, its warps and pipeline stages.

    dense_inner: inputs a step of BF16. down: output features of a program of the second product, 0: as of the first.
    strips: FP4 by the products of `triton_products`, as BF16 always is, else by `_products_fp4`; rows may be 3 * 2^n
    too, from 48 on. tails: see there. bulk: BF16 weights are read by the tensor memory accelerator. registers: at most
    so many a thread. parts: of a tile of FP4 weights in strips: 1, 2 or 4. unroll: such tiles a step.
    """

    outputs: int
    rows: int
    num_warps: int
    num_stages: int
    dense_inner: int = 64
    asm: bool = True
    down: int = 0
    strips: bool = False
    tails: int = 0
    bulk: bool = False
    registers: int | None = None
    parts: int = 2
    unroll: int = 1


def default_config(fp4: bool, rows_per_expert: float) -> ExpertsConfig:
    """By the mean number of rows of an expert; under the interpreter a small one.

    The fastest of a few settings measured on an H200 with 128 experts at 2, 5, 16, 31, 64, 128, 256 and 512 rows
    (docs/benchmarks.md); where the ranges meet, it is a guess.
    """
    if INTERPRETED:
        return ExpertsConfig(128, 16, 1, 1, dense_inner=128, asm=False, strips=rows_per_expert > 4, tails=1)
    if fp4:
        if rows_per_expert <= 4:
            return ExpertsConfig(64, 8, 4, 3, down=128, strips=True)
        if rows_per_expert <= 12:
            return ExpertsConfig(64, 16, 4, 3, down=128, strips=True)
        if rows_per_expert <= 24:
            return ExpertsConfig(64, 32, 4, 3, down=128, strips=True, tails=1)
        if rows_per_expert <= 40:
            return ExpertsConfig(64, 48, 4, 4, down=128, strips=True, tails=1, registers=168)
        if rows_per_expert <= 96:
            return ExpertsConfig(64, 64, 4, 3, down=128, strips=True, tails=2, registers=168, parts=4)
        return ExpertsConfig(64, 128, 4, 2, down=128, strips=True, tails=2)
    if rows_per_expert <= 12:
        rows = 8 if rows_per_expert <= 4 else 16
        return ExpertsConfig(64, rows, 4, 3, dense_inner=128, down=128, bulk=True)
    if rows_per_expert <= 48:
        return ExpertsConfig(64, 64, 4, 3, down=128, tails=1, bulk=True)
    return ExpertsConfig(128, 128, 8, 4, down=256, tails=2, bulk=True)


@dataclass(frozen=True)
class DeviceRouting:
    """What `_route` finds, on the device.

    order int32 [M]: place in the (token, choice) order of each sorted row. table int64 [blocks]: of each block its
    first row (bits 0 to 31), its rows (32 to 47) and its expert (48 to 62), in order; a word, so that a program waits
    once for what it is to do. `blocks` is an upper bound: entries that are no block's are -1.
    """

    order: Tensor
    table: Tensor

    @property
    def blocks(self) -> int:
        return self.table.shape[0]


@dataclass(frozen=True)
class _OnePhase:
    """A routing that is still to be found, by the kernel of the operand rows beside its own work."""

    experts: Tensor
    routing: DeviceRouting
    num_experts: int
    rows: int

    @property
    def chunk(self) -> int:
        return max(128, triton.next_power_of_2(self.experts.numel()))

    @property
    def constants(self) -> dict[str, int]:
        return {"E": self.num_experts, "R": self.rows, "CHUNK": self.chunk}

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        return self.experts, self.routing.order, self.routing.table, self.experts.numel(), self.routing.blocks


def _empty_routing(experts_NK: Tensor, num_experts: int, rows: int) -> DeviceRouting:
    M = experts_NK.numel()
    order = torch.empty(M, dtype=torch.int32, device=experts_NK.device)
    blocks = max(1, min(num_experts, M) + M // rows)
    return DeviceRouting(order, torch.empty(blocks, dtype=torch.int64, device=experts_NK.device))


def route(experts_NK: Tensor, num_experts: int, rows: int) -> DeviceRouting:
    """Sorted order and blocks of `rows` rows for a choice of experts int64 [N, K]."""
    M = experts_NK.numel()
    routing = _empty_routing(experts_NK, num_experts, rows)
    order, table, blocks = routing.order, routing.table, routing.blocks
    if M < TWO_PHASES:
        found = _OnePhase(experts_NK, routing, num_experts, rows)
        warps = max(4, found.chunk // 256)
        _route[(num_experts,)](*found.operands, **found.constants, num_warps=warps, **following())
        return routing
    bins = triton.next_power_of_2(num_experts)
    chunk = max(256, triton.next_power_of_2(triton.cdiv(M, 256)))
    C = triton.cdiv(M, chunk)
    counts = torch.empty(C, bins, dtype=torch.int32, device=experts_NK.device)
    _route_counts[(C,)](experts_NK, counts, M, chunk, EP=bins, STEP=256, num_warps=4, **following())
    _route_ranks[(C,)](
        experts_NK, counts, order, table, M, C, chunk, blocks, E=num_experts, EP=bins, R=rows,
        STEP=max(16, min(64, 8192 // bins)), CHUNKS=max(1, min(32, 4096 // bins)), num_warps=4, **following(),
    )  # fmt: skip
    return routing


def operand_rows(
    x: Tensor | QuantizedBlocks,
    format: str | None = None,
    encode_scale: str | float | Tensor = "row",
    record: RecordTarget | None = None,
    beside: _OnePhase | None = None,
) -> tuple[Tensor, Tensor]:
    """(FP16 [N, I] in the products' order, f32 [N] factors) of BF16 rows, quantized (and recorded) first if a format is
    given, or of rows that are quantized already. beside: a routing that the same launch finds."""
    codes = x if isinstance(x, QuantizedBlocks) else None
    values = x if isinstance(x, Tensor) else None
    N, I = x.shape
    device = codes.codes.device if codes is not None else values.device  # type: ignore[union-attr]
    out = torch.empty(N, I, dtype=torch.float16, device=device)
    factor = torch.empty(N, dtype=torch.float32, device=device)
    s: Tensor | None = None
    if codes is not None:
        s = codes.encode_scale
    elif isinstance(encode_scale, Tensor):
        s = encode_scale.to(device, torch.float32)
    elif format is not None and not isinstance(encode_scale, str):
        s = torch.full((), encode_scale, dtype=torch.float32, device=device)
    blocks = max(8, triton.next_power_of_2(I // 16))
    code_planes, scale_planes = (0, 0) if record is None else planes(format or "", record.bits)
    record_scale = None if record is None else record.encode_scale
    warps = min(8, max(1, blocks // (64 if N >= 1024 else 32)))
    if beside is not None:
        # No more than have a value each: with more, Triton 3.6 reduces a row over wrong lanes (`triton_layout`).
        warps = max(warps, min(8, beside.chunk // 256, blocks // 2))
    if N:
        _operand_rows[(N + (0 if beside is None else beside.num_experts),)](
            values, None if codes is None else codes.codes.view(torch.int32), None if codes is None else codes.scales,
            s, out, factor, record and record.payload, record_scale, record and record.slots,
            0 if values is None else values.stride(0),
            *((None, None, None, 0, 0) if beside is None else beside.operands),
            **({"E": 0, "R": 1, "CHUNK": 1} if beside is None else beside.constants),
            I=I, NB=blocks, CODES=codes is not None, QUANTIZE=codes is None and format is not None,
            S_STRIDE=1 if s is not None and s.ndim else 0, STATIC=codes is None and s is not None,
            POW2=isinstance(encode_scale, str) and encode_scale == "row-pow2", EXACT=format == "nvfp4-exact",
            ENCODE_MAX=get_format(format or "nvfp4").encode_max,
            RECORD=record is not None, RECORD_SCALE=record_scale is not None,
            RECORD_STRIDE=0 if record is None else record.payload.stride(0),
            SCALE_STRIDE=0 if record_scale is None else record_scale.stride(0),
            CODE_PLANES=code_planes, SCALE_PLANES=scale_planes,
            num_warps=warps, **IEEE, **following(),
        )  # fmt: skip
    return out, factor


def products(
    rows: Tensor, factor: Tensor | None, weights: PackedExperts | Tensor, routing: DeviceRouting, K: int, gated: bool,
    out_rows: int, config: ExpertsConfig,
) -> Tensor:  # fmt: skip
    """Grouped product over all blocks of rows; gated: of tokens, with SiLU; else of sorted rows, by position."""
    O, I = (weights.outputs, weights.inputs) if isinstance(weights, PackedExperts) else weights.shape[1:]
    width = O // 2 if gated else O
    outputs = config.outputs if gated or not config.down else config.down
    out = torch.empty(out_rows, width, dtype=torch.bfloat16, device=rows.device)
    common = {"K": K, "I": I, "O": O, "GATED": gated, "BO": outputs, "R": config.rows}
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, **following()}
    if config.registers is not None:
        launch["maxnreg"] = config.registers
    columns = triton.cdiv(width, outputs)
    grid = (GROUP.value * columns, triton.cdiv(routing.blocks, GROUP.value))
    blocks = routing.order, routing.table, routing.blocks
    if isinstance(weights, Tensor):
        BI = min(config.dense_inner, triton.next_power_of_2(I))
        bulk = config.bulk and I * weights.element_size() % 16 == 0
        source = TensorDescriptor.from_tensor(weights.flatten(0, 1), [outputs, BI]) if bulk else weights
        products_dense[grid](rows, source, out, *blocks, BI=BI, BULK=bulk, TAILS=config.tails, **common, **launch)
        return out
    operands = (rows, factor, weights.words, weights.scales.view(torch.int16), weights.epilogue, out)
    if config.strips:
        parts = {"TAILS": config.tails, "PARTS": config.parts, "UNROLL": config.unroll}
        kernel = products_fp4[grid](*operands, *blocks, ASM=config.asm, **parts, **common, **launch)
    else:
        kernel = _products_fp4[(routing.blocks, columns)](
            *operands, routing.order, routing.table, ASM=config.asm, **common, **launch
        )
    require_pairs(kernel)
    return out


def routed_experts(
    x: Tensor | QuantizedBlocks,
    experts_NK: Tensor,
    gates_NK: Tensor,
    gate_up: PackedExperts | Tensor,
    down: PackedExperts | Tensor,
    format: str | None,
    encode_scale: str | float | Tensor,
    config: ExpertsConfig | None = None,
    record: RecordTarget | None = None,
    summed: bool = True,
) -> Tensor:
    """See `tracefp4.kernels.grouped_experts.routed_experts`; operands are checked there."""
    N, K = experts_NK.shape
    fp4 = isinstance(gate_up, PackedExperts)
    E = gate_up.experts if isinstance(gate_up, PackedExperts) else gate_up.shape[0]
    O = down.outputs if isinstance(down, PackedExperts) else down.shape[1]
    M = N * K
    if N == 0:
        return torch.empty((N, O) if summed else (N, K, O), dtype=torch.bfloat16, device=experts_NK.device)
    config = config or default_config(fp4, M / E)
    factor: Tensor | None = None
    if fp4 and M < TWO_PHASES:
        routing = _empty_routing(experts_NK, E, config.rows)
        rows, factor = operand_rows(x, format, encode_scale, record, _OnePhase(experts_NK, routing, E, config.rows))
    elif fp4:
        routing = route(experts_NK, E, config.rows)
        rows, factor = operand_rows(x, format, encode_scale, record)
    else:
        assert isinstance(x, Tensor)
        routing, rows = route(experts_NK, E, config.rows), x
    hidden = products(rows, factor, gate_up, routing, K, True, M, config)
    if fp4:
        hidden, factor = operand_rows(hidden, format, encode_scale)
    y = products(hidden, factor, down, routing, K, False, M, config)
    if not summed:
        return y.view(N, K, O)
    out = torch.empty(N, O, dtype=torch.bfloat16, device=experts_NK.device)
    block = min(1024, triton.next_power_of_2(O))
    _weighted_sum[(N, triton.cdiv(O, block))](
        y, gates_NK, out, K=K, O=O, BLOCK=block, num_warps=4, **IEEE, **following()
    )
    return out
