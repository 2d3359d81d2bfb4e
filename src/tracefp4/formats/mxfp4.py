"""MXFP4: E2M1 in blocks of 32 with E8M0 block scales (powers of two) and no encode scale.

Engines differ in how they choose the exponent, so the mode is part of the name: "mxfp4-floor" (the OCP
specification, torchao's default), "mxfp4-even" (vLLM on CUDA, compressed-tensors), "mxfp4-rceil" (FlashInfer,
TensorRT-LLM) and "mxfp4-ceil". `scales.encode_e8m0` gives the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tracefp4.formats.scales import E8M0_MODES, decode_e8m0, encode_e8m0
from tracefp4.formats.spec import DEFAULT, EncodeScale, Format, FormatError, register


@dataclass(frozen=True)
class MxFp4(Format):
    """MXFP4 with the exponent chosen by `mode`."""

    mode: str = "floor"

    def unrounded_scale(self, amax: Tensor, encode_scale: Tensor | None, choice: Tensor | None = None) -> Tensor:
        """The block amax itself: the mode rounds its exponent (`round_scale`)."""
        if choice is not None:
            raise FormatError(f"{self.name} has no choice between 4 and 6")
        self._refuse(encode_scale)
        return amax

    def round_scale(self, u: Tensor) -> Tensor:
        return encode_e8m0(u, self.mode)

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


MXFP4 = {mode: register(MxFp4(f"mxfp4-{mode}", 32, "e8m0", 0.0, mode)) for mode in E8M0_MODES}
