"""The engine's figures under their own names: verl puts "actor/" before all that an actor reports."""

from __future__ import annotations

from typing import Any

from tracefp4.train.slices import RowCounts

_OURS = ("actor/guidance/", "actor/router/")


def row_figures(counts: RowCounts, guided: bool) -> dict[str, float]:
    """Of one micro-batch, to be summed over all of them; guided: whether the method uses records at all."""
    figures = {"router/rows": float(counts.forwarded), "router/replayed_rows": float(counts.replayed)}
    if guided:
        figures |= {k: v for k, v in counts.metrics().items() if k != "guidance/guided_share"}
    return figures


def rename_figures(metrics: dict[str, Any]) -> None:
    """In place: drops the prefix, and adds the shares. Row counts are means over ranks and optimizer steps."""
    for name in [n for n in metrics if n.startswith(_OURS)]:
        metrics[name.removeprefix("actor/")] = float(metrics.pop(name))
    for rows, part, share in (
        ("guidance/rows", "guidance/guided_rows", "guidance/guided_share"),
        ("router/rows", "router/replayed_rows", "router/replayed_share"),
    ):
        if metrics.get(rows):
            metrics[share] = metrics[part] / metrics[rows]
