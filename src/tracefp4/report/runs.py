"""Run folders, read for a report: runs may be unfinished, cut off, of other versions, with metrics missing or null."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tracefp4.errors import TracefpError
from tracefp4.report.logger import CONFIG, FINAL, METRICS, TIMING

RUN, EVALUATION = "run.json", "eval.json"
TIMING_PREFIX = "timing/"
UNKNOWN = "unknown"


class ReportError(TracefpError):
    """A run folder cannot be read, or the report not written."""


@dataclass(frozen=True)
class Series:
    """One metric of one run. steps: int64 [n], rising; values: float64 [n], NaN where the log says null."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def nulls(self) -> np.ndarray:
        """The steps whose value is null, int64."""
        return self.steps[np.isnan(self.values)]

    @property
    def finite(self) -> Series:
        """Without the nulls."""
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])

    def last_quarter(self) -> np.ndarray:
        """Finite values of the last quarter of the logged steps (rounded up), float64."""
        tail = self.values[len(self.values) - math.ceil(len(self.values) / 4) :]
        return tail[np.isfinite(tail)]


@dataclass
class Run:
    """A run folder. name: unique among the runs of a report; series: metrics, and figures of timing.jsonl under
    "timing/"; config, run, final: the JSON files, empty where one is missing; notices: what a reader must know."""

    path: Path
    name: str
    series: dict[str, Series]
    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def method(self) -> str:
        for value in (self.run.get("method"), self.final.get("method"), self.setting("method.name")):
            if isinstance(value, str):
                return printable(value)
        return UNKNOWN

    @property
    def seed(self) -> int | None:
        for value in (self.run.get("seed"), self.final.get("seed"), self.setting("run.seed")):
            if isinstance(value, int):
                return value
        return None

    @property
    def steps_done(self) -> int:
        """One more than the last logged step; 0 where none is whole."""
        last = [int(s.steps[-1]) for name, s in self.series.items() if not name.startswith(TIMING_PREFIX)]
        return 1 + max(last, default=-1)

    @property
    def steps_planned(self) -> int | None:
        steps = self.setting("run.steps", self.final.get("steps"))
        return steps if isinstance(steps, int) else None

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of config.json by its dotted key."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def settings(self) -> dict[str, Any]:
        """config.json with dotted keys."""
        return dict(_flat(self.config))

    def pass_rates(self) -> tuple[float | None, float | None, int | None]:
        """Held-out pass rate at the start and the end, and the number of problems; None where final.json lacks it."""
        start, end, n = (self.final.get(f"eval/{key}") for key in ("pass_rate_start", "pass_rate_end", "n"))
        return _number_or_none(start), _number_or_none(end), n if isinstance(n, int) and n > 0 else None


