"""E2M1: every code, every tie and its neighbours, and every upper half of an FP32 number."""

import math

import pytest
import torch

from tracefp4.formats import E2M1_VALUES, decode_e2m1, decode_packed, encode_e2m1, pack_codes, unpack_codes

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TIES = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)]


def codes_of(*values: float) -> list[int]:
    return encode_e2m1(torch.tensor(values, dtype=torch.float32)).tolist()


def nearest_by_distance(z: torch.Tensor) -> torch.Tensor:
    """Independent oracle: smallest distance in FP64, even code on a tie, NaN to 7."""
    values = torch.tensor(MAGNITUDES, dtype=torch.float64)
    magnitude = z.double().abs().clamp(max=6.0)
    distance = (magnitude.unsqueeze(-1) - values).abs()
    tied = distance == distance.amin(-1, keepdim=True)
    preference = torch.tensor([0, 2, 0, 2, 0, 2, 0, 2]).expand_as(tied).masked_fill(~tied, 9)
    code = preference.argmin(-1) + 8 * z.signbit()
    return torch.where(z.isnan(), 7, code).to(torch.uint8)


def test_every_code_has_its_value_and_comes_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert E2M1_VALUES.tolist() == MAGNITUDES + [-m for m in MAGNITUDES]
    assert math.copysign(1.0, E2M1_VALUES[8].item()) == -1.0
    assert torch.equal(decode_e2m1(codes), E2M1_VALUES)
    assert torch.equal(encode_e2m1(E2M1_VALUES), codes)


@pytest.mark.parametrize(("tie", "even"), TIES)
def test_tie_goes_to_the_even_code_and_its_neighbours_do_not(tie: float, even: int) -> None:
    lower = int(tie > 0.25) + sum(tie > t for t, _ in TIES[1:])
    middle = torch.tensor(tie)
    below = torch.nextafter(middle, torch.tensor(0.0)).item()
    above = torch.nextafter(middle, torch.tensor(9.0)).item()
    assert codes_of(below, tie, above) == [lower, even, lower + 1]
    assert codes_of(-below, -tie, -above) == [lower + 8, even + 8, lower + 9]


def test_zero_saturation_infinity_and_nan() -> None:
    assert codes_of(0.0, -0.0, 1e-45, -1e-45, 0.1, -0.1) == [0, 8, 0, 8, 0, 8]
    assert codes_of(6.0, 6.5, 7.0, 1e30, math.inf) == [7] * 5
    assert codes_of(-6.0, -6.5, -7.0, -1e30, -math.inf) == [15] * 5
    quiet = torch.tensor([0x7FC00000, -0x00400000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32)
    assert encode_e2m1(quiet.view(torch.float32)).tolist() == [7] * 5


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x8000, 0xFFFF])
def test_every_upper_half_of_fp32(low: int) -> None:
    top = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    z = ((top << 16) | low).view(torch.float32)
    assert torch.equal(encode_e2m1(z), nearest_by_distance(z))


def test_random_fp32_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=generator).to(torch.int32)
    z = bits.view(torch.float32)
    assert torch.equal(encode_e2m1(z), nearest_by_distance(z))
    z = torch.randn(200_000, generator=generator) * 3
    assert torch.equal(encode_e2m1(z), nearest_by_distance(z))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    z = torch.tensor([[0.25, -0.75, 3.0], [6.0, 0.0, -5.0]], dtype=dtype)
    assert encode_e2m1(z.t()).tolist() == [[0, 7], [10, 0], [5, 14]]


def test_pack_puts_the_even_element_in_the_low_nibble() -> None:
    assert pack_codes(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    assert torch.equal(pack_codes(unpack_codes(every_byte)), every_byte)
    assert torch.equal(decode_packed(every_byte), decode_e2m1(unpack_codes(every_byte)))
    assert torch.equal(decode_packed(every_byte.t()), decode_e2m1(unpack_codes(every_byte.t())))
    with pytest.raises(ValueError, match="odd number"):
        pack_codes(torch.zeros(3, dtype=torch.uint8))


def test_works_under_inference_mode_and_does_not_leak_into_autograd() -> None:
    with torch.inference_mode():
        encode_e2m1(torch.ones(2))
    z = torch.ones(2, requires_grad=True)
    assert not encode_e2m1(z * 2).requires_grad
    (decode_e2m1(encode_e2m1(z)) * z).sum().backward()
    assert z.grad is not None
