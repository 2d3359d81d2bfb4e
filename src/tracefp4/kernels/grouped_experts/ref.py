"""Reference of the grouped products of routed experts.

Legend: N tokens, K experts per token, E experts, I input and O output features, M = N * K dispatched rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.formats.spec import EncodeScale
from tracefp4.kernels.grouped_experts.packed import PackedExperts


@dataclass(frozen=True)
class Routing:
    """Dispatch order of a step: rows sorted by expert, stably, so that one expert's rows are contiguous.

    order int64 [M]: position in the flattened [N, K] choice of each dispatched row; token int64 [M]: its token;
    counts: rows of each expert, E Python ints.
    """

    order: Tensor
    token: Tensor
    counts: tuple[int, ...]

    @staticmethod
    def of(experts_NK: Tensor, num_experts: int) -> Routing:
        flat = experts_NK.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=num_experts).tolist()
        return Routing(order, order // experts_NK.shape[1], tuple(counts))


@dataclass
class ExpertMatrices:
    """One stacked projection, [E, O, I], in the form that the products read.

    operand: in a quantized engine E2M1 * SF in FP32 (every value exact in BF16), else the weights themselves in
    the compute dtype. epilogue: f32 [E], 1/S of each expert, or None. blocks: the packed form the operand was
    unpacked from; what a GPU kernel would read.
    """

    operand_EOI: Tensor
    epilogue_E: Tensor | None = None
    blocks: QuantizedBlocks | None = None

    @staticmethod
    def quantized(blocks: QuantizedBlocks) -> ExpertMatrices:
        operand, decode_scale = get_format(blocks.format).operands(blocks, dtype=torch.float32)
        epilogue = None if decode_scale is None else decode_scale.reshape(operand.shape[0])
        return ExpertMatrices(operand.contiguous(), epilogue, blocks)


def grouped_linear(
    x_MI: Tensor, x_epilogue_M1: Tensor | None, weights: ExpertMatrices, counts: tuple[int, ...]
) -> Tensor:
    """Each expert's product over its contiguous rows, [M, O].

    With FP32 operands (quantized engine) products accumulate in FP32 and the encode scales of x (f32 [M, 1]) and
    of the expert are applied to the FP32 sum: what an FP4 tensor core with an FP32 epilogue computes, up to the
    order of summation. Otherwise a plain product in the compute dtype. Result in x's dtype.
    """
    w_EOI = weights.operand_EOI
    if x_MI.dtype != w_EOI.dtype:
        raise TypeError(f"operands differ in dtype: x {x_MI.dtype}, weights {w_EOI.dtype}")
    out = x_MI.new_empty(x_MI.shape[0], w_EOI.shape[1])
    start = 0
    for e, n in enumerate(counts):
        if n == 0:
            continue
        y = torch.mm(x_MI[start : start + n], w_EOI[e].T)
        if weights.epilogue_E is not None:
            y *= weights.epilogue_E[e]
        out[start : start + n] = y
        start += n
    return out if x_epilogue_M1 is None else out.mul_(x_epilogue_M1)


def _matrices(weights: PackedExperts | Tensor) -> ExpertMatrices:
    if isinstance(weights, Tensor):
        return ExpertMatrices(weights)
    return ExpertMatrices(weights.operands(), weights.epilogue)


def _rows(
    x: Tensor | QuantizedBlocks, activations: str | None, encode_scale: EncodeScale, packed: bool
) -> tuple[Tensor, Tensor | None]:
    """Operand and epilogue of activations, as `grouped_linear` takes them."""
    if activations is None:
        assert isinstance(x, Tensor)
        return (x.float() if packed else x), None
    fmt = get_format(activations)
    blocks = fmt.quantize(x, encode_scale=encode_scale) if isinstance(x, Tensor) else x
    operand, epilogue = fmt.operands(blocks, dtype=torch.float32)
    return operand, None if epilogue is None else epilogue.expand(operand.shape[0], 1)


def routed_experts(
    x: Tensor | QuantizedBlocks,
    experts_NK: Tensor,
    gates_NK: Tensor,
    gate_up: PackedExperts | Tensor,
    down: PackedExperts | Tensor,
    activations: str | None,
    encode_scale: EncodeScale,
    summed: bool = True,
) -> Tensor:
    """See `tracefp4.kernels.grouped_experts.routed_experts`; asks the host for the rows of each expert."""
    N, K = experts_NK.shape
    first, second = _matrices(gate_up), _matrices(down)
    routing = Routing.of(experts_NK, first.operand_EOI.shape[0])
    packed = first.epilogue_E is not None
    rows, factor = _rows(x, activations, encode_scale, packed)
    both = grouped_linear(
        rows[routing.token], None if factor is None else factor[routing.token], first, routing.counts
    ).bfloat16()
    gate, up = both.float().chunk(2, dim=-1)
    hidden = (torch.nn.functional.silu(gate) * up).bfloat16()
    rows, factor = _rows(hidden, activations, encode_scale, packed)
    out = grouped_linear(rows, factor, second, routing.counts).bfloat16()
    y = torch.empty_like(out)
    y[routing.order] = out
    y = y.view(N, K, -1)
    return (y.float() * gates_NK[..., None]).sum(1).bfloat16() if summed else y
