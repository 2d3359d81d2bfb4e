"""Encoding and decoding: round trips, parity, every exception of the decoding rules, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tracefp4.formats import (
    QuantizedBlocks,
    e4m3_index,
    encode_e2m1,
    encode_e8m0,
    get_format,
    list_formats,
)
from tracefp4.guidance import SUPPORTED_BITS, GuidanceError, decode, encode, plane_layout
from tracefp4.guidance.codec import decode_codes, decode_scales, pack_rows, unpack_rows
from tracefp4.guidance.schema import format_family

PAIRS = [(name, bits) for name in list_formats() for bits in SUPPORTED_BITS[format_family(name)]]
NAN, INF = math.nan, math.inf


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantize(name: str, x: Tensor, scale: object = "row") -> QuantizedBlocks:
    fmt = get_format(name)
    return fmt.quantize(x, encode_scale=scale if fmt.scale_kind == "e4m3" else None)


def spread(scales: Tensor, name: str) -> Tensor:
    """One entry per block -> one entry per value."""
    return scales.repeat_interleave(get_format(name).block_size, dim=-1)


# --- encoding ------------------------------------------------------------


def test_code_planes_of_every_byte() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    one = torch.ones(4, 8, dtype=torch.uint8)
    blocks = QuantizedBlocks(packed, one, torch.tensor(1.0), "nvfp4", (4, 128))
    codes = blocks.unpacked_codes()
    bits, _, _ = unpack_rows(encode(blocks, 4.5))
    assert torch.equal(bits, codes)
    bits, _, _ = unpack_rows(encode(blocks, 1.5))
    assert torch.equal(bits, codes & 1)


def test_pack_rows_takes_views() -> None:
    """Every second row, and bytes that start off a word boundary."""
    blocks = quantize("nvfp4", gaussian(6, 64))
    expected = pack_rows(blocks, 1.125)
    strided = blocks.rows(slice(None, None, 2))
    assert torch.equal(pack_rows(strided, 1.125), expected[::2])
    memory = torch.zeros(blocks.codes.numel() + 1, dtype=torch.uint8)
    memory[1:] = blocks.codes.flatten()
    odd = QuantizedBlocks(memory[1:].view(blocks.codes.shape), blocks.scales, blocks.encode_scale, "nvfp4", (6, 64))
    assert torch.equal(pack_rows(odd, 1.125), expected)


def test_encode_checks_the_mask_and_expands_the_scale() -> None:
    blocks = quantize("nvfp4", gaussian(2, 3, 32), gaussian(2, 1, 1).abs() * 100)
    record = encode(blocks, valid=torch.ones(2, 3, dtype=torch.bool))
    assert record.encode_scale.shape == (6, 1)
    assert torch.equal(record.encode_scale.reshape(2, 3)[:, 0], blocks.encode_scale.flatten())
    with pytest.raises(GuidanceError, match="5 elements for 6 rows"):
        encode(blocks, valid=torch.ones(5, dtype=torch.bool))


# --- round trips and properties ------------------------------------------


@pytest.mark.parametrize("rule", ["cell", "bracket"])
@pytest.mark.parametrize(("name", "bits"), PAIRS)
def test_equal_activations_give_the_rollouts_slots(name: str, bits: float, rule: str) -> None:
    """With the trainer's activations equal to the rollout's, every width names codes and scales exactly."""
    x = gaussian(3, 5, 96)
    blocks = quantize(name, x)
    chosen, guided = decode(encode(blocks, bits), x, rule)
    assert torch.equal(chosen.codes, blocks.codes)
    assert torch.equal(chosen.scales, blocks.scales)
    assert chosen.shape == blocks.shape
    assert chosen.encode_scale is blocks.encode_scale or torch.equal(chosen.encode_scale, blocks.encode_scale)
    assert guided.shape == (15,)
    assert bool(guided.all())


@given(
    name=st.sampled_from(list_formats()),
    seed=st.integers(0, 2**16),
    blocks=st.integers(1, 5),
    rows=st.integers(0, 4),
)
@settings(max_examples=40, deadline=None)
def test_full_width_returns_the_rollouts_codes(name: str, seed: int, blocks: int, rows: int) -> None:
    """Whatever the trainer computes: with the cell rule full codes are the rollout's own."""
    shape = (rows, blocks * get_format(name).block_size)
    sent = quantize(name, gaussian(*shape, seed=seed))
    record = encode(sent, SUPPORTED_BITS[format_family(name)][0])
    got, _ = decode(record, 10 * gaussian(*shape, seed=seed + 1))
    assert torch.equal(got.codes, sent.codes)
    assert torch.equal(got.scales, sent.scales)


