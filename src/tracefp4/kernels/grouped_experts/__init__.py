"""Grouped matrix products of routed experts."""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.formats.spec import EncodeScale
from tracefp4.kernels.backend import kernel_module
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.grouped_experts.packed import PackedExperts
from tracefp4.kernels.grouped_experts.ref import ExpertMatrices, Routing, grouped_linear
from tracefp4.kernels.grouped_experts.ref import routed_experts as _reference
from tracefp4.kernels.quantize_record import RecordTarget, check_record
from tracefp4.kernels.quantize_record import ref as quantize_ref

__all__ = ["ExpertMatrices", "PackedExperts", "Routing", "grouped_linear", "routed_experts"]


def routed_experts(
    x: Tensor | QuantizedBlocks,
    experts_NK: Tensor,
    gates_NK: Tensor,
    gate_up: PackedExperts | Tensor,
    down: PackedExperts | Tensor,
    *,
    backend: str,
    activations: str | None = None,
    encode_scale: EncodeScale = "row",
    record: RecordTarget | None = None,
    summed: bool = True,
) -> Tensor:
    """A mixture's MLP for N tokens of I features: sum over k of gate * down(silu(gate) * up), BF16 [N, I].

    Sums are FP32. Gate and up are rounded to BF16, their product again; so is each expert's output before it is
    weighted; the sum over k is FP32, in order of k, rounded once.

    Args:
        x: BF16 [N, I], or its quantized blocks where they exist already (recorded, say).
        experts_NK: int64 [N, K], contiguous. gates_NK: f32 [N, K], contiguous.
        gate_up: packed experts of 2 * width outputs (gates first) and I inputs, or BF16 [E, 2 * width, I].
        down: packed experts of I outputs and width inputs, or BF16 [E, I, width].
        backend: "torch" or "triton".
        activations: format that x (unless it is quantized already) and the hidden activations are rounded to; None
            leaves them BF16; "nvfp4" or "nvfp4-exact" on the triton backend, packed weights only.
        encode_scale: S of activations that are quantized here: "row", "row-pow2", a number or a 0-d tensor.
        summed: False leaves the weighted sum out, and gates unused: BF16 [N, K, I], each expert's output.
        record: where the guidance of x goes, which is BF16 and quantized here; as `quantize_record` would record it.

    Raises:
        KernelError: shapes, dtypes, formats or a record that do not fit.
    """
    _check(x, experts_NK, gates_NK, gate_up, down, activations)
    if record is not None:
        if activations is None or isinstance(x, QuantizedBlocks):
            raise KernelError("a record needs BF16 rows that are quantized here: give activations, and x as it is")
        check_record(record, activations, *x.shape)
    tensor = x.codes if isinstance(x, QuantizedBlocks) else x
    weights = gate_up.words if isinstance(gate_up, PackedExperts) else gate_up
    kernel = kernel_module(backend, "grouped_experts", tensor, experts_NK, gates_NK, weights)
    if kernel is None:
        if record is not None:
            assert activations is not None
            assert isinstance(x, Tensor)
            x = quantize_ref.quantize_record(x, activations, encode_scale, record)
        return _reference(x, experts_NK, gates_NK, gate_up, down, activations, encode_scale, summed)
    if isinstance(encode_scale, str) and encode_scale not in ("row", "row-pow2"):
        raise KernelError(f'the triton backend takes "row", "row-pow2" or a static scale, got {encode_scale!r}')
    if activations not in (None, "nvfp4", "nvfp4-exact"):
        raise KernelError(f"the triton backend quantizes activations to NVFP4, not to {activations!r}")
    out: Tensor = kernel.routed_experts(
        x, experts_NK, gates_NK, gate_up, down, activations, encode_scale, record=record, summed=summed
    )
    return out


def _check(
    x: Tensor | QuantizedBlocks,
    experts: Tensor,
    gates: Tensor,
    gate_up: PackedExperts | Tensor,
    down: PackedExperts | Tensor,
    activations: str | None,
) -> None:
    packed = isinstance(gate_up, PackedExperts)
    if packed != isinstance(down, PackedExperts):
        raise KernelError("gate_up and down are both packed or both BF16")
    sizes = [
        (w.experts, w.outputs, w.inputs) if isinstance(w, PackedExperts) else tuple(w.shape) for w in (gate_up, down)
    ]
    (E, two_width, inputs), (E2, outputs, width) = sizes
    if (E2, outputs, 2 * width) != (E, inputs, two_width):
        raise KernelError(f"down {sizes[1]} does not follow gate_up {sizes[0]}: [E, 2 * width, I] and [E, I, width]")
    if not packed and (activations is not None or isinstance(x, QuantizedBlocks)):
        raise KernelError("quantized activations need packed weights")
    if isinstance(x, QuantizedBlocks):
        if x.format != activations:
            raise KernelError(f"x is quantized to {x.format!r}, activations are {activations!r}")
    elif x.dtype != torch.bfloat16 or x.ndim != 2 or not x.is_contiguous():
        raise KernelError(f"x must be contiguous BF16 [N, {inputs}], got {x.dtype} {tuple(x.shape)}")
    for w in (gate_up, down):
        if isinstance(w, Tensor) and (w.dtype != torch.bfloat16 or not w.is_contiguous()):
            raise KernelError(f"dense expert weights must be contiguous BF16, got {w.dtype}")
    N = x.shape[0]
    if tuple(x.shape) != (N, inputs):
        raise KernelError(f"x must be [N, {inputs}], got {tuple(x.shape)}")
    if activations is not None:
        get_format(activations)
    for name, tensor, dtype in (("experts", experts, torch.int64), ("gates", gates, torch.float32)):
        if tensor.dtype != dtype or tensor.ndim != 2 or tensor.shape[0] != N or not tensor.is_contiguous():
            raise KernelError(f"{name} must be contiguous {dtype} [{N}, K], got {tensor.dtype} {tuple(tensor.shape)}")
    if experts.shape != gates.shape:
        raise KernelError(f"experts {tuple(experts.shape)} and gates {tuple(gates.shape)} differ in shape")
