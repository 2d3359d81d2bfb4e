"""The engine's figures under their own names: verl puts "actor/" before all that an actor reports."""

from __future__ import annotations

from typing import Any

_OURS = ("actor/guidance/", "actor/router/")


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
