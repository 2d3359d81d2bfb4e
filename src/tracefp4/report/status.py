"""`tracefp4 status`: one line a run, while it works and after."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tracefp4.files import LOCK, lock_held
from tracefp4.report.logger import CONFIG, EVENTS, FINAL, METRICS, TIMING
from tracefp4.report.runs import ReportError, load_run, printable

_STEP = re.compile(r"\Astep \d+, ")
RECENT = 10
"""Steps that the figures of a row are taken from."""
_REWARD, _DIFF, _GUIDED = "reward/mean", "mismatch/logprob_abs_diff_mean", "guidance/guided_share"


@dataclass(frozen=True)
class Status:
    """Where a run stands.

    state: "running" (a process holds the folder), "done", "stopped by watch.NAME", or "not running" (it ended before
    its last step, by a signal or an error: --resume goes on). step_seconds: median of the recent steps. left_seconds:
    by that median. idle_seconds: since a figure was last logged. reward, diff, guided: means of the recent steps; None
    where the run logs no such figure. warnings: events so far; last_warning: "step N, NAME: MESSAGE" of the newest,
    and how many saves have failed.
    """

    run: str
    method: str
    seed: int | None
    state: str
    steps: int
    planned: int | None
    step_seconds: float | None
    left_seconds: float | None
    idle_seconds: float | None
    reward: float | None
    diff: float | None
    guided: float | None
    pass_rate_start: float | None
    pass_rate_end: float | None
    warnings: int
    last_warning: str | None


def statuses(paths: Sequence[str | Path]) -> list[Status]:
    """A row a run in and below ``paths``, by path: its folder's name, or as much of its path as was given where
    several have that name. Raises ReportError for a path without a run, and for a broken file."""
    rows: list[Status] = []
    given_names = Counter(Path(given).name for given in paths)
    for given in paths:
        root = Path(given)
        if not root.is_dir():
            raise ReportError(f"{root} is no folder: give a run folder or one that holds some")
        folders = sorted(_folders(root))
        if not folders and all(entry.name == LOCK for entry in root.iterdir()):
            if lock_held(root):
                raise ReportError(f"{root} has no step to tell of yet: a process holds it and is about to begin")
            raise ReportError(
                f"{root} is empty, as a run leaves it that ends before its first step: the command that began it "
                "begins it anew"
            )
        if not folders:
            raise ReportError(f"no run found in {root}: neither it nor a folder below it holds {METRICS} or {CONFIG}")
        for folder in folders:
            alone = folder == root and root.name and given_names[root.name] == 1
            name = root.name if alone else folder.as_posix()
            rows.append(status(folder, printable(name)))
    return rows


def status(folder: Path, name: str) -> Status:
    """The row of one run folder. Raises ReportError for a broken file."""
    logged = (folder / METRICS).exists()
    run = load_run(folder, name) if logged else None
    series = {} if run is None else run.series
    steps = 0 if run is None or not series else run.steps_done
    planned = run.steps_planned if run is not None else _planned(folder)
    timing = series.get("timing/step_seconds")
    seconds = _step_seconds(series) if timing is None else _recent(timing.values, statistics.median)
    final = _object(folder / FINAL)
    state = _state(folder, final)
    left = None
    if state == "running" and seconds is not None and planned is not None:
        left = seconds * max(0, planned - steps)
    start, end, _ = run.pass_rates() if run is not None else (None, None, None)
    events = _events(folder)
    said = [printable("step {step}, {name}: {message}".format_map(events[-1]))] if events else []
    said += _failed_saves(folder, series) if state != "done" else []
    return Status(
        run=name,
        method=run.method if run is not None else _setting(folder, "method", "name"),
        seed=run.seed if run is not None else None,
        state=state,
        steps=steps,
        planned=planned,
        step_seconds=seconds,
        left_seconds=left,
        idle_seconds=_idle(folder) if logged else None,
        reward=_mean(series, _REWARD),
        diff=_mean(series, _DIFF),
        guided=_mean(series, _GUIDED),
        pass_rate_start=start,
        pass_rate_end=end,
        warnings=len(events),
        last_warning="; ".join(said) or None,
    )


def status_table(rows: Sequence[Status]) -> Table:
    """What a person looks at; ``status_objects`` has all of it."""
    table = Table()
    for heading in ("run", "state", "step", "s/step", "left", "reward", "|log-prob diff|", "guided", "warnings"):
        table.add_column(Text(heading), justify="left" if heading in ("run", "state") else "right")
    for r in rows:
        cells = [
            r.run,
            r.state if r.state != "running" or r.idle_seconds is None else f"running, {_span(r.idle_seconds)} ago",
            f"{r.steps}/{r.planned}" if r.planned is not None else str(r.steps),
            _figure(r.step_seconds),
            "-" if r.left_seconds is None else _span(r.left_seconds),
            _figure(r.reward),
            _figure(r.diff),
            _figure(r.guided),
            str(r.warnings),
        ]
        table.add_row(*map(Text, cells))
    return table


def warning_lines(rows: Sequence[Status]) -> list[str]:
    """The newest warning of every run that has one; a line for all runs that say the same, whatever the step."""
    runs: dict[str, list[Status]] = {}
    for row in rows:
        if row.last_warning:
            runs.setdefault(_STEP.sub("", row.last_warning), []).append(row)
    lines = []
    for text, those in runs.items():
        first, others = those[0], len(those) - 1
        lines.append(f"{first.run} and {others} more: {text}" if others else f"{first.run}: {first.last_warning}")
    return lines


def status_objects(rows: Sequence[Status]) -> list[dict[str, Any]]:
    """The rows as plain JSON values."""
    return [asdict(row) for row in rows]


def _folders(root: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(root):
        if METRICS in files or (CONFIG in files and LOCK in files):
            inner.clear()  # what lies in a run folder is the run's own: a checkpoint has a config.json too
            yield Path(folder)


def _state(folder: Path, final: dict[str, Any]) -> str:
    if lock_held(folder):
        return "running"
    if isinstance(stopped := final.get("stopped_by"), dict):
        return f"stopped by watch.{printable(str(stopped.get('name')))}"
    return "done" if final else "not running"


def _step_seconds(series: dict[str, Any]) -> float | None:
    """The synchronous loop logs the parts of a step."""
    parts = [series.get(f"timing/{name}_seconds") for name in ("rollout", "train", "weight_sync")]
    if any(part is None for part in parts):
        return None
    n = min(len(part.values) for part in parts if part is not None)
    total = sum(part.values[:n] for part in parts if part is not None)
    return _recent(total, statistics.median)


def _recent(values: Any, of: Any) -> float | None:
    last = [float(v) for v in values[-RECENT:] if math.isfinite(v)]
    return float(of(last)) if last else None


def _mean(series: dict[str, Any], name: str) -> float | None:
    found = series.get(name)
    return None if found is None else _recent(found.values, statistics.fmean)


def _failed_saves(folder: Path, series: dict[str, Any]) -> list[str]:
    """How many saves of the last process have failed, and how far --resume would go back."""
    found = series.get("timing/failed_saves")
    count = 0 if found is None or not len(found.values) else int(found.values[-1])
    if not count:
        return []
    steps = sorted(int(path.name[5:]) for path in folder.glob("states/step-*") if path.name[5:].isdigit())
    last = f"its newest state is of step {steps[-1]}" if steps else "it has no state"
    return [f"{count} save{'s' * (count > 1)} failed, {last}: is the disk full?"]


def _idle(folder: Path) -> float | None:
    with suppress(OSError):
        path = folder / TIMING if (folder / TIMING).exists() else folder / METRICS
        return max(0.0, time.time() - path.stat().st_mtime)
    return None


def _events(folder: Path) -> list[dict[str, Any]]:
    """Whole lines only: the run may be writing one."""
    try:
        lines = (folder / EVENTS).read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    events = []
    for line in lines:
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and {"step", "name", "message"} <= event.keys():
                events.append(event)
    return events


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _planned(folder: Path) -> int | None:
    steps = _setting(folder, "run", "steps")
    return int(steps) if steps.isdigit() else None


def _setting(folder: Path, section: str, key: str) -> str:
    table = _object(folder / CONFIG).get(section)
    return printable(str(table.get(key, "unknown"))) if isinstance(table, dict) else "unknown"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _span(seconds: float) -> str:
    """'41 s', '12 min', '3.4 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
