"""Beside the kernels, in plain torch: what they have no path for. Nothing here asks the host anything, so that a decode
step with it can be captured: compensated experts, experts in formats without a kernel, records of other widths.

Legend: N rows of a step, K experts per token, I inputs, O outputs, E experts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.guidance import pack_rows
from tracefp4.kernels.compensation import chosen_outputs
from tracefp4.kernels.grouped_experts import ExpertMatrices
from tracefp4.kernels.quantize_record import TRITON_FORMATS, RecordTarget, quantize_record
from tracefp4.kernels.quantize_record.ref import NVFP4_PLANES
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.compensation import ResidualCompensation

EMULATED_EXPERTS = 16
"""Most experts of a model whose products are emulated: every expert multiplies every row."""


def emulates_experts(recipe: QuantRecipe) -> bool:
    """Whether the kernels have no path for a recipe's expert products."""
    formats = [name for name in (recipe.weights, recipe.activations) if name is not None]
    return recipe.compensation is not None or any(name not in TRITON_FORMATS for name in formats)


def fuses_record(format: str, bits: float) -> bool:
    """Whether a kernel quantizes and records in one pass at this format and width."""
    return format in TRITON_FORMATS and bits in NVFP4_PLANES


def record_rows(blocks: QuantizedBlocks, target: RecordTarget) -> None:
    """Writes the guidance of quantized rows, whatever their format and the record's width."""
    target.payload.index_copy_(0, target.slots, pack_rows(blocks, target.bits))
    if target.encode_scale is not None:
        assert blocks.encode_scale is not None
        scales = blocks.encode_scale.expand(*blocks.shape[:-1], 1).reshape(-1)
        target.encode_scale.index_copy_(0, target.slots, scales.contiguous())


def emulated_experts(
    x_NI: Tensor,
    blocks: QuantizedBlocks | None,
    chosen_NK: Tensor,
    gates_NK: Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    recipe: QuantRecipe,
    compensation: ResidualCompensation | None,
    real_N: Tensor,
    backend: str = "torch",
    summed: bool = True,
) -> Tensor:
    """A mixture's MLP over emulated FP4 values, [N, I] in x's dtype.

    Every expert multiplies every row, in FP32, and the chosen ones are taken: a multiple of the work, which pays for
    few and small experts. Rounded where the torch path of the engine rounds. blocks: x, quantized, or None where it
    is not yet, or is not to be. real: bool [N], False for padding, see ``ResidualCompensation.residual``. backend: of
    all but the matrix products and silu, "torch" or "triton". summed: False leaves the weighted sum out, and gates
    unused: [N, K, I], each expert's output.
    """
    N, K = chosen_NK.shape
    chosen_NK = chosen_NK.contiguous()
    given = recipe, compensation, real_N, backend
    operand, factor = _operand(x_NI, None, blocks, x_NI.dtype, *given)
    y, taken = _products(operand, gate_up), partial(chosen_outputs, dtype=x_NI.dtype, backend=backend)
    gate, up = taken(y, chosen_NK, gate_up.epilogue_E, factor, widened=True).chunk(2, dim=-1)
    operand, factor = _operand(torch.nn.functional.silu(gate), up, None, x_NI.dtype, *given)
    out = taken(_products(operand, down), chosen_NK, down.epilogue_E, factor).view(N, K, -1)
    return (out.float() * gates_NK[..., None]).sum(1).to(x_NI.dtype) if summed else out


def _operand(
    x_MI: Tensor,
    up_MI: Tensor | None,
    blocks: QuantizedBlocks | None,
    dtype: torch.dtype,
    recipe: QuantRecipe,
    compensation: ResidualCompensation | None,
    real_N: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """(FP32 operand, epilogue) of a product. up: x is to be multiplied by it and rounded to dtype first."""
    if compensation is not None and compensation.fused and dtype == torch.bfloat16:
        return compensation.rows(x_MI, up_MI, real_N)
    if up_MI is not None:
        x_MI = (x_MI * up_MI).to(dtype)
    if recipe.activations is None:
        return x_MI.float(), None
    if blocks is None:
        scale = recipe.site_encode_scale("expert_input")
        blocks = quantize_record(x_MI, recipe.activations, scale, backend=backend)
    operand, factor = get_format(blocks.format).operands(blocks, dtype=torch.float32)
    if compensation is None:
        return operand, factor
    return compensation.operand(x_MI, blocks, operand, factor, real_N.repeat_interleave(len(x_MI) // len(real_N)))


def _products(operand_NI: Tensor, weights: ExpertMatrices) -> Tensor:
    """f32 [E, N, O]: every row by every expert, without the experts' epilogues; the rows are not copied E times."""
    w_EIO = weights.operand_EOI.transpose(1, 2)
    return torch.bmm(operand_NI.expand(len(w_EIO), *operand_NI.shape), w_EIO)