@given(
    pair=st.sampled_from(PAIRS),
    seed=st.integers(0, 2**16),
    noise=st.sampled_from([0.0, 0.01, 0.1, 1.0, 30.0]),
    rule=st.sampled_from(["cell", "bracket"]),
)
@settings(max_examples=80, deadline=None)
def test_decoded_values_carry_the_recorded_bits(pair: tuple[str, float], seed: int, noise: float, rule: str) -> None:
    """Parity of every code and low bits of every scale are those recorded, however far the trainer is off."""
    name, bits = pair
    x = gaussian(3, 96, seed=seed)
    blocks = quantize(name, x)
    chosen, _ = decode(encode(blocks, bits), x + noise * gaussian(3, 96, seed=seed + 1), rule)
    mask = (1 << plane_layout(name, bits).scale_bits) - 1
    assert torch.equal(chosen.scales & mask, blocks.scales & mask)
    assert int(chosen.scales.max()) < (0xFF if name.startswith("mx") else 0x7F)
    full_bracket = rule == "bracket" and bits > 4
    alive = spread(chosen.scales, name) != 0 if name.startswith("nv") else torch.tensor(True)
    parity_kept = ((chosen.unpacked_codes() ^ blocks.unpacked_codes()) & 1) == 0
    assert full_bracket or bits < 1 or bool((parity_kept | ~alive).all())


@given(
    name=st.sampled_from(list_formats()),
    seed=st.integers(0, 2**16),
    noise=st.sampled_from([1e-3, 0.03, 0.3, 2.0]),
)
@settings(max_examples=50, deadline=None)
def test_full_codes_with_bracket_are_never_worse(name: str, seed: int, noise: float) -> None:
    """|q_trace - q_rollout| <= |q_nearest - q_rollout|, element by element at the same scale."""
    fmt = get_format(name)
    x = gaussian(4, 96, seed=seed)
    y = x + noise * gaussian(4, 96, seed=seed + 1)
    sent = quantize(name, x)
    got, _ = decode(encode(sent, SUPPORTED_BITS[format_family(name)][0]), y, "bracket")
    q_rollout, q_trace = fmt.decode_elements(sent.codes), fmt.decode_elements(got.codes)
    q_nearest = fmt.decode_elements(fmt.pack(fmt.round_with_scales(y, sent.scales, sent.encode_scale)))
    assert torch.equal(got.scales, sent.scales)
    assert bool(((q_trace - q_rollout).abs() <= (q_nearest - q_rollout).abs()).all())
    # and the choice is one of the two neighbours of z, clipped
    z = fmt.scaled(y, sent.scales, sent.encode_scale).clamp(-fmt.element_max, fmt.element_max)
    widest = float(fmt.magnitudes(z.device).diff().max())
    assert bool(((q_trace - z).abs() <= widest).all())


@given(pair=st.sampled_from(PAIRS), seed=st.integers(0, 2**16), rule=st.sampled_from(["cell", "bracket"]))
@settings(max_examples=30, deadline=None)
def test_rows_decode_alone_as_they_do_together(pair: tuple[str, float], seed: int, rule: str) -> None:
    name, bits = pair
    x = gaussian(5, 64, seed=seed)
    y = x * (1 + 0.1 * gaussian(5, 64, seed=seed + 1))
    record = encode(quantize(name, x), bits, valid=torch.tensor([True, False, True, True, False]))
    whole, guided = decode(record, y, rule)
    order = [3, 1, 1]
    part, part_guided = decode(record.select(order), y[order], rule)
    assert torch.equal(part.codes, whole.codes[order])
    assert torch.equal(part.scales, whole.scales[order])
    assert torch.equal(part_guided, guided[order])


def test_inputs_are_left_alone_and_dtype_and_strides_do_not_matter() -> None:
    x = gaussian(4, 64).bfloat16()
    y = (x + 0.02 * gaussian(4, 64, seed=1)).bfloat16()
    for name, bits in PAIRS:
        record = encode(quantize(name, x), bits, valid=torch.tensor([True, True, False, True]))
        payload, before = record.payload.clone(), y.clone()
        expected, _ = decode(record, y.float())
        for view in (y, y.t().contiguous().t()):
            got, _ = decode(record, view)
            assert torch.equal(got.codes, expected.codes)
            assert torch.equal(got.scales, expected.scales)
        assert torch.equal(record.payload, payload)
        assert torch.equal(y, before)


