"""One table for people, as markdown and on the terminal, from the summary of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

_MISSING = "-"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.0f}x"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


_COLUMNS: list[tuple[str, str, Callable[[float], str], bool]] = [
    ("logprob abs diff, mean", "logprob_abs_diff_mean", _number, True),
    ("over bf16", "logprob_abs_diff_over_bf16", _ratio, False),
    ("logprob abs diff, max", "logprob_abs_diff_max", _number, False),
    ("max over bf16", "logprob_abs_diff_max_over_bf16", _ratio, False),
    ("reward, last quarter", "reward", _number, True),
    ("codes differ before", "code_mismatch_before", _percent, False),
    ("codes differ after", "code_mismatch_after", _percent, False),
    ("guidance bytes/token", "guidance_bytes_per_token", _number, False),
    ("pass rate, start", "pass_rate_start", _number, False),
    ("pass rate, end", "pass_rate_end", _number, True),
]
"""Heading, figure of the summary, form, and whether the spread over seeds is shown."""


def table_rows(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row of text per method in the summary's order; a column no method fills is left out."""
    methods = [summary["methods"][mode] for mode in summary["modes"]]
    columns = [column for column in _COLUMNS if any(method[column[1]]["median"] is not None for method in methods)]
    rows = [
        [mode, *(_cell(method[figure], form, ranged) for _, figure, form, ranged in columns)]
        for mode, method in zip(summary["modes"], methods, strict=True)
    ]
    return ["method", *(heading for heading, *_ in columns)], rows


def _cell(spread: dict[str, Any], form: Callable[[float], str], ranged: bool) -> str:
    if spread["median"] is None:
        return _MISSING
    text = form(spread["median"])
    if ranged and len(spread["per_seed"]) > 1:
        text += f" [{form(spread['min'])}, {form(spread['max'])}]"
    return text


def caption(summary: dict[str, Any]) -> str:
    """What a cell is: 'median of 3 seeds (0, 1, 2), [min, max] over seeds; 50 steps'."""
    seeds = summary["seeds"]
    names = ", ".join(str(seed) for seed in seeds)
    what = f"seed {names}" if len(seeds) == 1 else f"median of {len(seeds)} seeds ({names}), [min, max] over seeds"
    steps = summary["steps"]
    text = f"{what}; " + (f"{steps} step{'' if steps == 1 else 's'} each" if steps else "differing numbers of steps")
    problems = {n for method in summary["methods"].values() for n in method["pass_rate_n"] if n is not None}
    if len(problems) == 1:
        text += f"; pass rates on {problems.pop():g} held-out problems"
    broken = [f"{mode} ({m['nonfinite']})" for mode, m in summary["methods"].items() if m["nonfinite"]]
    if broken:
        text += f"; NaN or infinite figures, left out above: {', '.join(broken)}"
    return text


def provenance_lines(summary: dict[str, Any]) -> list[str]:
    """Command, commit, hardware and versions, one line each."""
    hardware, versions = summary["hardware"], summary["versions"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores"
    if hardware.get("gpu"):
        machine += f", {hardware['gpu']}"
    if "jobs" in summary:
        machine += f"; runs at once: {summary['jobs']}, threads of each: {summary['threads_per_run']}"
    return [
        f"command: `{summary['command']}`",
        f"commit: {summary['commit'] or 'unknown (not a checkout)'}",
        f"hardware: {machine}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
    ]


def markdown_table(summary: dict[str, Any]) -> str:
    """The table, what its cells are, and where its numbers come from."""
    headings, rows = table_rows(summary)
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = "\n".join(f"- {line}" for line in provenance_lines(summary))
    return f"{table}\n\nEach cell: {caption(summary)}.\n\n{notes}\n"


def rich_table(summary: dict[str, Any], *, transposed: bool = False) -> Table:
    """The same table for the terminal; transposed, with a column per method, for a narrow one."""
    headings, rows = table_rows(summary)
    if transposed:
        headings, *rows = [list(column) for column in zip(headings, *rows, strict=True)]
    # Text, as rich would take "[min, max]" for markup.
    table = Table(caption=Text(f"Each cell: {caption(summary)}"), caption_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
