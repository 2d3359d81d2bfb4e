"""A run's folder and its logs.

    metrics.jsonl   one JSON object per step: {"reward/mean": 0.41, ..., "step": 0}; keys sorted, floats by
                    repr, no wall-clock figure, so equal runs give equal files
    timing.jsonl    the same for wall-clock figures, which never repeat
    events.jsonl    what the watchdogs said, one JSON object per event, see `report.events`
    config.json     the resolved config          (written by the command line)
    final.json      the summary of the whole run (written by the command line, unless the loop did)
    run.json        commit, versions, hardware   (written by the loop)
    tensorboard/    the same scalars as event files

NaN and infinity are not JSON: they are written as null, counted in `RunLogger.nonfinite`, and warned about
once per metric, so that a broken figure is neither a broken file nor a silent zero.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracefp4.errors import TracefpError

METRICS, TIMING, CONFIG, FINAL = "metrics.jsonl", "timing.jsonl", "config.json", "final.json"
EVENTS = "events.jsonl"
_OURS = frozenset({METRICS, TIMING, EVENTS, CONFIG, FINAL, "run.json", "checkpoint", "states", "tensorboard"})


class RunFolderError(TracefpError):
    """The folder of a run cannot be made or may not be touched."""


def create_run_dir(path: str | Path, *, overwrite: bool = False) -> Path:
    """Makes an empty run folder. What is already there goes only with `overwrite`, and only if it is a run.

    That last condition keeps `--out ~ --overwrite` from emptying a home.
    """
    path = ensure_dir(path)
    present = {entry.name for entry in path.iterdir()}
    if present and not overwrite:
        raise RunFolderError(f"the run folder {path} is not empty: choose another with --out or pass --overwrite")
    if present and METRICS not in present and not present <= _OURS:
        raise RunFolderError(f"{path} holds no tracefp4 run, so --overwrite leaves it alone: choose another --out")
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return path


def ensure_dir(path: str | Path) -> Path:
    """Makes a folder, parents included, unless it is there; RunFolderError if files cannot be made in it."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Permission bits say little (root, read-only mounts): try.
        with tempfile.TemporaryFile(dir=path):
            pass
    except (FileExistsError, NotADirectoryError):
        raise RunFolderError(f"the folder {path} cannot be made: a file is in its place") from None
    except OSError as error:
        raise RunFolderError(f"the folder {path} cannot be written ({error.strerror})") from None
    return path


def write_json_atomic(path: str | Path, obj: Any) -> None:
    """Writes JSON (sorted keys, two spaces) so that a reader sees the old file or the new one, never a half.

    NaN and infinity become null.
    """
    path = Path(path)
    text = json.dumps(_plain(obj), sort_keys=True, indent=2, allow_nan=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class RunLogger:
    """Appends the figures of each step to a run folder and flushes them before it returns.

    The folder may hold a config.json already, but no metrics: two runs never share a file.
    """

    def __init__(self, run_dir: str | Path, tensorboard: bool = True, first_step: int = 0) -> None:
        """first_step: go on from here; lines of later steps, and a last line cut short, are dropped first."""
        self.run_dir = Path(run_dir)
        self.nonfinite = 0
        """Figures written as null so far."""
        self._warned: set[str] = set()
        self._last_step: int | None = None
        metrics = self.run_dir / METRICS
        ensure_dir(self.run_dir)
        if first_step:
            for name in (METRICS, TIMING):
                _keep_steps_before(self.run_dir / name, first_step)
        elif metrics.exists() and metrics.stat().st_size:
            raise RunFolderError(f"{metrics} is of another run: choose another folder with --out or pass --overwrite")
        for name in (METRICS, TIMING):
            (self.run_dir / name).touch()
        self._writer = _summary_writer(self.run_dir, first_step) if tensorboard else None

    def log(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float] | None = None) -> None:
        """Writes one line to each file. Steps must increase; values are numbers or tensors of one element."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}: steps must increase")
        self._last_step = step
        for file, values, prefix in ((METRICS, metrics, ""), (TIMING, timing or {}, "timing/")):
            line = {name: self._number(name, value) for name, value in values.items()}
            if "step" in line:
                raise ValueError("'step' is the line's own key and no metric may take it")
            with open(self.run_dir / file, "a", encoding="utf-8") as out:
                out.write(json.dumps({**line, "step": step}, sort_keys=True, allow_nan=False) + "\n")
                out.flush()
                os.fsync(out.fileno())  # a state that is saved next must not know more than this file
            for name, value in line.items():
                if self._writer is not None and value is not None:
                    self._writer.add_scalar(prefix + name, value, step)
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Closes the event files; closing twice is fine."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _number(self, name: str, value: Any) -> int | float | None:
        if isinstance(value, str):
            raise TypeError(f"the metric {name} must be a number, got {value!r}")
        number = int(value) if isinstance(value, int) else float(value)
        if isinstance(number, int) or math.isfinite(number):
            return number
        self.nonfinite += 1
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"the metric {name} is {number} and is logged as null", RuntimeWarning, stacklevel=3)
        return None


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All lines of a metrics or timing file, in order."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _plain(value: Any) -> Any:
    """The value in plain JSON types: non-finite floats to None, scalars of numpy and torch to numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return _plain(value.item())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _keep_steps_before(path: Path, step: int) -> None:
    """Rewrites a metrics or timing file with the lines of steps 0..step-1; RunFolderError where one is missing."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = lines[:step]
    for index, line in enumerate(kept):
        if not line.endswith("\n") or json.loads(line)["step"] != index:
            kept = kept[:index]
            break
    if len(kept) < step:
        raise RunFolderError(f"{path} lacks step {len(kept)}, so the run cannot go on from step {step}: start it anew")
    write_lines_atomic(path, kept)


def write_lines_atomic(path: Path, lines: list[str]) -> None:
    """Replaces a file by these lines, which end in line breaks; a reader sees the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def _summary_writer(run_dir: Path, first_step: int) -> Any:
    # Imported on use: it pulls in tensorboard, which takes a second that `--help` should not pay.
    from torch.utils.tensorboard import SummaryWriter

    # purge_step: the viewer forgets what an earlier process wrote of steps that are run again.
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step or None)
