"""Compensated rows: a program quantizes a row, its residual, and what is kept of that, all in registers.

Rows are held as their blocks, [NB, 16], as in `quantize_record`. Selecting columns takes two kernels before: partial
sums of their norms over the batch in `ref.LANES` lanes, and one program that adds the lanes and finds the largest.
Nothing is stored in between but those sums: rows are quantized again, which costs less than reading them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.formats import get_format
from tracefp4.kernels.compensation.ref import FACTS, LANES
from tracefp4.kernels.quantize_record.triton import round_row, row_blocks
from tracefp4.kernels.triton_layout import Checked
from tracefp4.kernels.triton_math import (
    IEEE,
    block_amax,
    decode_e2m1,
    decode_e4m3,
    encode_scale_of,
    follow,
    following,
    from_bf16,
    load_f32,
    to_bf16,
)

assert LANES == 256  # which `_select_columns` adds up


@triton.jit
def _quantized(x, EXACT: tl.constexpr, POW2: tl.constexpr, ENCODE_MAX: tl.constexpr):
    """f32 [NB, 16] -> (E2M1 * SF, its values, both [NB, 16], 1/S [1]); bits of `Format.operands` and `dequantize`."""
    amax = block_amax(x)
    s = encode_scale_of(tl.max(amax, axis=0, keep_dims=True), ENCODE_MAX, POW2)
    codes, byte = round_row(x, s, amax, EXACT)
    element, sf = decode_e2m1(codes), decode_e4m3(byte)
    inverse = tl.div_rn(tl.zeros_like(s) + 1.0, s)
    return element * sf[:, None], element * (sf * inverse)[:, None], inverse


@triton.jit
def _row(
    x, up, real, row, i, x_stride, up_stride,
    I: tl.constexpr, PER: tl.constexpr, EXACT: tl.constexpr, POW2: tl.constexpr, ENCODE_MAX: tl.constexpr,
):  # fmt: skip
    """(operand of Q(X) [NB, 16], its 1/S [1], R [NB, 16]) of a row. up, real: None where there is none."""
    v = load_f32(x + row * x_stride + i, i < I)
    if up is not None:
        v = from_bf16(to_bf16(v * load_f32(up + row * up_stride + i, i < I)))
    operand, value, inverse = _quantized(v, EXACT, POW2, ENCODE_MAX)
    r = v - value
    if real is not None:
        r = tl.where(tl.load(real + row // PER) != 0, r, 0.0)
    return operand, inverse, r


@triton.jit
def _order(x):
    """f32, not negative -> int32 that orders alike, NaN above all."""
    return tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _largest(x, i, I: tl.constexpr, KEPT: tl.constexpr, LOG: tl.constexpr):
    """Whether each of f32 x, not negative, is among the KEPT largest, the first of equal ones; i: their places.

    No two have one key, so that the smallest key that is kept, which is found bit by bit, says it all.
    """
    key = (_order(x).to(tl.int64) << LOG) + ((1 << LOG) - 1 - i)
    key = tl.where(i < I, key, -1)
    least = tl.full((), 0, tl.int64)
    bit = tl.full((), 1, tl.int64) << (30 + LOG)
    for _ in range(31 + LOG):
        enough = tl.sum((key >= (least | bit)).to(tl.int32), axis=None) >= KEPT
        least = tl.where(enough, least | bit, least)
        bit = bit >> 1
    return key >= least


@triton.jit
def _two_of_four(x, NB: tl.constexpr):
    """Whether each of f32 [NB, 16], not negative, is among the two largest of its four, the first of equal ones."""
    key = tl.reshape(_order(x), (NB * 4, 4))
    j = tl.arange(0, 4)[None, :]
    before = tl.zeros([NB * 4, 4], tl.int32)
    for other in tl.static_range(4):
        rival = tl.sum(tl.where(j == other, key, 0), axis=1)[:, None]
        before += ((rival > key) | ((rival == key) & (other < j))).to(tl.int32)
    return tl.reshape((before < 2).to(tl.int32), (NB, 16)) != 0


@Checked
@triton.jit
def _column_norms(
    x, up, real, partial, x_stride, up_stride, rows,
    I: tl.constexpr, NB: tl.constexpr, PER: tl.constexpr, EXACT: tl.constexpr, POW2: tl.constexpr,
    ENCODE_MAX: tl.constexpr, RESQ: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lane by lane, the sums of squares of R's columns, or of Q(R)'s: partial f32 [LANES, I]."""
    follow(PDL)
    lane = tl.program_id(0)
    i = tl.arange(0, NB)[:, None] * 16 + tl.arange(0, 16)[None, :]
    total = tl.zeros([NB, 16], tl.float32)
    row = lane.to(tl.int64)
    for _ in range(lane, rows, LANES):
        _, _, r = _row(x, up, real, row, i, x_stride, up_stride, I, PER, EXACT, POW2, ENCODE_MAX)
        if RESQ:
            _, r, _ = _quantized(r, EXACT, POW2, ENCODE_MAX)
        total += r * r
        row += LANES
    tl.store(partial + lane * I + i, total, mask=i < I)


