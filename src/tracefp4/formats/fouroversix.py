"""4over6: NVFP4 whose blocks map their maximum to 6 or to 4, whichever leaves the smaller error.

E2M1 has a wide gap between 4 and 6; a block with values in that gap does better at a scale 1.5 times larger,
where its maximum becomes 4. Per block both are tried, SF6 = E4M3(S * (m * (1/6))) and SF4 = E4M3(1.5 times
the same), and 4 is kept only if its error is strictly smaller. Multiplier and dequantization are "nvfp4"'s.

Names: "nvfp4-4over6-<constant>-<error>". S = 6 * constant / amax with 256 or 448; 256 leaves room for
1.5 * SF below E4M3's maximum. The error is the block's sum of squares (mse) or of magnitudes (mae). The plain
name "nvfp4-4over6" means 256 and mse, as in the method's own library; "nvfp4-4over6-mae" means 256 and mae.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.formats.e2m1 import decode_e2m1
from tracefp4.formats.nvfp4 import NvFp4
from tracefp4.formats.scales import E4M3_MAX
from tracefp4.formats.spec import QuantizedBlocks, register


def _block_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension (a power of two long) by halving: the same order on every device."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values.squeeze(-1)


@dataclass(frozen=True)
class FourOverSix(NvFp4):
    """NVFP4 with a choice of 4 or 6 per block; `error` is "mse" or "mae"."""

    error: str = "mse"

    def unrounded_scale(self, amax: Tensor, encode_scale: Tensor | None, choice: Tensor | None = None) -> Tensor:
        six = super().unrounded_scale(amax, encode_scale)
        return six if choice is None else torch.where(choice.bool(), six * 1.5, six)

    def choice(self, blocks: QuantizedBlocks) -> Tensor:
        """1 where the block's largest magnitude code is 6, the value 4.

        The maximum of a block lands on 6 or 4 within 1/16 as long as SF is a normal E4M3 value (2^-6 and up)
        that did not saturate; otherwise the code only suggests the choice. A block of zeros is 0.
        """
        self._own(blocks)
        magnitude = blocks.unpacked_codes().bitwise_and_(7).unflatten(-1, (-1, self.block_size))
        return (magnitude.amax(-1) == 6).to(torch.uint8)

    def _round(self, x: Tensor, amax: Tensor, encode_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        six = self.unrounded_scale(amax, encode_scale)
        scales = [self.round_scale(six), self.round_scale(six * 1.5)]
        codes = [self.round_with_scales(x, s, encode_scale) for s in scales]
        errors = [self._error(x, c, s, encode_scale) for c, s in zip(codes, scales, strict=True)]
        take4 = errors[1] < errors[0]
        chosen = torch.where(take4.repeat_interleave(self.block_size, -1), codes[1], codes[0])
        return torch.where(take4, scales[1], scales[0]), chosen

    def _error(self, x: Tensor, codes: Tensor, scales: Tensor, encode_scale: Tensor | None) -> Tensor:
        """f32 [..., K/B]: summed square or absolute difference between x and its dequantized codes."""
        value = self._times_block(decode_e2m1(codes), self.effective_scale(scales, encode_scale))
        difference = (value - x).unflatten(-1, (-1, self.block_size))
        return _block_sum(difference.square() if self.error == "mse" else difference.abs())


FOUR_OVER_SIX = register(FourOverSix("nvfp4-4over6", 16, "e4m3", 256.0 * 6))
for _name, _constant, _error in (
    ("nvfp4-4over6-mae", 256.0, "mae"),
    ("nvfp4-4over6-448-mse", E4M3_MAX, "mse"),
    ("nvfp4-4over6-448-mae", E4M3_MAX, "mae"),
):
    register(FourOverSix(_name, 16, "e4m3", _constant * 6, error=_error))
