"""MXFP4: E2M1 in MX blocks, "mxfp4-floor", "mxfp4-even", "mxfp4-rceil" and "mxfp4-ceil"."""

from __future__ import annotations

from dataclasses import dataclass

from tracefp4.formats.mx import Mx
from tracefp4.formats.names import E8M0_MODES
from tracefp4.formats.spec import register


@dataclass(frozen=True)
class MxFp4(Mx):
    """MXFP4 with the exponent chosen by `mode`."""


MXFP4 = {mode: register(MxFp4(f"mxfp4-{mode}", 32, "e8m0", 0.0, mode)) for mode in E8M0_MODES}
