"""The table of `tracefp4 eval`, from the content of an eval.json."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

Row = tuple[str, list[str], list[str]]
"""Heading, a cell a form, a cell a difference."""


def eval_table(facts: dict[str, Any]) -> Table:
    """A column per form and per difference; facts: of a complete evaluation."""
    forms, differences = facts["forms"], facts["differences"]
    table = Table(caption=Text(caption(facts)), caption_justify="left")
    table.add_column(Text(""))
    for name in [*forms, *(f"{name} - {d['minus']}" for name, d in differences.items())]:
        table.add_column(Text(name), justify="right")
    for heading, of_forms, of_differences in _rows(facts):
        table.add_row(*map(Text, [heading, *of_forms, *of_differences]))
    return table


def _rows(facts: dict[str, Any]) -> list[Row]:
    forms, differences = list(facts["forms"].values()), list(facts["differences"].values())
    none = [""] * len(differences)
    rows = [
        (
            f"avg@{facts['settings']['--samples']}",
            [_interval(f["avg"]) for f in forms],
            [_interval(d["avg"], signed=True) for d in differences],
        )
    ]
    rows += [
        (
            f"pass@{k}",
            [_interval(f["pass_at"][str(k)]) for f in forms],
            [_interval(d["pass_at"][str(k)], signed=True) for d in differences],
        )
        for k in facts["k"]
    ]
    if differences:
        flips = [
            f"{_percent(d['flipped']['value'])} (-{_percent(d['lost'])} +{_percent(d['gained'])})" for d in differences
        ]
        rows.append(("outcomes flipped (lost, gained)", [""] * len(forms), flips))
    rows.append(("response length, tokens", [f"{f['response_length_mean']:.1f}" for f in forms], none))
    rows.append(("truncated responses", [_percent(f["truncated_share"]) for f in forms], none))
    speeds = ["-" if f["tokens_per_second"] is None else f"{f['tokens_per_second']:,.0f}" for f in forms]
    rows.append(("tokens per second", speeds, none))
    return rows


def caption(facts: dict[str, Any]) -> str:
    """'256 held-out problems x 4 samples of runs/a/checkpoint; [95 % interval] over problems'."""
    problems, samples = facts["settings"]["--problems"], facts["settings"]["--samples"]
    text = f"{problems} held-out problem{'' if problems == 1 else 's'} x {samples} sample{'' if samples == 1 else 's'}"
    text += f" of {facts['checkpoint']['path']}; [95 % interval] over problems, differences paired"
    overlong = max(f["overlong"] for f in facts["forms"].values())
    if overlong:
        text += f"; {overlong} of the prompts do not fit and count as failed"
    return text


def _interval(estimate: dict[str, float], signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{estimate['value']:{sign}.3f} [{estimate['low']:{sign}.3f}, {estimate['high']:{sign}.3f}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
