"""Beside the kernels, in plain torch: what they have no path for. Nothing here asks the host anything, so that a decode
step with it can be captured: compensated experts, experts in formats without a kernel, records of other widths.

Legend: N rows of a step, K experts per token, I inputs, O outputs, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.guidance import pack_rows
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
) -> Tensor:
    """A mixture's MLP over emulated FP4 values, [N, I] in x's dtype.

    Every expert multiplies every row, in FP32, and the chosen ones are taken: a multiple of the work, which pays for
    few and small experts. Rounded where the torch path of the engine rounds. blocks: x, quantized, or None where
    activations are not. real: bool [N], False for padding, see ``ResidualCompensation.residual``. backend: of
    quantizing, "torch" or "triton".
    """
    N, K = chosen_NK.shape
    chosen_M, pairs = chosen_NK.reshape(-1), torch.arange(N * K, device=x_NI.device)
    operand, epilogue = _operand(x_NI, blocks, compensation, real_N)
    both = _products(operand, gate_up)[chosen_M, pairs // K]
    if epilogue is not None:
        both = both * epilogue.expand(N, 1).repeat_interleave(K, 0)
    gate, up = both.to(x_NI.dtype).float().chunk(2, dim=-1)
    hidden = (torch.nn.functional.silu(gate) * up).to(x_NI.dtype)
    second = None
    if recipe.activations is not None:
        second = quantize_record(hidden, recipe.activations, recipe.site_encode_scale("expert_input"), backend=backend)
    operand, epilogue = _operand(hidden, second, compensation, real_N.repeat_interleave(K))
    out = _products(operand, down)[chosen_M, pairs]
    out = (out if epilogue is None else out * epilogue).to(x_NI.dtype)
    return (out.view(N, K, -1).float() * gates_NK[..., None]).sum(1).to(x_NI.dtype)


def _operand(
    x_NI: Tensor, blocks: QuantizedBlocks | None, compensation: ResidualCompensation | None, real_N: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(FP32 operand, epilogue) of a product."""
    if blocks is None:
        return x_NI.float(), None
    operand, epilogue = get_format(blocks.format).operands(blocks, dtype=torch.float32)
    if compensation is not None:
        return compensation.operand(x_NI, blocks, operand, epilogue, real_N)
    return operand, epilogue


def _products(operand_NI: Tensor, weights: ExpertMatrices) -> Tensor:
    """f32 [E, N, O]: every row by every expert."""
    y = torch.matmul(operand_NI, weights.operand_EOI.transpose(1, 2))
    return y if weights.epilogue_E is None else y * weights.epilogue_E[:, None, None]
