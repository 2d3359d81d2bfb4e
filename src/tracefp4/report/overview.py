"""The tables of a report: what the runs are, where they come from, how their settings differ."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracefp4.report.runs import Run

DIFF = "mismatch/logprob_abs_diff_mean"
BASELINE = "bf16"
MISSING = "-"
ABSENT = object()


@dataclass(frozen=True)
class Table:
    """caption says what a reader cannot guess; the first cell of a row names it."""

    caption: str
    headings: list[str]
    rows: list[list[str]]


def results_table(runs: Sequence[Run]) -> Table:
    """A row a run: what it is and how it went."""
    rows = []
    for run in runs:
        diff = last_diff(run)
        ratio = over_baseline(run, runs)
        rows.append(
            [
                run.name,
                run.method,
                _text(run.seed),
                _steps(run),
                _rates(run),
                MISSING if diff is None else f"{diff:#.3g}",
                MISSING if ratio is None else ratio_text(ratio),
            ]
        )
    return Table(
        "Pass rates are of held-out problems, with Wilson's 95 % interval of sampling. The log-prob difference is the "
        f"mean of the last quarter of the steps; its ratio is to the {BASELINE} run of the same seed and, method and "
        "formats aside, the same settings.",
        ["run", "method", "seed", "steps done", "pass rate, start → end", "|log-prob diff|", f"over {BASELINE}"],
        rows,
    )


def origin_table(runs: Sequence[Run]) -> Table:
    """A row a run: commit, versions, hardware, hashes, command."""
    rows = []
    for run in runs:
        versions, hardware = _dict(run.run.get("versions")), _dict(run.run.get("hardware"))
        machine = [_text(hardware[key]) for key in ("cpu", "gpu") if hardware.get(key)]
        if hardware.get("cores"):
            machine.append(f"{hardware['cores']} cores")
        rows.append(
            [
                run.name,
                _commit(run.run.get("commit")),
                ", ".join(f"{name} {value}" for name, value in sorted(versions.items())) or MISSING,
                ", ".join(machine) or MISSING,
                _text(run.run.get("recipe_hash")),
                _text(run.run.get("config_hash")),
                _text(run.run.get("command")),
            ]
        )
    return Table(
        "The recipe hash names the numeric contract of trainer and rollout, the config hash all settings.",
        ["run", "commit", "versions", "hardware", "recipe hash", "config hash", "command"],
        rows,
    )


def config_diff(runs: Sequence[Run]) -> Table:
    """A row a setting that is not the same in all runs, a column a run."""
    settings = [run.settings() for run in runs]
    keys = sorted({key for table in settings for key in table})
    rows = []
    for key in keys:
        values = [table.get(key, ABSENT) for table in settings]
        texts = ["not set" if value is ABSENT else json.dumps(value) for value in values]
        if len(set(texts)) > 1:
            rows.append([key, *texts])
    equal = len(keys) - len(rows)
    return Table(f"{equal} other settings are equal in all runs.", ["setting", *(run.name for run in runs)], rows)


def last_diff(run: Run) -> float | None:
    """Mean |log-prob difference| of the last quarter of the steps."""
    series = run.series.get(DIFF)
    tail = series.last_quarter() if series is not None else ()
    return float(sum(tail) / len(tail)) if len(tail) else None


def over_baseline(run: Run, runs: Sequence[Run]) -> float | None:
    """Ratio of `last_diff` to the BF16 run it can be compared with; None where there is none, or its figure is 0."""
    mine = last_diff(run)
    for other in runs:
        if other.method == BASELINE and other.seed == run.seed and _comparable(other) == _comparable(run):
            base = last_diff(other)
            if mine is not None and base and other.steps_done == run.steps_done:
                return mine / base
    return None


def wilson(rate: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share of n trials (E. B. Wilson 1927)."""
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def rate_text(rate: float, n: int | None) -> str:
    """'.619 [.576, .660]'; the rate alone where n is unknown."""
    if n is None or not 0 <= rate <= 1:
        return f"{rate:.3f}"
    low, high = wilson(rate, n)
    return f"{rate:.3f} [{low:.3f}, {high:.3f}]"


def ratio_text(ratio: float) -> str:
    """'1.29x'; three digits below .01."""
    return f"{ratio:.2f}x" if ratio >= 0.01 else f"{ratio:.3g}x"


def _comparable(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.settings().items() if not key.startswith(("method.", "quant."))}


def _steps(run: Run) -> str:
    done, planned = run.steps_done, run.steps_planned
    if planned is None:
        return f"{done}"
    return f"{done}/{planned}" if done >= planned else f"{done}/{planned}, unfinished"


def _rates(run: Run) -> str:
    start, end, n = run.pass_rates()
    if start is None and end is None:
        return MISSING
    ends = " → ".join(MISSING if rate is None else rate_text(rate, n) for rate in (start, end))
    return f"{ends}, n = {n}" if n else ends


def _commit(commit: Any) -> str:
    if not isinstance(commit, str):
        return MISSING
    name, dash, rest = commit.partition("-")
    return f"{name[:12]}{dash}{rest}"


def _text(value: Any) -> str:
    return MISSING if value is None else str(value)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