@triton.jit
def _eight(p, real, STEP: tl.constexpr):
    """Sum of eight vectors as a tree of neighbours."""
    a = tl.load(p, mask=real, other=0.0) + tl.load(p + STEP, mask=real, other=0.0)
    b = tl.load(p + 2 * STEP, mask=real, other=0.0) + tl.load(p + 3 * STEP, mask=real, other=0.0)
    c = tl.load(p + 4 * STEP, mask=real, other=0.0) + tl.load(p + 5 * STEP, mask=real, other=0.0)
    d = tl.load(p + 6 * STEP, mask=real, other=0.0) + tl.load(p + 7 * STEP, mask=real, other=0.0)
    return (a + b) + (c + d)


@triton.jit
def _thirty_two(p, real, STEP: tl.constexpr):
    a, b = _eight(p, real, STEP), _eight(p + 8 * STEP, real, STEP)
    c, d = _eight(p + 16 * STEP, real, STEP), _eight(p + 24 * STEP, real, STEP)
    return (a + b) + (c + d)


@Checked
@triton.jit
def _select_columns(
    partial, selected, I: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr
):
    """selected uint8 [I]: 1 for the KEPT columns of the largest norms, from partial f32 [256, I]. One program."""
    follow(PDL)
    i = tl.arange(0, BLOCK)
    p = partial + i
    one = tl.zeros([BLOCK], tl.float32)
    two, four, norms = one, one, one
    for part in range(8):  # still a tree of neighbours: of eight parts, in a loop, which compiles faster
        v = _thirty_two(p + part * (32 * I), i < I, I)
        pair = one + v
        half = two + pair
        norms = four + half
        if part % 2 == 0:
            one = v
        if part % 4 == 1:
            two = pair
        if part == 3:
            four = half
    tl.store(selected + i, _largest(norms, i, I, KEPT, LOG).to(tl.uint8), mask=i < I)


