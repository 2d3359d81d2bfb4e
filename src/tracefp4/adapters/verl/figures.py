"""The engine's figures under their own names: verl puts "actor/" before all that an actor reports.

verl averages over ranks and optimizer steps, which is wrong for a share of few tokens: a loss's own figures travel as
NAME/sum and NAME/weight, and are divided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tracefp4.adapters.verl.segments import Segment

SUM, WEIGHT = "/sum", "/weight"
_OURS = ("guidance", "router", "tbpo", "triage", "code_mismatch", "scale_mismatch", "d_act")


def rename_figures(metrics: dict[str, Any]) -> None:
    """In place: drops the prefix, and adds the shares. Row counts are means over ranks and optimizer steps."""
    for name in [n for n in metrics if n.startswith(tuple(f"actor/{group}/" for group in _OURS))]:
        metrics[name.removeprefix("actor/")] = float(metrics.pop(name))
    for name in [n.removesuffix(SUM) for n in metrics if n.endswith(SUM) and n.startswith(_OURS)]:
        total, weight = metrics.pop(name + SUM), metrics.pop(name + WEIGHT)
        if weight:
            metrics[name] = total / weight
    for rows, part, share in (
        ("guidance/rows", "guidance/guided_rows", "guidance/guided_share"),
        ("router/rows", "router/replayed_rows", "router/replayed_share"),
    ):
        if metrics.get(rows):
            metrics[share] = metrics[part] / metrics[rows]


def segment_metrics(notes: Sequence[Mapping[str, Any]], version: int) -> dict[str, float]:
    """Into how many pieces responses were generated, and how old the weights of their rows are.

    notes: of the batch's sequences (at least one). version: the trainer's.
    """
    pieces = [[Segment.unpack(packed) for packed in note["segments"]] for note in notes]
    lags = [version - v for segments in pieces for s in segments for v in s.own_versions]
    return {
        "guidance/segments_mean": sum(map(len, pieces)) / len(pieces),
        "guidance/segments_max": float(max(map(len, pieces))),
        "guidance/version_lag_mean": sum(lags) / max(len(lags), 1),
        "guidance/version_lag_max": float(max(lags, default=0)),
    }
