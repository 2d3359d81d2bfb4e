"""NVFP4: E2M1 in blocks of 16 with E4M3 block scales and one FP32 encode scale S above them.

Two rules differ in the order of FP32 operations, and so in a few codes per ten thousand:

| name | SF before rounding | multiplier on x | who computes it so |
|---|---|---|---|
| "nvfp4" | S * (m * (1/6)) | 1 / (SF * (1/S)); 0 where SF = 0 | vLLM, TensorRT-LLM, FlashInfer default |
| "nvfp4-exact" | m * (S * (1/6)) | min(1 / (SF * (1/S)), FLT_MAX) | Transformer Engine, FlashInfer exact |

The engines use an approximate reciprocal, at most 1 ulp off; here it is correctly rounded. There is no lower
clamp on SF: it may underflow to 0, and the block's value is then 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.formats.scales import E4M3_MAX, RECIPROCAL_6, decode_e4m3, encode_e4m3
from tracefp4.formats.spec import DEFAULT, FLT_MAX, EncodeScale, Format, FormatError, register

_TAKES = '"row", "row-pow2", "tensor", a positive number, a 0-d tensor or a tensor broadcastable to [..., 1]'


def encode_scale_from_amax(amax: Tensor, encode_max: float) -> Tensor:
    """S = encode_max / amax in FP32, at most FLT_MAX; 1 where amax is 0 or Inf (S would be Inf or 0).

    Args:
        amax: f32 [...], not negative, no NaN.
        encode_max: block maximum times scale maximum, such as 6 * 448.

    Returns:
        f32 [...].
    """
    # torch computes `number / tensor` as number * reciprocal: two roundings. A tensor dividend divides once. It is
    # filled in on amax's device: a copy of a number from the host would stall it.
    s = amax.new_full((), encode_max).div(amax).clamp(max=FLT_MAX)
    return s.masked_fill_((amax == 0) | amax.isinf(), 1.0)


def floor_to_power_of_two(x: Tensor) -> Tensor:
    """Largest power of two not above x: f32 [...], positive and normal. Exact: it clears the significand."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _given_encode_scale(given: float | Tensor, amax: Tensor, name: str) -> Tensor:
    """A caller's S as FP32 on amax's device; amax is [..., K/B].

    Values are checked on CPU only: elsewhere it would stall the device.
    """
    if not isinstance(given, Tensor):
        given = amax.new_full((), given)
    s = given.detach().to(device=amax.device, dtype=torch.float32)
    target = (*amax.shape[:-1], 1)
    fits = s.ndim <= len(target) and all(a in (1, b) for a, b in zip(reversed(s.shape), reversed(target), strict=False))
    if not fits:
        raise FormatError(f"{name}: encode scale of shape {tuple(s.shape)} does not broadcast to {target}")
    if s.device.type == "cpu" and not bool(((s > 0) & (s < math.inf)).all()):
        raise FormatError(f"{name}: encode scale must be positive and finite")
    return s


@dataclass(frozen=True)
class NvFp4(Format):
    """NVFP4 by the engine rule, or by the exact rule if `exact`; the module's docstring gives both."""

    exact: bool = False

    def unrounded_scale(self, amax: Tensor, encode_scale: Tensor | None, choice: Tensor | None = None) -> Tensor:
        if choice is not None:
            raise FormatError(f"{self.name} has no choice between 4 and 6")
        if encode_scale is None:
            raise FormatError(f"{self.name} needs an encode scale")
        if self.exact:
            return amax * (encode_scale * RECIPROCAL_6)
        return encode_scale * (amax * RECIPROCAL_6)

    def round_scale(self, u: Tensor) -> Tensor:
        return encode_e4m3(u)

    def multiplier(self, scales: Tensor, encode_scale: Tensor | None) -> Tensor:
        effective = self.effective_scale(scales, encode_scale)
        inverse = effective.reciprocal()
        if self.exact:
            return inverse.clamp(max=FLT_MAX)
        # By the byte, not by the product: the engines test SF itself.
        return inverse.masked_fill(scales == 0, 0.0)

    def _decode_scale(self, scales: Tensor) -> Tensor:
        return decode_e4m3(scales)

    def _resolve(self, amax: Tensor, encode_scale: EncodeScale) -> Tensor:
        if isinstance(encode_scale, Tensor) or (
            isinstance(encode_scale, int | float) and not isinstance(encode_scale, bool)
        ):
            return _given_encode_scale(encode_scale, amax, self.name)
        if encode_scale == "tensor":
            whole = amax.amax() if amax.numel() else amax.new_zeros(())
            return encode_scale_from_amax(whole, self.encode_max)
        if encode_scale in (DEFAULT, "row", "row-pow2"):
            s = encode_scale_from_amax(amax.amax(-1, keepdim=True), self.encode_max)
            return floor_to_power_of_two(s) if encode_scale == "row-pow2" else s
        raise FormatError(
            f"{self.name}: encode scale {encode_scale!r} is not one of {_TAKES}; a scale over a batch of "
            "tokens is refused because a trainer cannot compute it again"
        )


NVFP4 = register(NvFp4("nvfp4", 16, "e4m3", E4M3_MAX * 6))
NVFP4_EXACT = register(NvFp4("nvfp4-exact", 16, "e4m3", E4M3_MAX * 6, exact=True))
