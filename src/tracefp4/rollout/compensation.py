"""QUADS and Rollout-ResQ: the rollout adds a second FP4 product of what rounding took from its activations.

QUADS (arXiv 2607.15810):        Y = Q(X) Q(W)^T + Q(R_C) Q(W_C)^T, C the channels with the largest residual norm.
Rollout-ResQ (arXiv 2607.26515): Y = Q(X) Q(W)^T + S(Q(R)) Q(W)^T, S keeps half of the channels, or 2 of every 4.

R = X - Q(X). Channels keep their places: a block of 16 holds 0 where a channel is not in C, and W_C is the columns of
the quantized W, so that both products read the same weights. Legend: N rows of a step, I input channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.kernels.compensation import FACTS, compensated_rows, ref
from tracefp4.kernels.quantize_record import TRITON_FORMATS, quantize_record
from tracefp4.recipe import Compensation, QuantRecipe


class ResidualCompensation:
    """The second operand of a quantized expert product, and sums of what it gives back.

    backend: "torch" or "triton"; the bits of operands are the same, those of the sums (FP64) are not.
    """

    def __init__(self, recipe: QuantRecipe, compensation: Compensation, backend: str = "torch") -> None:
        assert recipe.activations is not None
        self.backend = backend
        self.format = get_format(recipe.activations)
        self.encode_scale = recipe.site_encode_scale("expert_input")
        self.compensation = compensation
        self._sums: Tensor | None = None

    @staticmethod
    def of(recipe: QuantRecipe, backend: str = "torch") -> ResidualCompensation | None:
        return None if recipe.compensation is None else ResidualCompensation(recipe, recipe.compensation, backend)

    def residual(self, x_NI: Tensor, blocks: QuantizedBlocks, real_N: Tensor | None = None) -> QuantizedBlocks:
        """The second product's operand in the packed form that a kernel reads: Q(R_C) or S(Q(R)).

        x: what ``blocks`` was quantized from. real: bool [N], False for padding, which has no part in the norms; None
        where all rows are real.
        """
        fmt = self.format
        second, selected, _ = self._second(x_NI, fmt.dequantize(blocks), real_N)
        if selected is None:
            return second
        codes = torch.where(selected, second.unpacked_codes(), 0)
        return QuantizedBlocks(fmt.pack(codes), second.scales, second.encode_scale, second.format, second.shape)

    def operand(
        self,
        x_NI: Tensor,
        blocks: QuantizedBlocks,
        operand_NI: Tensor,
        epilogue_N1: Tensor | None,
        real_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(FP32 operand, epilogue) whose one product is the sum of the two: Q(X) + Q(R_C), in units of Q(X)'s 1/S.

        With power-of-two encode scales each summand is exact; the sum is rounded once to FP32, far below the rounding
        of the product's own accumulation.
        """
        if epilogue_N1 is None:  # then operands are values
            return operand_NI + self._second(x_NI, operand_NI, real_N)[2], None
        second, selected, _ = self._second(x_NI, self.format.dequantize(blocks), real_N)
        second_NI, second_epilogue = self.format.operands(second, dtype=torch.float32)
        assert second_epilogue is not None
        if selected is not None:
            second_NI = torch.where(selected, second_NI, 0.0)
        return operand_NI + second_NI * (second_epilogue / epilogue_N1), epilogue_N1

    def _second(
        self, x_NI: Tensor, values_NI: Tensor, real_N: Tensor | None
    ) -> tuple[QuantizedBlocks, Tensor | None, Tensor]:
        """(blocks, bool [N, I] of what is kept of them or None for all, values of that f32 [N, I]) of the second
        product's operand. values: of x's blocks."""
        c, fmt = self.compensation, self.format
        r_NI = x_NI.float() - values_NI
        if real_N is not None:
            r_NI = torch.where(real_N[:, None], r_NI, 0.0)
        selected = None
        if c.rule == "quads":
            second = self._quantize(torch.where(select(r_NI, c), r_NI, 0.0))
            second_NI = fmt.dequantize(second)
        else:
            second = self._quantize(r_NI)
            whole_NI = fmt.dequantize(second)
            selected = select(whole_NI, c)
            second_NI = torch.where(selected, whole_NI, 0.0)
        self._facts(x_NI.device)[0].add_(ref.facts(r_NI, second_NI))
        return second, selected, second_NI

    @property
    def fused(self) -> bool:
        """Whether kernels compute operands from the activations themselves: ``rows``."""
        return self.backend == "triton" and self.format.name in TRITON_FORMATS

    def rows(self, x_NI: Tensor, up_NI: Tensor | None = None, real_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``operand`` of rows that nothing has quantized yet, by kernels, where ``fused``; the same bits.

        up, real: as `tracefp4.kernels.compensation.compensated_rows` takes them.
        """
        c, scale = self.compensation, self.encode_scale
        assert isinstance(scale, str)
        return compensated_rows(
            x_NI, up_NI, real_N, self._facts(x_NI.device), format=self.format.name, encode_scale=scale,
            rule=c.rule, selection=c.select, kept=_kept(c, x_NI.shape[1]),
        )  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """Since the last call: the share of ||R||^2 on values that are given back, and what is left of it,
        ||R - second||^2 / ||R||^2. Empty where nothing was computed."""
        if self._sums is None:
            return {}
        residual, kept, left = self._sums.sum(0).tolist()
        self._sums.zero_()
        if not residual:
            return {}
        return {"compensation/kept_share": kept / residual, "compensation/error_left": left / residual}

    def _quantize(self, r_NI: Tensor) -> QuantizedBlocks:
        return quantize_record(r_NI, self.format.name, self.encode_scale, backend=self.backend)

    def _facts(self, device: torch.device) -> Tensor:
        """f64 [FACTS, 3] on the device, to be added up: memory that stays, so that a captured graph can add to it.
        Nothing is read back before ``metrics``."""
        if self._sums is None:
            self._sums = torch.zeros(FACTS, 3, dtype=torch.float64, device=device)
        return self._sums


def _kept(compensation: Compensation, I: int) -> int:
    return max(1, round(compensation.share * I))


def select(r_NI: Tensor, compensation: Compensation) -> Tensor:
    """bool [N, I]: the channels that are kept, the first of equal ones."""
    return ref.select(r_NI, compensation.select, _kept(compensation, r_NI.shape[1]))
