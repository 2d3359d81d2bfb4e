"""The figures of several gap.json side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(folders: dict[str, Path]) -> None:
    """One row a form: folders by the form's name, each with a gap.json; then what the gate says of each."""
    found = {form: json.loads((folder / "gap.json").read_bytes()) for form, folder in folders.items()}
    table = Table(
        "form", "passed", "difference", "95 % interval", "lost", "gained", "same text", "|log p diff|", "tokens/s"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    train = next(iter(found.values()))
    table.add_row("as stored", *_form(train["forms"]["train"], train), end_section=True)
    for form, figures in found.items():
        table.add_row(form, *_form(figures["forms"]["serve"], figures, against=True))
    console = Console()
    console.print(table)
    for form, figures in found.items():
        gate = figures["gate"]
        console.print(f"{form}: {gate['verdict']}: {gate['reason']}", soft_wrap=True, markup=False)


def _form(form: dict[str, Any], figures: dict[str, Any], against: bool = False) -> list[str]:
    speed = form["tokens_per_second"]
    shown = [f"{form['passed']} of {figures['inquiries']['compared']}"]
    if against:
        d, pairs, distance = figures["difference"], figures["pairs"], figures["distance"]
        shown += [f"{100 * d['value']:+.1f} points", f"{100 * d['low']:+.1f} to {100 * d['high']:+.1f}"]
        shown += [str(pairs["lost"]), str(pairs["gained"]), str(pairs["same_text"])]
        shown.append(f"{distance['mean_abs']:.3f}" if distance.get("tokens") else "")
    else:
        shown += [""] * 6
    return [*shown, "" if speed is None else f"{speed:.0f}"]
