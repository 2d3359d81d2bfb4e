"""Block scales: E4M3 (NVFP4) and E8M0 (MXFP4), as bytes, and the position of a value between E4M3 codes."""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.formats.names import E8M0_MODES

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E4M3_MAX_BYTE = 0x7E
RECIPROCAL_6: float = struct.unpack("<f", struct.pack("<f", 1 / 6))[0]
"""1/6 rounded to FP32; exactly representable, so every product with it means the same on every device."""


@dataclass(frozen=True)
class ElementRange:
    """What the choice of an E8M0 scale depends on: the exponent of the element format's largest value, its mantissa
    bits, and the inverse of that value rounded to FP32."""

    max_exponent: int
    mantissa_bits: int
    reciprocal_max: float


E2M1_RANGE = ElementRange(2, 1, RECIPROCAL_6)
E4M3_RANGE = ElementRange(8, 3, struct.unpack("<f", struct.pack("<f", 1 / E4M3_MAX))[0])


def encode_e4m3(x: Tensor) -> Tensor:
    """Round to E4M3 (finite-only variant), nearest even, saturating at 448.

    Args:
        x: f32 [...].

    Returns:
        uint8 [...]. Subnormals (step 2^-9) are kept, 2^-10 ties to 0, +-Inf gives +-448, NaN gives 0x7F.
    """
    x = x.detach().to(torch.float32)
    # Older torch casts do not saturate, so the clamp comes first; it passes NaN on.
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return code.masked_fill(x.isnan(), E4M3_NAN)


def decode_e4m3(code: Tensor) -> Tensor:
    """Value of E4M3 bytes: uint8 [...] to f32 [...]; 0x7F and 0xFF are NaN."""
    return code.view(torch.float8_e4m3fn).to(torch.float32)


@functools.cache
def e4m3_values(device: torch.device) -> Tensor:
    """f32 [127]: the values of bytes 0x00..0x7E, ascending."""
    with torch.inference_mode(False):
        return decode_e4m3(torch.arange(E4M3_MAX_BYTE + 1, dtype=torch.uint8, device="cpu")).to(device)


def e4m3_index(u: Tensor) -> Tensor:
    """Continuous E4M3 code index of a scale that has not been rounded yet.

    The index of an E4M3 value is its byte; between two consecutive values it is linear:
    `c + (u - val(c)) / (val(c + 1) - val(c))`.

    Args:
        u: f32 [...], not negative.

    Returns:
        f32 [...], 0 for 0, at most 126 (byte 0x7E, 448) and NaN for NaN.
    """
    u = u.detach().to(torch.float32).clamp(0.0, E4M3_MAX).contiguous()
    ladder = e4m3_values(u.device)
    lower = torch.bucketize(u, ladder, right=True, out_int32=True).sub_(1).clamp_(0, E4M3_MAX_BYTE - 1)
    low = ladder[lower]
    return lower + (u - low) / (ladder[lower + 1] - low)


@functools.cache
def _e8m0_values(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        values = [2.0 ** (byte - 127) for byte in range(255)]
        return torch.tensor([*values, math.nan], dtype=torch.float32, device=device)


def decode_e8m0(code: Tensor) -> Tensor:
    """Value of E8M0 bytes: uint8 [...] to f32 [...]: 2^(byte - 127), exact; 0xFF is NaN."""
    return _e8m0_values(code.device)[code.to(torch.int32)]


def encode_e8m0(amax: Tensor, mode: str, element: ElementRange = E2M1_RANGE) -> Tensor:
    """E8M0 block scale of a block of elements whose largest magnitude is amax.

    With the exponent clamped to -127..127 (byte = exponent + 127), for E2M1 elements:
    floor: floor(log2 amax) - 2; even: floor's, plus one where amax's significand is at least 1.75;
    ceil: ceil(log2 amax) - 2; rceil: ceil(log2(amax * (1/6))) with the product rounded to FP32.
    For E4M3 elements 8 stands for 2, 1.9375 for 1.75 (what rounds up to the next power of two) and 448 for 6.

    Args:
        amax: f32 [...], not negative.
        mode: "floor", "even", "rceil" or "ceil".
        element: of the elements' format.

    Returns:
        uint8 [...]. Zero gives byte 0; Inf saturates at byte 254; NaN gives 0xFF.

    Raises:
        ValueError: unknown mode.

    All on the bits of FP32: log2 would round up just below a power of two.
    """
    amax = amax.detach().to(torch.float32)
    bits = (amax * element.reciprocal_max if mode == "rceil" else amax).contiguous().view(torch.int32)
    if mode == "floor":
        exponent = (bits >> 23) - element.max_exponent
    elif mode == "even":
        half_step = 1 << (22 - element.mantissa_bits)
        exponent = ((bits + half_step) >> 23) - element.max_exponent
    elif mode == "ceil":
        exponent = ((bits - 1) >> 23) + 1 - element.max_exponent
    elif mode == "rceil":
        # 2^-127 and less is an FP32 subnormal but still byte 0, so the ceiling starts above it.
        exponent = (((bits - 1) >> 23) + 1).masked_fill(bits <= 0x400000, 0)
    else:
        raise ValueError(f"unknown E8M0 mode {mode!r}; one of {', '.join(E8M0_MODES)}")
    exponent = exponent.clamp(0, 254).masked_fill(amax.isinf(), 254).masked_fill(amax.isnan(), 255)
    return exponent.to(torch.uint8)
