"""Whether the distance belongs to a few experts: tokens by the experts that the row which predicts them was sent to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracefp4.meter.findings import number, percent
from tracefp4.types import Trajectory

LEAST_TOKENS, RATIO, SURE = 20, 2.0, 5.0
"""Tokens with and without an expert; mean |delta| with over without; difference in standard errors."""
SHOWN = 10


@dataclass(frozen=True)
class ExpertShare:
    """Tokens whose row an expert of a layer had a part in. inside: their mean |delta|; outside: that of the others;
    share: of all tokens; errors: inside - outside in standard errors."""

    layer: int
    expert: int
    share: float
    inside: float
    outside: float
    errors: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def by_expert(
    trajectories: Sequence[Trajectory], layers: Sequence[int], train: Sequence[Tensor], rollout: Sequence[Tensor]
) -> list[ExpertShare]:
    """Experts, the most distant first; layers: those that have experts, in the order of the record. Empty where nothing
    is routed."""
    chosen, sizes = [], []
    for t, a, b in zip(trajectories, train, rollout, strict=True):
        if t.routed_experts is None:
            continue
        rows = t.routed_experts[len(t.prompt_ids) - 1 :][: len(a)].long()
        known = rows[:, 0, 0] >= 0  # -1: recomputed after a preemption
        chosen.append(rows[known])
        sizes.append((a - b).abs()[known])
    if not sizes:
        return []
    experts, size = torch.cat(chosen), torch.cat(sizes).numpy()
    out = []
    for i, layer in enumerate(layers):
        for expert in range(int(experts[:, i].max()) + 1):
            there = (experts[:, i] == expert).any(-1).numpy()
            if min(there.sum(), (~there).sum()) < LEAST_TOKENS:
                continue
            inside, outside = size[there], size[~there]
            error = float(np.sqrt(inside.var() / len(inside) + outside.var() / len(outside)))
            difference = float(inside.mean() - outside.mean())
            errors = difference / error if error else 0.0
            mine = ExpertShare(layer, expert, float(there.mean()), float(inside.mean()), float(outside.mean()), errors)
            out.append(mine)
    return sorted(out, key=lambda e: -e.errors)


def expert_causes(found: Sequence[ExpertShare]) -> list[str]:
    """A sentence on the most distant expert, where it stands out."""
    if not found or found[0].errors < SURE or found[0].inside < RATIO * found[0].outside:
        return []
    e = found[0]
    return [
        f"expert {e.expert} of layer {e.layer}: mean |log-prob difference| is {number(e.inside)} over the "
        f"{percent(e.share)} of the tokens it had a part in, {number(e.outside)} over the others"
    ]