def test_one_dimension_and_no_rows() -> None:
    x = gaussian(48)
    blocks = quantize("nvfp4", x)
    chosen, guided = decode(encode(blocks), x)
    assert torch.equal(chosen.codes, blocks.codes)
    assert guided.shape == (1,)
    empty = torch.empty(0, 7, 48)
    chosen, guided = decode(encode(quantize("nvfp4", empty)), empty)
    assert chosen.codes.shape == (0, 7, 24)
    assert guided.shape == (0,)


# --- refusals and rows without a record ----------------------------------


def test_another_recipe_shape_or_rule_is_refused_by_name() -> None:
    x = gaussian(2, 32)
    record = encode(quantize("nvfp4", x), recipe_hash="aaaa")
    decode(record, x, recipe_hash="aaaa")
    decode(record, x)
    with pytest.raises(GuidanceError, match=r"'aaaa'.*'bbbb'"):
        decode(record, x, recipe_hash="bbbb")
    with pytest.raises(GuidanceError, match=r"\[2, 32\].*\[1, 2, 32\]"):
        decode(record, x[None])
    with pytest.raises(GuidanceError, match="'nearest'; valid rules: cell, bracket"):
        decode(record, x, rule="nearest")


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("name", "bits"), PAIRS)
def test_invalid_rows_round_to_nearest_at_their_own_scale(name: str, bits: float, static: bool) -> None:
    x = gaussian(2, 3, 64)
    y = x * (1 + 0.3 * gaussian(2, 3, 64, seed=1))
    sent = quantize(name, x, torch.tensor(400.0) if static else "row")
    valid = torch.tensor([True, False, True, True, True, False])
    all_valid, _ = decode(encode(sent, bits), y)
    owns: list[object] = ["row", "row-pow2", 300.0, torch.tensor(300.0), gaussian(2, 3, 1).abs() * 100 + 1]
    for own in owns:
        got, guided = decode(encode(sent, bits, valid=valid), y, own_encode_scale=own)
        fallback = quantize(name, y, own)
        assert torch.equal(guided, valid)
        for row in range(6):
            expected = all_valid if valid[row] else fallback
            assert torch.equal(got.codes.view(6, -1)[row], expected.codes.view(6, -1)[row])
            assert torch.equal(got.scales.view(6, -1)[row], expected.scales.view(6, -1)[row])
            if got.encode_scale is not None:
                scale = expected.encode_scale.expand(2, 3, 1).reshape(6)[row]
                assert float(got.encode_scale.reshape(6)[row]) == float(scale)


def test_garbage_in_invalid_rows_does_not_matter() -> None:
    x = gaussian(2, 32)
    record = encode(quantize("nvfp4", x), valid=torch.tensor([True, False]))
    record.payload[1] = 255
    record.encode_scale[1] = NAN
    got, _ = decode(record, x)
    assert torch.equal(got.codes, quantize("nvfp4", x).codes)
    assert bool(got.encode_scale.isfinite().all())


# --- the decoding of codes, by hand --------------------------------------


def codes_at_scale_one(
    z: list[float], bits: list[int], rule: str, full: bool = False, band: float | None = None
) -> list[int]:
    """decode_codes where z is x itself: MXFP4 with scale byte 127 (2^0)."""
    fmt = get_format("mxfp4-floor")
    pad = 32 - len(z)
    x, recorded = torch.tensor([z + [0.0] * pad]), torch.tensor([bits + [0] * pad], dtype=torch.uint8)
    scales = torch.full((1, 1), 127, dtype=torch.uint8)
    return decode_codes(fmt, x, scales, None, recorded, full, rule, band)[0, : len(z)].tolist()


