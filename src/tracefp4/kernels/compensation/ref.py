"""Reference of compensated rows, in plain torch: what of a residual is kept, and what it adds to an operand.

Legend: N rows, I channels, E experts, M chosen outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 256
"""Running sums of a column's norm. Rows n, n + LANES, ... add up in order, then the lanes as a tree of neighbours: an
order that kernels can keep, and that zeros behind the last row do not change."""
FACTS = 1024
"""Rows of the sums that ``compensated_rows`` adds to: each is one program's own, so no sum depends on timing."""


def column_sums(x_NI: Tensor) -> Tensor:
    """f32 [1, I]: sums over rows of f32 [N, I], in the order of ``LANES``."""
    padded = F.pad(x_NI, (0, 0, 0, -x_NI.shape[0] % LANES)).unflatten(0, (-1, LANES))
    total = x_NI.new_zeros(LANES, x_NI.shape[1])
    for rows in padded:
        total = total + rows
    while total.shape[0] > 1:
        total = total[::2] + total[1::2]
    return total


def select(r_NI: Tensor, selection: str, kept: int) -> Tensor:
    """bool [N, I]: the values that are kept, the first of equal ones, NaN before all.

    selection: "channels", the ``kept`` columns of the largest norms; "row", so many values of each row; "2:4", two of
    every four.
    """
    if selection == "2:4":
        of_four = r_NI.abs().unflatten(-1, (-1, 4))
        order = of_four.argsort(dim=-1, descending=True, stable=True)[..., :2]
        return torch.zeros_like(of_four, dtype=torch.bool).scatter(-1, order, True).flatten(-2)
    norms = r_NI.square() if selection == "row" else column_sums(r_NI.square())
    order = norms.argsort(dim=-1, descending=True, stable=True)[:, :kept]
    return torch.zeros_like(norms, dtype=torch.bool).scatter(-1, order, True).expand(r_NI.shape)


def facts(r_NI: Tensor, second_NI: Tensor) -> Tensor:
    """f64 [3]: sums of squares of a residual, of its values that are given back, and of what is left of it."""
    parts = torch.stack([r_NI, r_NI * (second_NI != 0), r_NI - second_NI])
    return parts.double().square().sum((1, 2))


def chosen_outputs(
    y_ENO: Tensor,
    chosen_M: Tensor,
    per: int,
    epilogue_E: Tensor | None,
    epilogue_N1: Tensor | None,
    dtype: torch.dtype,
    widened: bool,
) -> Tensor:
    """See `tracefp4.kernels.compensation.chosen_outputs`; per: how many choices a row of y stands for."""
    rows = torch.arange(chosen_M.shape[0], device=y_ENO.device) // per
    out = y_ENO[chosen_M, rows]
    if epilogue_E is not None:
        out = out * epilogue_E[chosen_M, None]
    if epilogue_N1 is not None:
        out = out * epilogue_N1.expand(y_ENO.shape[1], 1)[rows]
    return out.to(dtype).float() if widened else out.to(dtype)