@Checked
@triton.jit
def _compensate(
    x, up, real, selected, out, epilogue, facts, x_stride, up_stride, rows,
    I: tl.constexpr, NB: tl.constexpr, LOG: tl.constexpr, PER: tl.constexpr, EXACT: tl.constexpr, POW2: tl.constexpr,
    ENCODE_MAX: tl.constexpr, RESQ: tl.constexpr, SELECTION: tl.constexpr, KEPT: tl.constexpr, PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows program_id, program_id + PROGRAMS, ... whole; facts: f64 [PROGRAMS, 3], a row for each program."""
    follow(PDL)
    program = tl.program_id(0)
    i = tl.arange(0, NB)[:, None] * 16 + tl.arange(0, 16)[None, :]
    whole, given, left = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    row = program.to(tl.int64)
    for _ in range(program, rows, PROGRAMS):
        operand, inverse, r = _row(x, up, real, row, i, x_stride, up_stride, I, PER, EXACT, POW2, ENCODE_MAX)
        seen = r
        if RESQ:
            second, value, second_inverse = _quantized(r, EXACT, POW2, ENCODE_MAX)
            seen = value
        if SELECTION == "channels":
            keep = tl.load(selected + i, mask=i < I, other=0) != 0
        elif SELECTION == "row":
            keep = _largest(seen * seen, i, I, KEPT, LOG)
        else:
            keep = _two_of_four(tl.abs(seen), NB)
        if RESQ:
            second, value = tl.where(keep, second, 0.0), tl.where(keep, value, 0.0)
        else:
            second, value, second_inverse = _quantized(tl.where(keep, r, 0.0), EXACT, POW2, ENCODE_MAX)
        total = operand + second * tl.div_rn(second_inverse, inverse)[:, None]
        tl.store(out + row * I + i, total, mask=i < I)
        tl.store(epilogue + row + tl.arange(0, 1), inverse)
        back, rest = (r * (value != 0).to(tl.float32)).to(tl.float64), (r - value).to(tl.float64)
        whole += tl.sum(r.to(tl.float64) * r.to(tl.float64), axis=None)
        given += tl.sum(back * back, axis=None)
        left += tl.sum(rest * rest, axis=None)
        row += PROGRAMS
    at = facts + program * 3
    tl.store(at, tl.load(at) + whole)
    tl.store(at + 1, tl.load(at + 1) + given)
    tl.store(at + 2, tl.load(at + 2) + left)


@Checked
@triton.jit
def _chosen_outputs(
    y, chosen, epilogue_e, epilogue_n, out, e_stride, n_stride, o_stride,
    PER: tl.constexpr, O: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, WIDENED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (m, part of the outputs). ONE: epilogue_n is a single number. WIDENED: out is f32."""
    follow(PDL)
    m = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    e, row = tl.load(chosen + m), m // PER
    v = tl.load(y + e * e_stride + row * n_stride + o.to(tl.int64) * o_stride, mask=o < O, other=0.0)
    if epilogue_e is not None:
        v = v * tl.load(epilogue_e + e)
    if epilogue_n is not None:
        v = v * tl.load(epilogue_n + (0 if ONE else row))
    rounded = to_bf16(v)
    tl.store(out + m * O + o, from_bf16(rounded) if WIDENED else rounded, mask=o < O)


def compensated_rows(
    x_NI: Tensor,
    up_NI: Tensor | None,
    real: Tensor | None,
    facts: Tensor,
    format: str,
    encode_scale: str,
    rule: str,
    selection: str,
    kept: int,
) -> tuple[Tensor, Tensor]:
    """See `tracefp4.kernels.compensation.compensated_rows`; operands are checked there."""
    N, I = x_NI.shape
    device = x_NI.device
    out = torch.empty(N, I, dtype=torch.float32, device=device)
    epilogue = torch.empty(N, 1, dtype=torch.float32, device=device)
    if N == 0:
        return out, epilogue
    blocks, warps = row_blocks(I, N)
    rows = (x_NI.stride(0), 0 if up_NI is None else up_NI.stride(0), N)
    form = {
        "I": I, "NB": blocks, "PER": 1 if real is None else N // len(real), "EXACT": format == "nvfp4-exact",
        "POW2": encode_scale == "row-pow2", "ENCODE_MAX": get_format(format).encode_max, "RESQ": rule == "resq",
        **IEEE, **following(),
    }  # fmt: skip
    selected = None  # of columns; a row that selects for itself needs none
    if selection == "channels":
        partial = torch.empty(LANES, I, dtype=torch.float32, device=device)
        selected = torch.empty(I, dtype=torch.uint8, device=device)
        _column_norms[(LANES,)](x_NI, up_NI, real, partial, *rows, LANES=LANES, num_warps=warps, **form)
        block = triton.next_power_of_2(I)
        _select_columns[(1,)](
            partial, selected, I=I, BLOCK=block, LOG=block.bit_length() - 1, KEPT=kept,
            num_warps=min(16, max(1, block // 32)), **IEEE, **following(),
        )  # fmt: skip
    _compensate[(min(N, FACTS),)](
        x_NI, up_NI, real, selected, out, epilogue, facts, *rows, LOG=(16 * blocks).bit_length() - 1,
        SELECTION=selection, KEPT=kept, PROGRAMS=FACTS, num_warps=warps, **form,
    )  # fmt: skip
    return out, epilogue


def chosen_outputs(
    y_ENO: Tensor, chosen_M: Tensor, per: int, epilogue_E: Tensor | None, epilogue_N1: Tensor | None, widened: bool
) -> Tensor:
    """See `tracefp4.kernels.compensation.chosen_outputs`; operands are checked there."""
    M, O = chosen_M.shape[0], y_ENO.shape[2]
    out = torch.empty(M, O, dtype=torch.float32 if widened else torch.bfloat16, device=y_ENO.device)
    if M:
        block = min(1024, max(128, triton.next_power_of_2(O)))
        one = epilogue_N1 is not None and epilogue_N1.numel() == 1
        _chosen_outputs[(M, triton.cdiv(O, block))](
            y_ENO, chosen_M, epilogue_E, epilogue_N1, out, *y_ENO.stride(),
            PER=per, O=O, BLOCK=block, ONE=one, WIDENED=widened, num_warps=4, **IEEE, **following(),
        )  # fmt: skip
    return out