# code: 0 1 2 3 4 5 6 7 = 0 .5 1 1.5 2 3 4 6; minus adds 8
CELL = [
    # the own code fits
    (2.2, 0, 4), (2.9, 1, 5), (-1.4, 1, 11), (0.1, 0, 0), (-0.1, 0, 8),
    # the nearer of the two neighbouring cells
    (2.2, 1, 5), (2.1, 1, 3), (2.6, 0, 4), (3.4, 0, 6), (3.6, 1, 5), (4.9, 1, 7), (-2.2, 1, 13),
    (-2.1, 1, 11), (0.3, 0, 0), (0.6, 0, 2), (0.8, 1, 1), (1.2, 1, 3), (1.3, 0, 2), (1.7, 0, 4), (5.5, 0, 6),
    # beyond 6 a zero bit means 4, never 8
    (6.0, 0, 6), (6.5, 0, 6), (100.0, 0, 6), (INF, 0, 6), (-7.0, 0, 14), (7.0, 1, 7), (-INF, 1, 15),
    # about zero the sign comes from z
    (0.0, 1, 1), (-0.0, 1, 9), (0.0, 0, 0), (-0.0, 0, 8), (1e-30, 1, 1), (-1e-30, 1, 9), (-0.3, 0, 8),
    # exactly on a grid value with the wrong parity: toward zero where both neighbours are equally near
    (0.5, 0, 0), (1.0, 1, 1), (1.5, 0, 2), (3.0, 0, 4), (-0.5, 0, 8), (-3.0, 0, 12), (4.0, 1, 5), (2.0, 1, 3),
    # equally near, but not on the grid value: the side on which z lies
    (2.125, 1, 5), (4.25, 1, 7), (-2.125, 1, 13), (-4.25, 1, 15), (2.1249, 1, 3), (4.2499, 1, 5),
    # on a boundary: the tie of nearest-even decides the own code
    (0.25, 1, 1), (0.75, 1, 1), (1.25, 1, 3), (1.75, 1, 3), (2.5, 1, 5), (3.5, 1, 5), (5.0, 1, 7),
    # NaN has code 7
    (NAN, 1, 7), (NAN, 0, 6),
]  # fmt: skip
BRACKET = [
    (2.2, 0, 4), (2.2, 1, 5), (1.9, 0, 4), (1.9, 1, 3), (-2.2, 0, 12), (-2.2, 1, 13), (0.1, 0, 0),
    (0.1, 1, 1),
    # on a grid value the other neighbour is the next larger one; at and beyond 6 it is 4
    (2.0, 0, 4), (2.0, 1, 5), (0.5, 1, 1), (0.5, 0, 2), (6.0, 0, 6), (6.0, 1, 7), (9.0, 0, 6), (-INF, 0, 14),
    (5.0, 0, 6), (5.0, 1, 7), (0.0, 0, 0), (-0.0, 0, 8), (0.0, 1, 1), (-0.0, 1, 9), (NAN, 0, 6), (NAN, 1, 7),
    # bracket and cell differ: 2.1 lies in {2, 3}, though 1.5's cell is the nearer one
    (2.1, 1, 5),
]  # fmt: skip
BRACKET_FULL = [
    # z, the rollout's code, the choice
    (2.4, 7, 5), (2.4, 5, 5), (2.4, 4, 4), (2.4, 0, 4), (2.4, 15, 4), (-2.4, 15, 13), (-2.4, 3, 12),
    (-2.4, 12, 12), (0.1, 8, 0), (0.1, 9, 0), (0.1, 1, 1), (-0.1, 7, 8), (-0.1, 15, 9), (7.0, 6, 6),
    (7.0, 7, 7), (7.0, 2, 6), (3.0, 6, 6), (3.0, 5, 5), (3.0, 4, 5), (NAN, 3, 6),
]  # fmt: skip


@pytest.mark.parametrize(("cases", "rule", "full"), [
    (CELL, "cell", False), (BRACKET, "bracket", False), (BRACKET_FULL, "bracket", True),
])  # fmt: skip
def test_codes_by_hand(cases: list[tuple[float, int, int]], rule: str, full: bool) -> None:
    for start in range(0, len(cases), 32):
        part = cases[start : start + 32]
        got = codes_at_scale_one([z for z, _, _ in part], [bit for _, bit, _ in part], rule, full)
        wrong = [(case, code) for case, code in zip(part, got, strict=True) if case[2] != code]
        assert not wrong, f"(z, bit, expected), decoded: {wrong}"


GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def slot(code: int) -> int:
    return -(code & 7) if code & 8 else code & 7


