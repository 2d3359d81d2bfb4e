"""Drawing a token of every row from its logits, by inversion of the distribution at a given uniform number."""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.kernels.backend import kernel_module
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.sampling import ref

__all__ = ["draw_tokens"]


def draw_tokens(
    logits_BV: Tensor, temperature_B: Tensor, greedy_B: Tensor, uniform_B: Tensor, *, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The first token whose cumulated probability exceeds the uniform number, or the likeliest one.

    Args:
        logits_BV: floating; BF16 and contiguous for triton.
        temperature_B: f32, above 0.
        greedy_B: bool: the likeliest token, of equal ones the first.
        uniform_B: f64 in [0, 1).
        backend: "torch" or "triton": sums of another order, so that a number within 1e-7 or so of the end of a token's
            interval may fall to its neighbour.

    Returns:
        ids int64 [B]; log-probs f32 [B] under the scaled distribution; bool [B], False where a row has NaN, +Inf or
        nothing but -Inf (its token and log-prob mean nothing then). A token of probability 0 is never drawn.
    """
    B = logits_BV.shape[0]
    for name, t, dtype in (
        ("temperature", temperature_B, torch.float32), ("greedy", greedy_B, torch.bool),
        ("uniform", uniform_B, torch.float64),
    ):  # fmt: skip
        if t.dtype != dtype or tuple(t.shape) != (B,):
            raise KernelError(f"{name} must be {dtype} [{B}], got {t.dtype} {tuple(t.shape)}")
    kernel = kernel_module(backend, "sampling", logits_BV, temperature_B)
    if kernel is None:
        return ref.draw_tokens(logits_BV, temperature_B, greedy_B, uniform_B)
    if logits_BV.dtype != torch.bfloat16 or not logits_BV.is_contiguous():
        raise KernelError(f"the triton backend draws from contiguous BF16 logits, got {logits_BV.dtype}")
    out: tuple[Tensor, Tensor, Tensor] = kernel.draw_tokens(logits_BV, temperature_B, greedy_B, uniform_B)
    return out
