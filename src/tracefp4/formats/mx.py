"""What the MX formats share: blocks of 32 with an E8M0 block scale, a power of two, and no encode scale.

Engines differ in how they choose the exponent, so the mode is part of a format's name: "floor" (the OCP specification,
torchao's default), "even" (vLLM on CUDA, compressed-tensors), "rceil" (FlashInfer, TensorRT-LLM) and "ceil".
`scales.encode_e8m0` gives the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tracefp4.formats.scales import E2M1_RANGE, ElementRange, decode_e8m0, encode_e8m0
from tracefp4.formats.spec import DEFAULT, EncodeScale, Format, FormatError


@dataclass(frozen=True)
class Mx(Format):
    """An MX format with the exponent chosen by `mode`."""

    mode: str = "floor"
    element_range: ClassVar[ElementRange] = E2M1_RANGE

    def unrounded_scale(self, amax: Tensor, encode_scale: Tensor | None, choice: Tensor | None = None) -> Tensor:
        """The block amax itself: the mode rounds its exponent (`round_scale`)."""
        if choice is not None:
            raise FormatError(f"{self.name} has no choice between 4 and 6")
        self._refuse(encode_scale)
        return amax

    def round_scale(self, u: Tensor) -> Tensor:
        return encode_e8m0(u, self.mode, self.element_range)

    def multiplier(self, scales: Tensor, encode_scale: Tensor | None) -> Tensor:
        """2^-e, exact: the inverse of a power of two."""
        self._refuse(encode_scale)
        return decode_e8m0(scales).reciprocal()

    def _decode_scale(self, scales: Tensor) -> Tensor:
        return decode_e8m0(scales)

    def _resolve(self, amax: Tensor, encode_scale: EncodeScale) -> None:
        self._refuse(None if isinstance(encode_scale, str) and encode_scale == DEFAULT else encode_scale)

    def _refuse(self, encode_scale: EncodeScale) -> None:
        if encode_scale is not None:
            raise FormatError(f"{self.name} takes no encode scale (None), got {encode_scale!r}")