def held(z: float, own: int, chosen: int, band: float) -> bool:
    """By hand: whether a record is followed; z, the grid and the band are exact binary fractions here."""
    a, b = slot(own), slot(chosen)
    if abs(a - b) != 1:
        return a == b
    va, vb = (math.copysign(GRID[abs(n)], n) for n in (a, b))
    return abs(z - (va + vb) / 2) <= band * abs(va - vb)


@pytest.mark.parametrize(("rule", "full"), [("cell", False), ("cell", True), ("bracket", False), ("bracket", True)])
def test_a_band_keeps_what_is_near_the_border(rule: str, full: bool) -> None:
    """Every multiple of 1/32 up to 8, every recorded code, bands from a sixteenth of a slot to a whole one."""
    grid = [i / 32 for i in range(-256, 257)]
    for band in (0.0625, 0.25, 0.5, 1.0):
        kept = released = 0
        for start in range(0, len(grid), 32):
            z = grid[start : start + 32]
            own = [int(c) for c in encode_e2m1(torch.tensor(z))]
            for recorded in range(16) if full else range(2):
                every = codes_at_scale_one(z, [recorded] * len(z), rule, full)
                got = codes_at_scale_one(z, [recorded] * len(z), rule, full, band)
                for value, mine, chosen, code in zip(z, own, every, got, strict=True):
                    follows = held(value, mine, chosen, band)
                    assert code == (chosen if follows else mine), (value, recorded, mine, chosen, code)
                    kept += follows and mine != chosen
                    released += not follows
        assert kept
        assert released


def test_a_whole_slot_is_no_band_for_one_bit() -> None:
    """The nearer neighbour's border is never a slot away, but beyond the grid."""
    z = [i / 64 for i in range(-448, 449)]
    for start in range(0, len(z), 32):
        for bit in (0, 1):
            part = z[start : start + 32]
            assert codes_at_scale_one(part, [bit] * len(part), "cell", band=1.0) == codes_at_scale_one(
                part, [bit] * len(part), "cell"
            )


def test_noise_of_a_hundredth_of_a_slot_is_mended_in_a_narrow_band_and_drift_is_not() -> None:
    x = gaussian(64, 1024)
    record = encode(quantize("nvfp4", x, "row-pow2"), 1.125)
    record = replace(record, stale=torch.ones(64, dtype=torch.bool))
    values = get_format("nvfp4").dequantize
    truth = values(quantize("nvfp4", x, "row-pow2"))  # values, since a zero has two codes

    def differ(y: Tensor, band: float | None) -> float:
        return float((values(decode(record, y, band=band)[0]) != truth).float().mean())

    noisy, moved = (x + size * gaussian(64, 1024, seed=1) for size in (0.002, 0.03))
    assert torch.equal(decode(replace(record, stale=None), moved, band=0.06)[0].codes, decode(record, moved)[0].codes)
    assert differ(noisy, None) < 1e-4
    assert differ(noisy, 0.06) < 1e-4
    pinned, free = differ(moved, None), differ(moved, 0.06)
    assert pinned < 0.2 * free  # held in the old slots; what has moved is seen


def test_a_band_of_nothing_is_refused() -> None:
    x = gaussian(2, 32)
    with pytest.raises(GuidanceError, match=r"a band must be positive, got 0"):
        decode(encode(quantize("nvfp4", x), 1.125), x, band=0.0)


def test_two_slots_apart_is_invisible() -> None:
    """The rollout chose 1; the trainer's 2.0 has the same mantissa bit, so the own code stays."""
    assert codes_at_scale_one([2.0], [2 & 1], "cell") == [4]
    assert codes_at_scale_one([2.0], [2], "cell", full=True) == [2]


def test_the_papers_example() -> None:
    """60.24 and 59.76 at scale 24 are 2.51 and 2.49: nearest gives 3 and 2, guidance the rollout's slot."""
    z = [60.24 / 24, 59.76 / 24]
    assert [int(code) for code in encode_e2m1(torch.tensor(z))] == [5, 4]
    for rule in ("cell", "bracket"):
        for rollout_code in (4, 5):
            assert codes_at_scale_one(z, [rollout_code & 1] * 2, rule) == [rollout_code] * 2


