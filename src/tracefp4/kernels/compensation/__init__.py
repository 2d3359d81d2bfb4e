"""What products of compensated activations need beside the matrix product itself, in few launches on a GPU.

Legend: N rows, I channels, E experts, K experts of a row, M = N * K chosen outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.kernels.backend import kernel_module
from tracefp4.kernels.compensation import ref
from tracefp4.kernels.compensation.ref import FACTS
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.quantize_record import TRITON_FORMATS

__all__ = ["FACTS", "chosen_outputs", "compensated_rows"]


def compensated_rows(
    x_NI: Tensor,
    up_NI: Tensor | None,
    real: Tensor | None,
    facts: Tensor,
    *,
    format: str,
    encode_scale: str,
    rule: str,
    selection: str,
    kept: int,
) -> tuple[Tensor, Tensor]:
    """(operand f32 [N, I], epilogue f32 [N, 1]) of Q(X) + Q(R_C), R = X - Q(X): a Triton kernel.

    One launch where a row selects for itself, three where columns are selected by their norms over the batch. The
    reference is `tracefp4.rollout.compensation.ResidualCompensation.operand`, and the bits are its bits.

    Args:
        x_NI: floating [N, I], rows contiguous; the activations X.
        up_NI: the same, FP32 both: then X is their product, rounded to BF16. None: x is X.
        real: bool [N], or [N / K] where each stands for K rows; False: the residual of a row counts as 0. None: all.
        facts: f64 [FACTS, 3], contiguous; is added to: see `ref.facts`.
        format: one of TRITON_FORMATS. encode_scale: "row" or "row-pow2".
        rule: "quads" quantizes what is selected of R, "resq" selects from Q(R).
        selection: "channels", "row" or "2:4"; see `ref.select`. kept: how many channels of the I.

    Raises:
        KernelError: operands that do not fit, or that lie on the CPU without Triton's interpreter.
    """
    if x_NI.ndim != 2 or x_NI.shape[1] == 0 or x_NI.shape[1] % 16 or not x_NI.is_floating_point():
        raise KernelError(f"x must be floating [N, a multiple of 16], got {x_NI.dtype} {tuple(x_NI.shape)}")
    N, I = x_NI.shape
    if x_NI.stride(1) != 1:
        raise KernelError(f"x must have contiguous rows, got strides {x_NI.stride()}")
    if up_NI is not None and (up_NI.shape != x_NI.shape or up_NI.stride(1) != 1):
        raise KernelError(f"up must be {(N, I)} with contiguous rows, got {tuple(up_NI.shape)}, {up_NI.stride()}")
    if up_NI is not None and (x_NI.dtype, up_NI.dtype) != (torch.float32, torch.float32):
        raise KernelError(f"factors of x must be FP32, got {x_NI.dtype} and {up_NI.dtype}")
    if real is not None and (real.dtype != torch.bool or real.ndim != 1 or N % max(1, len(real)) or len(real) > N):
        raise KernelError(f"real must be bool [{N}] or a part of it, got {real.dtype} {tuple(real.shape)}")
    if facts.dtype != torch.float64 or tuple(facts.shape) != (FACTS, 3) or not facts.is_contiguous():
        raise KernelError(f"facts must be f64 [{FACTS}, 3], got {facts.dtype} {tuple(facts.shape)}")
    if format not in TRITON_FORMATS or encode_scale not in ("row", "row-pow2"):
        raise KernelError(f"no kernel compensates {format!r} with encode scale {encode_scale!r}")
    if rule not in ("quads", "resq") or selection not in ("channels", "row", "2:4") or not 0 < kept <= I:
        raise KernelError(f"no such selection: {rule!r}, {selection!r}, {kept} of {I}")
    kernel = kernel_module("triton", "compensation", x_NI, facts)
    assert kernel is not None
    out: tuple[Tensor, Tensor] = kernel.compensated_rows(
        x_NI, up_NI, real, facts, format, encode_scale, rule, selection, kept
    )
    return out


def chosen_outputs(
    y_ENO: Tensor,
    chosen_NK: Tensor,
    epilogue_E: Tensor | None,
    epilogue_N1: Tensor | None,
    dtype: torch.dtype,
    *,
    backend: str,
    widened: bool = False,
) -> Tensor:
    """[M, O] rounded to ``dtype``: every row's chosen experts' outputs, times the expert's epilogue, times the row's.

    Args:
        y_ENO: f32, every row by every expert, any strides; N as chosen has, or N * K: a row for every choice.
        chosen_NK: int64, contiguous. epilogue_E: f32 [E]. epilogue_N1: f32 [], or [N, 1] of y's rows. None: 1.
        dtype: that is rounded to; "triton" rounds to BF16 alone, and leaves other dtypes to torch.
        widened: the rounded values come as FP32.

    Raises:
        KernelError: operands that do not fit.
    """
    E, rows, _ = y_ENO.shape
    M = chosen_NK.numel()
    if y_ENO.dtype != torch.float32 or (rows != M and rows != chosen_NK.shape[0]):
        raise KernelError(f"y must be f32 [E, {chosen_NK.shape[0]} or {M}, O], got {y_ENO.dtype} {tuple(y_ENO.shape)}")
    if chosen_NK.dtype != torch.int64 or not chosen_NK.is_contiguous():
        raise KernelError(f"chosen must be contiguous int64, got {chosen_NK.dtype}, strides {chosen_NK.stride()}")
    if epilogue_E is not None and (tuple(epilogue_E.shape) != (E,) or epilogue_E.dtype != torch.float32):
        raise KernelError(f"the experts' epilogue must be f32 [{E}], got {epilogue_E.dtype} {tuple(epilogue_E.shape)}")
    if epilogue_N1 is not None and (epilogue_N1.numel() not in (1, rows) or epilogue_N1.dtype != torch.float32):
        raise KernelError(f"the rows' epilogue must be f32 [{rows}, 1], got {tuple(epilogue_N1.shape)}")
    per = M // max(1, rows)
    kernel = kernel_module(backend, "compensation", y_ENO, chosen_NK)
    chosen_M = chosen_NK.view(-1)
    if kernel is None or dtype != torch.bfloat16:
        return ref.chosen_outputs(y_ENO, chosen_M, per, epilogue_E, epilogue_N1, dtype, widened)
    out: Tensor = kernel.chosen_outputs(y_ENO, chosen_M, per, epilogue_E, epilogue_N1, widened)
    return out