@dataclass
class Group:
    """Runs that differ in their seed only; drawn as one curve. index: picks colour, dash and marker."""

    index: int
    label: str
    runs: list[Run]


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """All runs in and below `paths`, each once, by path. Raises ReportError for none, and for a broken file."""
    folders = find_runs(paths)
    runs, empty = [], []
    for folder, name in zip(folders, _names(folders), strict=True):
        run = load_run(folder, name)
        if any(not key.startswith(TIMING_PREFIX) for key in run.series):
            runs.append(run)
        else:
            empty.append(run)
    if not runs:
        raise ReportError(f"{empty[0].path / METRICS} holds no step yet: report it once a step is done")
    for run in empty:
        runs[0].notices.append(f"{run.name} has logged no step yet and is left out")
    return runs


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Resolved folders that hold metrics.jsonl, in and below `paths`, sorted. Links to folders are not followed."""
    found: set[Path] = set()
    for given in paths:
        root = Path(given)
        if not root.is_dir():
            raise ReportError(f"{root} is no folder: give a run folder or one that holds some")
        before = len(found)
        found.update(folder.resolve() for folder in _below(root))
        if len(found) == before and not any(f.is_relative_to(root.resolve()) for f in found):
            if (root / EVALUATION).exists():
                raise ReportError(f"{root} is an evaluation, whose figures are in its {EVALUATION}: give a run folder")
            raise ReportError(f"no run found in {root}: neither it nor a folder below it holds {METRICS}")
    if not found:
        raise ReportError("no run folder given")
    return sorted(found)


def load_run(path: Path, name: str | None = None) -> Run:
    """Reads one folder. A last line that was cut off is left out with a notice; any other broken line is an error."""
    notices: list[str] = []
    series = read_series(path / METRICS, "", notices)
    if (path / TIMING).exists():
        series |= read_series(path / TIMING, TIMING_PREFIX, notices)
    config, run_json, final = (_read_object(path / file) for file in (CONFIG, RUN, FINAL))
    run = Run(path, name or printable(path.name), series, config, run_json, final)
    run.notices = [f"{run.name}: {notice}" for notice in notices]
    if not run.config:
        run.notices.append(f"{run.name}: no {CONFIG}, so its settings and planned steps are unknown")
    return run


def read_series(path: Path, prefix: str, notices: list[str]) -> dict[str, Series]:
    """The columns of a metrics or timing file. Raises ReportError naming file and line."""
    columns: dict[str, tuple[list[int], list[float]]] = {}
    last = -1
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ReportError(f"{path} cannot be read ({error.strerror})") from None
    for number, raw in enumerate(lines, 1):
        if number == len(lines) and not raw:
            break  # the end of the last line
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no line break follows: the writer was stopped in the middle, or is at it
                notices.append(f"{path.name} ends in the middle of line {number}, which is left out")
                break
            raise ReportError(f"{path} line {number} is no JSON object ({error})") from None
        step = line.pop("step", None) if isinstance(line, dict) else None
        if type(step) is not int or not 0 <= step < 2**63:
            raise ReportError(f"{path} line {number} is no JSON object with a whole number as step")
        if step <= last:
            raise ReportError(f"{path} line {number} is of step {step}, but follows step {last}: steps must rise")
        last = step
        for key, value in line.items():
            steps, values = columns.setdefault(prefix + printable(key), ([], []))
            steps.append(step)
            values.append(_metric(value, key, path, number))
    return {
        key: Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))
        for key, (steps, values) in sorted(columns.items())
    }


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs of one method and one config but for the seed, together; of several runs with one seed, by folder.

    In the order of the runs. A label is the method's name, with a folder where several groups share a method.
    """
    alike: dict[str, list[Run]] = {}
    for run in runs:
        settings = {k: v for k, v in run.settings().items() if k != "run.seed"}
        alike.setdefault(json.dumps([run.method, settings], sort_keys=True), []).append(run)
    parts: list[list[Run]] = []
    for members in alike.values():
        if _seeds_differ(members):
            parts.append(members)
            continue
        by_folder: dict[Path, list[Run]] = {}
        for run in members:
            by_folder.setdefault(run.path.parent, []).append(run)
        for siblings in by_folder.values():
            parts.extend([siblings] if _seeds_differ(siblings) else [[run] for run in siblings])
    methods = [part[0].method for part in parts]
    return [
        Group(i, part[0].method if methods.count(part[0].method) == 1 else f"{part[0].method} ({_folder(part)})", part)
        for i, part in enumerate(parts)
    ]


def printable(text: str) -> str:
    r"""Text that any file can hold: control characters and undecodable bytes of a folder's name as \x1b."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _seeds_differ(runs: Sequence[Run]) -> bool:
    seeds = [run.seed for run in runs]
    return len(runs) == 1 or (None not in seeds and len(set(seeds)) == len(seeds))


def _folder(runs: Sequence[Run]) -> str:
    """The part of the names that the runs share."""
    if len(runs) == 1:
        return runs[0].name
    return os.path.commonpath([run.name for run in runs]) or runs[0].name


def _below(root: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(root, onerror=_unreadable):
        if METRICS in files:
            inner.clear()  # what lies in a run folder is the run's own
            yield Path(folder)
        inner.sort()


def _unreadable(error: OSError) -> None:
    raise ReportError(f"the folder {error.filename} cannot be read ({error.strerror})")


def _names(folders: Sequence[Path]) -> list[str]:
    """Paths below the folder above what all share: 'cmp/bf16/seed0'."""
    base = Path(os.path.commonpath(folders)).parent
    return [printable(folder.relative_to(base).as_posix()) for folder in folders]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ReportError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ReportError(f"{path} holds no JSON object")
    return content


def _metric(value: Any, key: str, path: Path, line: int) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReportError(f"{path} line {line}: {printable(key)} is {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _number_or_none(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in sorted(table.items()):
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield printable(prefix + key), value
