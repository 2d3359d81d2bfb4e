"""Sending tokens to their experts and back, and the products between, without asking the device for a count.

Legend: N tokens, K experts per token, M = N * K (token, expert) pairs, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.kernels.errors import KernelError

PRODUCTS = ("auto", "loop", "grouped_mm")
"""How experts are multiplied: one after another, or all by one call of torch's grouped product; "auto" takes the latter
for BF16 on a GPU. The loop learns the number of rows of each expert on the host; the grouped product does not."""


@dataclass(frozen=True)
class Dispatch:
    """The order in which (token, expert) pairs lie grouped by expert.

    order int64 [M]: pair n * K + k at each place, ascending within an expert; token int64 [M]: its n; place int64 [M]:
    the inverse of order; offsets_E int32 [E]: end of each expert's rows; K experts per token.
    """

    order_M: Tensor
    token_M: Tensor
    place_M: Tensor
    offsets_E: Tensor
    K: int

    @staticmethod
    def of(experts_NK: Tensor, num_experts: int) -> Dispatch:
        """Of a router's choice, int64 [N, K]."""
        chosen, order = torch.sort(experts_NK.reshape(-1).int(), stable=True)
        numbers = torch.arange(order.numel(), device=order.device)
        place = torch.empty_like(order).scatter_(0, order, numbers)
        # Not bincount, which asks the device for the largest value first.
        bounds = torch.arange(num_experts, device=order.device, dtype=torch.int32)
        offsets = torch.searchsorted(chosen, bounds, right=True, out_int32=True)
        K = experts_NK.shape[-1]
        return Dispatch(order, order // K, place, offsets, K)

    def scatter(self, x_NH: Tensor) -> Tensor:
        """Rows [M, H] grouped by expert."""
        return _Scatter.apply(x_NH, self)

    def gather(self, y_MH: Tensor, gates_NK: Tensor) -> Tensor:
        """The sum of each token's K rows, weighed by its gates: [N, H]."""
        weighed = y_MH * gates_NK.reshape(-1).gather(0, self.order_M)[:, None]
        return _Gather.apply(weighed, self)


def _sum_of_pairs(y_MH: Tensor, d: Dispatch) -> Tensor:
    """Each token's K rows in the order of its choices, summed in FP32 and rounded once; the same order every time."""
    return y_MH[d.place_M].view(-1, d.K, y_MH.shape[-1]).sum(1)


class _Scatter(torch.autograd.Function):
    """x[token of each place]; back, the sum of each token's rows (autograd's own would sort, or add atomically)."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return x_NH[dispatch.token_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_of_pairs(grads[0], ctx.dispatch), None


class _Gather(torch.autograd.Function):
    """The transpose of `_Scatter`."""

    @staticmethod
    def forward(ctx: Any, y_MH: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return _sum_of_pairs(y_MH, dispatch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.dispatch.token_M], None


class _ZeroIdle(torch.autograd.Function):
    """w; back, the gradient of experts without rows is 0 whatever it was."""

    @staticmethod
    def forward(ctx: Any, w_EOI: Tensor, offsets_E: Tensor) -> Tensor:
        ctx.save_for_backward(offsets_E)
        return w_EOI.view_as(w_EOI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (offsets_E,) = ctx.saved_tensors
        idle_E = offsets_E.diff(prepend=offsets_E.new_zeros(1)) == 0
        return grads[0].masked_fill(idle_E[:, None, None], 0.0), None


def _idle_gradients_are_garbage(device: torch.device) -> bool:
    """On Blackwell torch's grouped product leaves memory as it was for an empty group (pytorch issue 172439)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def grouped_linear(x_MI: Tensor, w_EOI: Tensor, offsets_E: Tensor, products: str = "auto") -> Tensor:
    """x of each expert's rows times that expert's matrix transposed: [M, O].

    offsets_E int32 [E]: end of each expert's rows; products: one of PRODUCTS. Both ways multiply the same numbers and
    differ in the order of summation. Raises KernelError for another word.
    """
    if products not in PRODUCTS:
        raise KernelError(f"unknown way {products!r} to multiply experts; one of {', '.join(PRODUCTS)}")
    grouped = x_MI.is_cuda and x_MI.dtype == torch.bfloat16 if products == "auto" else products == "grouped_mm"
    if grouped:
        if _idle_gradients_are_garbage(x_MI.device):
            w_EOI = _ZeroIdle.apply(w_EOI, offsets_E)
        return F.grouped_mm(x_MI, w_EOI.transpose(1, 2), offs=offsets_E)
    bounds = [0, *offsets_E.tolist()]
    sizes = [b - a for a, b in pairwise(bounds)]
    # Split and unbound, not sliced: going back, a slice is a whole tensor of zeros for each expert.
    rows, matrices = x_MI.split(sizes), w_EOI.unbind(0)
    return torch.cat([F.linear(x, w) for x, w in zip(rows, matrices, strict=True) if len(x)])
