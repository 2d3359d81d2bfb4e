"""MXFP8: every code, every tie, scales of every mode and exponent, saturation, exceptional values."""

import math

import numpy as np
import pytest
import torch

from tracefp4.formats import FormatError, QuantizedBlocks, decode_e8m0, encode_e8m0, get_format
from tracefp4.formats.scales import E4M3_RANGE

MODES = ("floor", "even", "rceil", "ceil")
NAMES = [f"mxfp8-{mode}" for mode in MODES]


def value(byte: int) -> float:
    """An E4M3 byte by its definition."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if byte & 128 else magnitude


LADDER = torch.tensor([value(b) for b in range(0x7F)])


def block(*head: float, rest: float = 0.0) -> torch.Tensor:
    return torch.tensor([*head, *[rest] * (32 - len(head))])


def blocks_of(codes: torch.Tensor, byte: int, name: str = "mxfp8-floor") -> QuantizedBlocks:
    scales = torch.full((*codes.shape[:-1], codes.shape[-1] // 32), byte, dtype=torch.uint8)
    return QuantizedBlocks(codes, scales, None, name, tuple(codes.shape))


@pytest.mark.parametrize("byte", [1, 120, 127, 130, 240])
def test_every_code_at_a_scale(byte: int) -> None:
    """All 256 codes decode to value * 2^e, and each of them but NaN encodes back at that scale."""
    fmt = get_format("mxfp8-floor")
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    blocks = blocks_of(codes, byte)
    values = fmt.dequantize(blocks)
    want = torch.tensor([[value(b) for b in range(256)]]) * 2.0 ** (byte - 127)
    assert torch.equal(values.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))
    assert torch.equal(blocks.unpacked_codes(), codes)
    back = fmt.round_with_scales(values, blocks.scales, None)
    expected = codes.clone()
    expected[0, 0xFF] = 0x7F
    assert torch.equal(back, expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_tie_goes_to_the_even_code(sign: float) -> None:
    fmt = get_format("mxfp8-floor")
    low, high = LADDER[:-1], LADDER[1:]
    middle = (low + high) / 2
    pad = -len(middle) % 32
    scales = torch.full(((len(middle) + pad) // 32,), 127, dtype=torch.uint8)
    index = torch.arange(len(middle))
    bit = 128 if sign < 0 else 0
    for x, want in (
        (middle, index + index % 2),
        (torch.nextafter(middle, low), index),
        (torch.nextafter(middle, high), index + 1),
    ):
        codes = fmt.round_with_scales(torch.nn.functional.pad(sign * x, (0, pad)), scales, None)
        assert torch.equal(codes[: len(x)].int(), (want + bit).int())


def expected_scale(m: float, mode: str) -> int:
    """From the definition in FP64: emax 8, three mantissa bits, largest value 448."""
    if mode == "rceil":
        m = float(np.float32(m * float(np.float32(1 / 448))))
    if m == 0:
        return 0
    significand, exponent = math.frexp(m)
    floor, ceil = exponent - 1, exponent - (significand == 0.5)
    result = {
        "floor": floor - 8,
        "even": floor - 8 + (significand >= 1.9375 / 2),
        "ceil": ceil - 8,
        "rceil": ceil,
    }[mode]
    return min(max(result, -127), 127) + 127


@pytest.mark.parametrize("mode", MODES)
def test_scales_of_every_exponent(mode: str) -> None:
    significands = [0, 1, 0x3FFFFF, 0x5FFFFF, 0x600000, 0x600001, 0x77FFFF, 0x780000, 0x780001, 0x7FFFFF]
    bits = torch.tensor([e << 23 | s for e in range(255) for s in significands], dtype=torch.int32)
    amax = bits.view(torch.float32)
    want = [expected_scale(m, mode) for m in amax.double().tolist()]
    assert encode_e8m0(amax, mode, E4M3_RANGE).tolist() == want
    assert get_format(f"mxfp8-{mode}").round_scale(amax).tolist() == want
    edges = encode_e8m0(torch.tensor([0.0, 1e-45, math.inf, math.nan]), mode, E4M3_RANGE)
    assert edges.tolist() == [0, 0, 254, 255]


@pytest.mark.parametrize(
    ("name", "byte", "codes"),
    [
        # 480 = 1.875 * 2^8 saturates to 448 at 2^0; RCEIL and CEIL take 2^1: 240, .5.
        ("mxfp8-floor", 127, [0x7E, 0x38]),
        ("mxfp8-even", 127, [0x7E, 0x38]),
        ("mxfp8-rceil", 128, [0x77, 0x30]),
        ("mxfp8-ceil", 128, [0x77, 0x30]),
    ],
)
def test_saturation(name: str, byte: int, codes: list[int]) -> None:
    blocks = get_format(name).quantize(block(480.0, 1.0))
    assert blocks.encode_scale is None
    assert blocks.scales.tolist() == [byte]
    assert blocks.codes[:2].tolist() == codes


def test_rceil_never_saturates() -> None:
    fmt = get_format("mxfp8-rceil")
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).exp()
    blocks = fmt.quantize(x)
    assert (fmt.scaled(x, blocks.scales, None).abs() <= 448).all()


@pytest.mark.parametrize("name", NAMES)
def test_zero_nan_and_infinity(name: str) -> None:
    fmt = get_format(name)
    x = torch.stack((block(0.0, -0.0), block(rest=math.nan), block(math.nan, 4.0, -0.0), block(math.inf, -1.0)))
    blocks = fmt.quantize(x)
    assert blocks.scales[:2].tolist() == [[0], [0]]
    assert blocks.scales[3].tolist() == [254]
    codes = blocks.codes.tolist()
    assert codes[0] == [0, 128] + [0] * 30
    assert codes[1] == [0x7F] * 32
    assert codes[2][0] == 0x7F
    assert codes[2][2:4] == [128, 0]
    assert codes[3][:3] == [0x7E, 128, 0]
    values = fmt.dequantize(blocks)
    assert values[2, 1].item() == 4.0
    assert values[0].abs().max() == 0


@pytest.mark.parametrize("name", NAMES)
def test_values_are_exact_in_bf16_and_quantize_to_themselves(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    blocks = fmt.quantize(x)
    assert blocks.codes.shape == (64, 96)
    assert blocks.element_bits == fmt.element_bits == 8
    values = fmt.dequantize(blocks)
    operand, d = fmt.operands(blocks)
    assert d is None
    assert torch.equal(operand.float(), values)
    assert torch.equal(fmt.dequantize(blocks, torch.bfloat16).float(), values)
    assert torch.equal(fmt.dequantize(fmt.quantize(values)), values)
    # Half a step of a three-bit mantissa, except where floor and even saturate.
    if name in ("mxfp8-rceil", "mxfp8-ceil"):
        scale = decode_e8m0(blocks.scales).repeat_interleave(32, -1)
        assert ((x.float() - values).abs() <= torch.maximum(x.float().abs() / 16, scale * 2.0**-10)).all()


def test_an_encode_scale_and_wrong_shapes_are_refused() -> None:
    fmt = get_format("mxfp8-rceil")
    with pytest.raises(FormatError, match="takes no encode scale"):
        fmt.quantize(torch.ones(32), "row")
    with pytest.raises(FormatError, match="multiple of the block size 32"):
        fmt.quantize(torch.ones(16))
    with pytest.raises(FormatError, match="do not fit shape"):
        QuantizedBlocks(
            torch.zeros(16, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), None, "mxfp8-rceil", (32,)
        )
