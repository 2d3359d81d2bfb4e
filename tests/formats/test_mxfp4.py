"""MXFP4: modes seen through whole blocks, exceptional values, and no encode scale."""

import math

import pytest
import torch

from tracefp4.formats import FormatError, get_format

NAMES = [f"mxfp4-{mode}" for mode in ("floor", "even", "rceil", "ceil")]


def block(*head: float, rest: float = 0.0) -> torch.Tensor:
    return torch.tensor([*head, *[rest] * (32 - len(head))])


@pytest.mark.parametrize(
    ("name", "byte", "codes"),
    [
        # amax 7: FLOOR keeps 2^0 and saturates 7 to 6; the others take 2^1, where 7 -> 3.5 -> 4 and 1 -> .5.
        ("mxfp4-floor", 127, [7, 2, 15]),
        ("mxfp4-even", 128, [6, 1, 13]),
        ("mxfp4-rceil", 128, [6, 1, 13]),
        ("mxfp4-ceil", 128, [6, 1, 13]),
    ],
)
def test_modes(name: str, byte: int, codes: list[int]) -> None:
    blocks = get_format(name).quantize(block(7.0, 1.0, -6.0))
    assert blocks.encode_scale is None
    assert blocks.scales.tolist() == [byte]
    assert blocks.unpacked_codes()[:3].tolist() == codes


@pytest.mark.parametrize("name", NAMES)
def test_zero_nan_and_infinity(name: str) -> None:
    fmt = get_format(name)
    x = torch.stack((block(0.0, -0.0), block(rest=math.nan), block(math.nan, 4.0, -0.0), block(math.inf, -1.0)))
    blocks = fmt.quantize(x)
    # Zero and all-NaN blocks have byte 0 (2^-127), Inf the largest byte (2^127); 4.0 is 4 * 2^0.
    assert blocks.scales.tolist() == [[0], [0], [127], [254]]
    codes = blocks.unpacked_codes().tolist()
    assert codes[0] == [0, 8] + [0] * 30
    assert codes[1] == [7] * 32
    assert codes[2][:4] == [7, 6, 8, 0]
    assert codes[3][:3] == [7, 8, 0]
    assert fmt.dequantize(blocks)[0].abs().max() == 0
    assert fmt.dequantize(blocks)[3, 0] == math.inf


def test_subnormal_block() -> None:
    # 2^-130 = 2^-3 * 2^-127 with the smallest scale: .125 -> 0; 2^-128 is .5 exactly.
    fmt = get_format("mxfp4-floor")
    x = block(2.0**-128, 2.0**-130)
    blocks = fmt.quantize(x)
    assert blocks.scales.tolist() == [0]
    assert blocks.unpacked_codes()[:2].tolist() == [1, 0]
    assert fmt.dequantize(blocks)[0].item() == 2.0**-128


def test_nan_scale_byte() -> None:
    fmt = get_format("mxfp4-even")
    byte = torch.tensor([255], dtype=torch.uint8)
    assert (fmt.round_with_scales(block(1.0), byte, None) == 7).all()
    assert fmt.effective_scale(byte, None).isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_values_are_exact_in_bf16_and_quantize_to_themselves(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    blocks = fmt.quantize(x)
    assert blocks.scales.shape == (64, 3)
    values = fmt.dequantize(blocks)
    operand, d = fmt.operands(blocks)
    assert d is None
    assert torch.equal(operand.float(), values)
    assert torch.equal(fmt.dequantize(blocks, torch.bfloat16).float(), values)
    # The exponent may shrink for a block whose maximum was rounded down; its values are still exact there.
    assert torch.equal(fmt.dequantize(fmt.quantize(values)), values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("given", ["row", "row-pow2", "tensor", 1.0, torch.tensor(1.0)])
def test_an_encode_scale_is_refused(name: str, given: object) -> None:
    with pytest.raises(FormatError, match="takes no encode scale"):
        get_format(name).quantize(torch.ones(32), given)  # type: ignore[arg-type]
    assert get_format(name).quantize(torch.ones(32), None).encode_scale is None
    assert get_format(name).resolve_encode_scale(torch.ones(32)) is None