@pytest.mark.parametrize("rule", ["cell", "bracket"])
@pytest.mark.parametrize(("name", "zero_codes"), [("nvfp4", [0, 8]), ("nvfp4-exact", [7, 15])])
def test_underflowed_scale_leaves_the_formats_own_codes(name: str, zero_codes: list[int], rule: str) -> None:
    """SF = 0: the value is 0 whatever was recorded; codes follow the format's rule."""
    x = torch.tensor([[1e-4, -1e-4] * 8])
    blocks = quantize(name, x, torch.tensor(1.0))
    assert blocks.scales.tolist() == [[0]]
    for bits in (1.0625, 1.125, 1.5):
        record = encode(blocks, bits)
        record.payload[0, :2] ^= 255  # the opposite of every mantissa bit
        chosen, _ = decode(record, x, rule)
        assert chosen.scales.tolist() == [[0]]
        assert chosen.unpacked_codes()[0].tolist() == zero_codes * 8
        assert bool((get_format(name).dequantize(chosen) == 0).all())


@pytest.mark.parametrize("rule", ["cell", "bracket"])
def test_nan_and_inf_stay_within_their_block(rule: str) -> None:
    x = gaussian(4, 64)
    y = x.clone()
    y[0, 3], y[1, 4], y[2, 5] = NAN, INF, -INF
    y[3] = NAN
    for name, bits in PAIRS:
        fmt = get_format(name)
        for sent in (quantize(name, x), quantize(name, y)):
            chosen, _ = decode(encode(sent, bits), y, rule)
            finite, _ = decode(encode(sent, bits), x, rule)
            assert int(chosen.scales.max()) <= (0x7E if fmt.scale_kind == "e4m3" else 0xFE), "no scale is NaN"
            for row in range(3):
                codes, want = (b.unpacked_codes()[row, fmt.block_size :] for b in (chosen, finite))
                assert torch.equal(codes, want), (name, bits, row)
            own, guided = decode(encode(sent, bits, valid=torch.zeros(4, dtype=torch.bool)), y, rule)
            nearest = quantize(name, y)
            assert torch.equal(own.codes, nearest.codes)
            assert torch.equal(own.scales, nearest.scales)
            assert not guided.any()


# --- the decoding of scales ----------------------------------------------


def e4m3_by_search(index: float, low: int, width: int) -> int:
    """Nearest code of 0..0x7E with the given low bits; the lower of two equally near."""
    candidates = [code for code in range(0x7F) if code % (1 << width) == low]
    return min(candidates, key=lambda code: (abs(code - index), code))


@pytest.mark.parametrize("width", [1, 2])
def test_scale_bits_resolve_to_the_nearest_code(width: int) -> None:
    """Against a search over all 127 codes, from below the subnormals to beyond saturation, S = 1."""
    fmt = get_format("nvfp4")
    S = torch.tensor(1.0)
    amax = 6 * torch.cat([torch.logspace(-11, 9.5, 300, base=2.0), torch.tensor([0.0, 448.0, 1e9])])
    x = torch.zeros(1, 16 * len(amax))
    x[0, ::16] = amax
    index = e4m3_index(fmt.unrounded_scale(fmt.block_amax(x), S))[0].tolist()
    for low in range(1 << width):
        got = decode_scales(fmt, x, S, torch.full((1, len(amax)), low, dtype=torch.uint8), width)
        assert got[0].tolist() == [e4m3_by_search(i, low, width) for i in index]


def test_scale_ties_and_limits_by_hand() -> None:
    fmt, S = get_format("nvfp4-exact"), torch.tensor(6.0)

    def one(u: float, low: int, width: int) -> int:
        x = torch.zeros(1, 16)
        x[0, 0] = u  # S = 6 makes the unrounded scale u itself
        return int(decode_scales(fmt, x, S, torch.tensor([[low]], dtype=torch.uint8), width))

    assert one(2.0, 0, 1) == 0x40  # 2.0 is code 0x40
    assert one(2.0, 1, 1) == 0x3F  # 0x3F and 0x41 are equally near
    assert one(2.0, 2, 2) == 0x3E  # 0x3E and 0x42 are equally near
    assert one(2.3, 1, 1) == 0x41  # 0x41 is 2.25
    assert one(1e9, 1, 1) == 0x7D  # 0x7F would be NaN
    assert one(1e9, 3, 2) == 0x7B
    assert one(1e9, 0, 1) == 0x7E
    assert one(0.0, 1, 1) == 1
    assert one(0.0, 3, 2) == 3


