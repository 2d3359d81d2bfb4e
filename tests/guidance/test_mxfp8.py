"""Guidance of eight-bit codes: the lowest mantissa bit names a neighbour, by the rules of E2M1."""

import math

import pytest
import torch

from tracefp4.formats import get_format
from tracefp4.guidance import decode, encode
from tracefp4.guidance.codec import _outward_from, decode_codes
from tracefp4.guidance.schema import row_bytes, site_bits

FMT = get_format("mxfp8-floor")
LADDER = FMT.magnitudes(torch.device("cpu"))
ONE = torch.full((1, 1), 127, dtype=torch.uint8)


def resolve(z: float, bit: int, rule: str = "cell") -> float:
    """Value that a recorded bit gives at z, at scale 1."""
    x = torch.zeros(1, 32)
    x[0, 0] = z
    bits = torch.zeros(1, 32, dtype=torch.uint8)
    bits[0, 0] = bit
    codes = decode_codes(FMT, x, ONE, None, bits, False, rule)
    return float(FMT.decode_elements(codes)[0, 0])


def test_the_lowest_bit_alternates_along_the_signed_grid() -> None:
    codes = torch.arange(0x7F)
    assert torch.equal(LADDER, FMT.decode_elements(codes.to(torch.uint8)))
    assert (LADDER.diff() > 0).all()
    signed = torch.cat([-codes.flip(0)[:-1], codes])  # -126 .. 126
    assert ((signed[1:] & 1) != (signed[:-1] & 1)).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rule", ["cell", "bracket"])
def test_every_slot_is_named_from_both_neighbours(rule: str, sign: int) -> None:
    """From a little on either side of a slot's rounding cell, the slot's bit leads back to it."""
    for i in range(1, 0x7E):
        for j in (i - 1, i + 1):  # the trainer rounds to j, close to the end of its cell that faces i
            end = float((LADDER[i] + LADDER[j]) / 2)
            z = sign * (end + 0.02 * (float(LADDER[j]) - end))
            assert resolve(z, i & 1, rule) == sign * float(LADDER[i]), (i, j)
            assert resolve(z, j & 1, rule) == sign * float(LADDER[j]), (i, j)


def test_the_cell_rule_goes_to_the_nearer_cell() -> None:
    """8 lies at the end of a binade: its cell is [7.75, 8.5], whose middle 8.125 parts 7.5 and 9."""
    assert resolve(8.12, 1) == 7.5
    assert resolve(8.125, 1) == 9.0
    assert resolve(7.9, 1) == 7.5
    assert resolve(9.0, 0) == 8.0  # a value in the middle of its cell: toward zero
    assert resolve(9.01, 0) == 10.0
    outward = _outward_from(FMT, torch.device("cpu"))
    assert len(outward) == 128
    assert outward[0] == 0
    assert outward[0x7E:].isnan().all()


def test_exceptions() -> None:
    assert resolve(448.0, 0) == 448.0
    assert resolve(448.0, 1) == 416.0  # the largest value has one neighbour
    assert resolve(1e6, 1) == 416.0
    assert resolve(0.0, 1) == 2.0**-9
    assert resolve(-0.0, 1) == -(2.0**-9)
    assert math.isnan(resolve(math.nan, 1))
    assert resolve(math.nan, 0) == 448.0  # never raises; a NaN ends the run elsewhere


def test_bracket_with_full_codes_takes_the_neighbour_nearest_to_the_rollouts() -> None:
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([8.2, 8.2, -8.2])
    sent = torch.zeros(1, 32, dtype=torch.uint8)
    sent[0, :3] = FMT.encode_elements(torch.tensor([12.0, 1.0, 5.0]))
    codes = decode_codes(FMT, x, ONE, None, sent, True, "bracket")
    assert FMT.decode_elements(codes)[0, :3].tolist() == [9.0, 8.0, -8.0]


@pytest.mark.parametrize("bits", [8.25, 1.25, 1.03125])
@pytest.mark.parametrize("name", ["mxfp8-floor", "mxfp8-even", "mxfp8-rceil", "mxfp8-ceil"])
def test_a_little_noise_is_resolved_in_full(name: str, bits: float) -> None:
    fmt = get_format(name)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=g)
    sent = fmt.quantize(x)
    got, guided = decode(encode(sent, bits), x * (1 + 0.003 * torch.randn(x.shape, generator=g)))
    own = fmt.quantize(x * (1 + 0.003 * torch.randn(x.shape, generator=g)))
    assert guided.all()
    assert (own.codes != sent.codes).float().mean() > 0.02
    assert torch.equal(got.scales, sent.scales)
    assert torch.equal(got.codes & 127, sent.codes & 127)  # a chosen zero takes the sign of z


@pytest.mark.parametrize(("name", "bits"), [("nvfp4", 0.5), ("mxfp4-rceil", 0.25), ("mxfp8-rceil", 0.25)])
def test_scales_alone_round_to_nearest_at_the_rollouts_scale(name: str, bits: float) -> None:
    fmt = get_format(name)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(16, 256, generator=g)
    y = x * (1 + 0.1 * torch.randn(x.shape, generator=g))
    sent = fmt.quantize(x)
    record = encode(sent, bits)
    assert record.payload.shape == (16, 256 // fmt.block_size)
    got, _ = decode(record, y)
    assert torch.equal(got.scales, sent.scales)
    nearest = fmt.round_with_scales(y, sent.scales, sent.encode_scale)
    assert torch.equal(got.unpacked_codes(), nearest)
    assert not torch.equal(got.scales, fmt.quantize(y).scales)


def test_sizes() -> None:
    assert row_bytes("mxfp8-rceil", 1.03125, 2048) == 256 + 8
    assert row_bytes("mxfp8-rceil", 8.25, 2048) == 2048 + 64
    assert site_bits("mxfp4-rceil", 8.25) == 4.25
    assert site_bits("mxfp8-rceil", 8.25) == 8.25
    assert site_bits("mxfp4-rceil", 1.03125) == 1.03125
