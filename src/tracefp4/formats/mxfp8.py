"""MXFP8: E4M3 in MX blocks, one byte a code, "mxfp8-floor", "mxfp8-even", "mxfp8-rceil" and "mxfp8-ceil".

The activations of W4A8. Codes are E4M3 bytes: 0x00..0x7E are 0 to 448, 0x80 is the sign, 0x7F and 0xFF are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tracefp4.formats.mx import Mx
from tracefp4.formats.names import E8M0_MODES
from tracefp4.formats.scales import E4M3_RANGE, ElementRange, decode_e4m3, e4m3_values, encode_e4m3
from tracefp4.formats.spec import register


@dataclass(frozen=True)
class MxFp8(Mx):
    """MXFP8 with the exponent chosen by `mode`."""

    element_bits: ClassVar[int] = 8
    element_max: ClassVar[float] = 448.0
    element_range: ClassVar[ElementRange] = E4M3_RANGE

    def encode_elements(self, z: Tensor) -> Tensor:
        """Nearest, ties to the even byte, saturating at 448; NaN gives 0x7F, zero keeps its sign."""
        return encode_e4m3(z)

    def decode_elements(self, codes: Tensor) -> Tensor:
        return decode_e4m3(codes)

    def magnitudes(self, device: torch.device) -> Tensor:
        return e4m3_values(device)


MXFP8 = {mode: register(MxFp8(f"mxfp8-{mode}", 32, "e8m0", 0.0, mode)) for mode in E8M0_MODES}