@pytest.mark.parametrize("mode", ["floor", "even", "rceil", "ceil"])
def test_e8m0_parity_takes_the_half_of_the_octave(mode: str) -> None:
    """Own byte where its parity fits; else the next octave on the side, in log2, on which amax lies."""
    fmt = get_format(f"mxfp4-{mode}")
    amax = torch.logspace(-20, 20, 1999, base=2.0)
    x = torch.zeros(1, 32 * len(amax))
    x[0, ::32] = amax
    own = encode_e8m0(amax, mode)
    position = (
        {
            "floor": torch.log2(amax.double()) - 2,
            "ceil": torch.log2(amax.double()) - 1,
            "rceil": torch.log2(amax.double() / 6) + 1,
            "even": torch.log2(amax.double() / 1.75) - 1,
        }[mode]
        + 127
        - own
    )  # 0..1 within the octave
    assert bool((position > -1e-6).all())
    assert bool((position < 1 + 1e-6).all())
    for low in (0, 1):
        got = decode_scales(fmt, x, None, torch.full((1, len(amax)), low, dtype=torch.uint8), 1)[0].int()
        neighbour = own.int() + torch.where(position > 0.5, 1, -1)
        assert torch.equal(got, torch.where(own % 2 == low, own.int(), neighbour))


@pytest.mark.parametrize(
    ("mode", "amax", "low", "byte"),
    [
        # at the power of two itself: the lower end of floor's octave, the upper end of ceil's
        ("floor", 4.0, 1, 127), ("floor", 4.0, 0, 126), ("floor", 7.9, 0, 128), ("floor", 5.6, 0, 126),
        ("floor", 5.7, 0, 128),
        ("ceil", 4.0, 1, 127), ("ceil", 4.0, 0, 128), ("ceil", 2.1, 0, 126), ("ceil", 3.9, 0, 128),
        ("rceil", 6.0, 1, 127), ("rceil", 6.0, 0, 128), ("rceil", 3.1, 0, 126),
        # even's octave is 3.5 .. 7
        ("even", 3.5, 1, 127), ("even", 3.5, 0, 126), ("even", 4.9, 0, 126), ("even", 5.0, 0, 128),
        ("even", 3.4, 1, 127),
        # ends of the range
        ("floor", 0.0, 0, 0), ("floor", 0.0, 1, 1), ("ceil", 0.0, 1, 1), ("rceil", INF, 1, 253),
        ("rceil", INF, 0, 254),
    ],
)  # fmt: skip
def test_e8m0_by_hand(mode: str, amax: float, low: int, byte: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = amax
    got = decode_scales(get_format(f"mxfp4-{mode}"), x, None, torch.tensor([[low]], dtype=torch.uint8), 1)
    assert int(got) == byte


@pytest.mark.parametrize("name", ["nvfp4-4over6-448-mse", "nvfp4-4over6-448-mae"])
def test_saturated_4_choice_is_named(name: str) -> None:
    """With S = 448 * 6 / amax the scale of a 4-choice can saturate; its maximum then shows as 6, not as 4."""
    x = gaussian(64, 512)
    blocks = quantize(name, x)
    fmt = get_format(name)
    u = fmt.unrounded_scale(fmt.block_amax(x), blocks.encode_scale)
    saturated = (blocks.scales == 0x7E) & (u < 430)
    assert bool(saturated.any())
    chosen, _ = decode(encode(blocks, 1.125), x)
    assert torch.equal(chosen.scales, blocks.scales)
    assert torch.equal(chosen.codes, blocks.codes)


# --- what a guided value is afterwards -----------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list_formats())
def test_guided_value_requantizes_to_itself(name: str, dtype: torch.dtype) -> None:
    """Under the same recipe and encode scale, wherever SF >= 2^-6 (a normal E4M3 value): 0 values changed."""
    fmt = get_format(name)
    x = gaussian(200, 512, seed=3)
    sent = quantize(name, x)
    bits = SUPPORTED_BITS[format_family(name)][1]
    chosen, _ = decode(encode(sent, bits), x * (1 + 0.016 * gaussian(200, 512, seed=4)))
    value = fmt.dequantize(chosen, dtype=dtype)
    again = fmt.dequantize(fmt.quantize(value, encode_scale=chosen.encode_scale), dtype=dtype)
    normal = spread(chosen.scales >= 0x08, name) if fmt.scale_kind == "e4m3" else torch.tensor(True)
    assert bool(((value == again) | ~normal).all())
