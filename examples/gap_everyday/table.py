"""The figures of several gap.json side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table


def print_table(folders: dict[str, Path]) -> None:
    """One row a form, and then what the gate says of each. folders: by the form's name, each with a gap.json.

    -/+: inquiries lost and gained; same: answers alike to the letter; |dlog p|: mean distance of a token's log-probs.
    """
    found = {form: json.loads((folder / "gap.json").read_bytes()) for form, folder in folders.items()}
    table = Table("form", "passed", "difference [95 %]", "-/+", "same", "|dlog p|", "tok/s", box=SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    train = next(iter(found.values()))
    table.add_row("as stored", _passed(train, "train"), *[""] * 4, _speed(train, "train"))
    for form, figures in found.items():
        d, pairs, distance = figures["difference"], figures["pairs"], figures["distance"]
        table.add_row(
            form,
            _passed(figures, "serve"),
            f"{100 * d['value']:+.1f} [{100 * d['low']:+.1f}, {100 * d['high']:+.1f}]",
            f"{pairs['lost']}/{pairs['gained']}",
            str(pairs["same_text"]),
            f"{distance['mean_abs']:.3f}" if distance.get("tokens") else "",
            _speed(figures, "serve"),
        )
    console = Console()
    console.print(table)
    for form, figures in found.items():
        console.print(
            f"{form}: {figures['gate']['verdict']}: {figures['gate']['reason']}", soft_wrap=True, markup=False
        )


def _passed(figures: dict[str, Any], side: str) -> str:
    return f"{figures['forms'][side]['passed']}/{figures['inquiries']['compared']}"


def _speed(figures: dict[str, Any], side: str) -> str:
    speed = figures["forms"][side]["tokens_per_second"]
    return "" if speed is None else f"{speed:.0f}"
