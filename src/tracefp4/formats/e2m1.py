"""E2M1, the four-bit floating-point code: one sign bit, two exponent bits, one mantissa bit.

Codes 0..7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6 and codes 8..15 for the same with a minus sign. The code's
lowest bit is the mantissa bit, so "ties to even" means: on a tie, take the even code.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# device="cpu" here and below: the tables must be real even where the caller's default device is "meta".
E2M1_VALUES: Tensor = torch.tensor([*_MAGNITUDES, *(-v for v in _MAGNITUDES)], dtype=torch.float32, device="cpu")
"""f32 [16]: the value of every code; index 8 is minus zero. Treat as read-only."""


def _f32_below(value: float) -> float:
    """The FP32 number just below a positive value."""
    bits = struct.unpack("<i", struct.pack("<f", value))[0]
    return struct.unpack("<f", struct.pack("<i", bits - 1))[0]


# Upper end of each code's rounding cell. A midpoint belongs to its even neighbour: where that is the lower
# one the end is the midpoint itself, where it is the upper one the end is the FP32 number just below.
_CELL_ENDS = (0.25, _f32_below(0.75), 1.25, _f32_below(1.75), 2.5, _f32_below(3.5), 5.0)


@functools.cache
def _values(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return E2M1_VALUES.to(device)


@functools.cache
def _value_pairs(device: torch.device) -> Tensor:
    """int64 [256]: for every packed byte, its two FP32 values side by side in one 64-bit word."""
    with torch.inference_mode(False):
        byte = torch.arange(256, device="cpu")
        pairs = torch.stack((E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]), dim=-1)
        return pairs.contiguous().view(torch.int64).reshape(256).to(device)


def _encode_by_search(z: Tensor) -> Tensor:
    """The definition of E2M1 rounding, f32 [...] to uint8 [...]; `encode_e2m1` reads it from a table."""
    # bucketize counts the cell ends strictly below |z|; NaN compares above all of them and lands on 7.
    magnitude = torch.bucketize(z.abs(), torch.tensor(_CELL_ENDS, device=z.device)).to(torch.uint8)
    negative = z.signbit() & ~z.isnan()
    return torch.where(negative, magnitude + 8, magnitude)


@functools.cache
def _codes_by_top_bits(device: torch.device) -> Tensor:
    """uint8 [2^17]: the code of every pattern of FP32's upper 16 bits, lower half zero (even index) or not.

    All cell ends have zeros in the lower 16 bits (or are the number just below such a value), so nothing else
    of an FP32 number matters to its rounding.
    """
    with torch.inference_mode(False):
        top_and_rest = torch.arange(1 << 17, device="cpu")
        bits = ((top_and_rest >> 1) << 16) | (top_and_rest & 1)
        return _encode_by_search(bits.to(torch.int32).view(torch.float32)).to(device)


def encode_e2m1(z: Tensor) -> Tensor:
    """Round to the nearest E2M1 code, ties to the even code, saturating.

    Args:
        z: f32 [...], any device. Other floating dtypes are converted to FP32 first.

    Returns:
        uint8 [...], unpacked codes 0..15. Above 6 and +-Inf give +-6, NaN gives 7 whatever its sign bit, and
        the sign of zero (and of what rounds to zero) is kept.

    The rule is the one of NVIDIA's FP32 to FP4 conversion with saturation.
    """
    bits = z.detach().to(torch.float32).view(torch.int32)
    # floor(bits / 2^16) + ceil(bits / 2^16): twice the upper half, plus one if the lower half is not zero.
    index = bits.add(0xFFFF).bitwise_right_shift_(16).add_(bits >> 16).bitwise_and_(0x1FFFF)
    return _codes_by_top_bits(z.device).index_select(0, index.flatten()).view(z.shape)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Value of unpacked codes.

    Args:
        codes: uint8 [...], each 0..15.

    Returns:
        f32 [...].
    """
    return _values(codes.device).index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def pack_codes(codes: Tensor) -> Tensor:
    """Two codes a byte: element 2i in the low nibble, element 2i+1 in the high one.

    Args:
        codes: uint8 [..., K], each 0..15, K even.

    Returns:
        uint8 [..., K/2].

    Raises:
        ValueError: K is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack an odd number of codes: last dimension is {codes.shape[-1]}")
    return codes[..., 1::2].bitwise_left_shift(4).bitwise_or_(codes[..., 0::2])


def unpack_codes(packed: Tensor) -> Tensor:
    """Inverse of `pack_codes`: uint8 [..., K/2] to uint8 [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_packed(packed: Tensor) -> Tensor:
    """`decode_e2m1(unpack_codes(packed))` in one table look-up per byte: uint8 [..., K/2] to f32 [..., K]."""
    pairs = _value_pairs(packed.device).index_select(0, packed.flatten().to(torch.int32))
    return pairs.view(packed.shape).view(torch.float32)
