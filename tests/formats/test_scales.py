"""E4M3 and E8M0 bytes: all of them, every tie between neighbours, and the modes of E8M0 on every exponent."""

import math

import numpy as np
import pytest
import torch

from tracefp4.formats import decode_e4m3, decode_e8m0, e4m3_index, encode_e4m3, encode_e8m0


def e4m3_by_definition(byte: int) -> float:
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if byte & 128 else magnitude


LADDER = [e4m3_by_definition(byte) for byte in range(0x7F)]


def test_every_e4m3_byte() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([e4m3_by_definition(b) for b in range(256)])
    assert torch.equal(decode_e4m3(every).nan_to_num(nan=-1e9), expected.nan_to_num(nan=-1e9))
    back = encode_e4m3(decode_e4m3(every))
    expected_back = every.clone()
    expected_back[0xFF] = 0x7F
    assert torch.equal(back, expected_back)
    assert LADDER[-1] == 448.0


def test_every_e4m3_midpoint_ties_to_the_even_byte() -> None:
    low, high = torch.tensor(LADDER[:-1]), torch.tensor(LADDER[1:])
    middle = (low + high) / 2
    byte = torch.arange(0x7E)
    assert torch.equal(encode_e4m3(middle), (byte + byte % 2).to(torch.uint8))
    assert torch.equal(encode_e4m3(torch.nextafter(middle, low)), byte.to(torch.uint8))
    assert torch.equal(encode_e4m3(torch.nextafter(middle, high)), (byte + 1).to(torch.uint8))
    assert torch.equal(encode_e4m3(-middle), (byte + byte % 2 + 128).to(torch.uint8))


def test_e4m3_edges() -> None:
    x = torch.tensor([2.0**-10, 1.0001 * 2.0**-10, 0.0, 1e-45, 448.0, 449.0, 464.0, 1e9, math.inf, math.nan, -math.nan])
    assert encode_e4m3(x).tolist() == [0, 1, 0, 0, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7F, 0x7F]
    assert encode_e4m3(torch.tensor([-449.0, -math.inf])).tolist() == [0xFE, 0xFE]


def test_e4m3_index_is_the_byte_on_values_and_linear_between() -> None:
    values = torch.tensor(LADDER)
    assert torch.equal(e4m3_index(values), torch.arange(0x7F).float())
    for part in (0.25, 0.5, 0.75):
        between = values[:-1] + part * (values[1:] - values[:-1])
        assert torch.equal(e4m3_index(between), torch.arange(0x7E) + part)
    edges = e4m3_index(torch.tensor([0.0, -0.0, 448.0, 500.0, math.inf, math.nan]))
    assert edges[:5].tolist() == [0, 0, 126, 126, 126]
    assert edges[5].isnan()


def test_every_e8m0_byte() -> None:
    values = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert values[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert values[255].isnan()


def expected_e8m0(m: float, mode: str) -> int:
    """From the definition, in FP64, where log2 is replaced by the exact split of frexp."""
    if mode == "rceil":
        m = float(np.float32(m * float(np.float32(1 / 6))))
    significand, exponent = math.frexp(m)  # m = significand * 2^exponent, significand in [0.5, 1)
    if m == 0:
        return 0
    floor, ceil = exponent - 1, exponent - (significand == 0.5)
    result = {
        "floor": floor - 2,
        "even": floor - 2 + (significand >= 0.875),
        "ceil": ceil - 2,
        "rceil": ceil,
    }[mode]
    return min(max(result, -127), 127) + 127


@pytest.mark.parametrize("mode", ["floor", "even", "rceil", "ceil"])
def test_e8m0_modes_on_every_exponent(mode: str) -> None:
    significands = [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF]
    bits = torch.tensor([e << 23 | s for e in range(255) for s in significands], dtype=torch.int32)
    amax = bits.view(torch.float32)
    expected = [expected_e8m0(m, mode) for m in amax.double().tolist()]
    assert encode_e8m0(amax, mode).tolist() == expected


@pytest.mark.parametrize("mode", ["floor", "even", "rceil", "ceil"])
def test_e8m0_edges(mode: str) -> None:
    assert encode_e8m0(torch.tensor([0.0, 1e-45, math.inf, math.nan]), mode).tolist() == [0, 0, 254, 255]


def test_e8m0_modes_differ_where_they_should() -> None:
    # 6 = 1.5 * 2^2, 7 = 1.75 * 2^2, 8 = 2^3. RCEIL is the smallest exponent that does not saturate: 6 fits.
    amax = torch.tensor([4.0, 6.0, 6.5, 7.0, 8.0])
    exponents = {mode: (encode_e8m0(amax, mode).int() - 127).tolist() for mode in ("floor", "even", "rceil", "ceil")}
    assert exponents == {
        "floor": [0, 0, 0, 0, 1],
        "even": [0, 0, 0, 1, 1],
        "rceil": [0, 0, 1, 1, 1],
        "ceil": [0, 1, 1, 1, 1],
    }
    with pytest.raises(ValueError, match="unknown E8M0 mode"):
        encode_e8m0(amax, "nearest")
