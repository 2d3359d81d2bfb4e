"""A run's folder and its logs.

    metrics.jsonl   one JSON object per step: {"reward/mean": 0.41, ..., "step": 0}; keys sorted, floats by
                    repr, no wall-clock figure, so equal runs give equal files
    timing.jsonl    the same for wall-clock figures, which never repeat
    events.jsonl    what the watchdogs said, one JSON object per event, see `report.events`
    samples.jsonl   some responses of every so many steps, one JSON object each, likewise
    config.json     the resolved config          (written by the command line)
    final.json      the summary of the whole run (written by the command line, unless the loop did)
    run.json        commit, versions, hardware   (written by the loop)
    tensorboard/    the same scalars as event files; where they cannot be written the run goes on without
    run.lock        while a process works on the folder

NaN and infinity are not JSON: they are written as null, counted in `RunLogger.nonfinite`, and warned about
once per metric, so that a broken figure is neither a broken file nor a silent zero.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracefp4.files import LOCK, StorageError, append_text, reason, storage_errors, warn, write_text_atomic

METRICS, TIMING, CONFIG, FINAL = "metrics.jsonl", "timing.jsonl", "config.json", "final.json"
EVENTS, SAMPLES, RUN = "events.jsonl", "samples.jsonl", "run.json"
_FOLDERS = ("checkpoint", "checkpoint-best", "states", "tensorboard", "guidance", "weights")
_OURS = frozenset({METRICS, TIMING, EVENTS, SAMPLES, CONFIG, FINAL, RUN, LOCK, *_FOLDERS})


class RunFolderError(StorageError):
    """The folder of a run cannot be made or may not be touched."""


def create_run_dir(path: str | Path, *, overwrite: bool = False) -> Path:
    """Makes an empty run folder. What is already there goes only with `overwrite`, and only if it is a run.

    That last condition keeps `--out ~ --overwrite` from emptying a home.
    """
    path = ensure_dir(path)
    present = {entry.name for entry in path.iterdir()} - {LOCK}  # whoever holds the lock removes it
    if present and not overwrite:
        if METRICS in present:
            raise RunFolderError(
                f"the run folder {path} is not empty, it holds a run: go on with it by --resume, choose another with "
                "--out, or pass --overwrite to replace it"
            )
        raise RunFolderError(f"the run folder {path} is not empty: choose another with --out or pass --overwrite")
    if present and METRICS not in present and not present <= _OURS:
        raise RunFolderError(f"{path} holds no tracefp4 run, so --overwrite leaves it alone: choose another --out")
    with storage_errors(str(path)):
        for name in present:
            entry = path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    return path


def check_own(path: str | Path) -> None:
    """Raises RunFolderError where a folder that is to be gone on with holds something, and no run of this package. One
    that is empty or not there, or that a run left before its first step, passes."""
    path = Path(path)
    present = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    # A run has both before it has metrics: metrics alone are another program's.
    lacks = METRICS if METRICS not in present else RUN if not present & {CONFIG, RUN} else ""
    foreign = sorted(present - _OURS)
    if not lacks or (lacks == METRICS and not foreign):
        return
    runs = sorted(str(file.parent) for file in path.glob(f"*/{METRICS}"))
    named = f"one of the runs in it, such as {runs[0]}" if runs else "the folder of a run"
    raise RunFolderError(
        f"{path} is no run to go on with, it lacks {lacks} and holds {(foreign or [METRICS])[0]}: give {named} as "
        "--out, or a new folder without --resume"
    )


def check_not_a_run(out: Path) -> None:
    """Raises RunFolderError for a run's own folder, in which the runs of several seeds would lie hidden."""
    if (out / RUN).is_file() or (out / METRICS).is_file():
        raise RunFolderError(f"{out} is a run itself, and --seeds makes a folder a seed in it: choose another --out")


def files_present(path: Path, facts: str, what: str, *, keep: bool) -> set[str]:
    """Names in the folder of an evaluation or a check, which holds the file ``facts``; the lock is not counted.

    keep: with --resume or --overwrite. Raises RunFolderError where there is something and it may not be touched.
    """
    present = {entry.name for entry in path.iterdir()} - {LOCK}
    if present and not keep:
        raise RunFolderError(
            f"{path} is not empty: choose another --out, go on with --resume or replace with --overwrite"
        )
    if present and facts not in present and not all(name.startswith(f".{facts}.") for name in present):
        raise RunFolderError(f"{path} holds no {what} and is left alone: choose another --out")
    return present


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

    NaN and infinity become null. Raises StorageError where the disk refuses.
    """
    write_text_atomic(path, json.dumps(_plain(obj), sort_keys=True, indent=2, allow_nan=False) + "\n")


class RunLogger:
    """Appends the figures of each step to a run folder and flushes them before it returns.

    The folder may hold a config.json already, but no metrics: two runs never share a file.
    """

    def __init__(
        self, run_dir: str | Path, tensorboard: bool = True, first_step: int = 0, resumed: bool = False
    ) -> None:
        """first_step: go on from here; lines of later steps, and a last line cut short, are dropped first. resumed: so
        too where first_step is 0."""
        self.run_dir = Path(run_dir)
        self.nonfinite = 0
        """Figures written as null so far."""
        self._warned: set[str] = set()
        self._last_step: int | None = None
        metrics = self.run_dir / METRICS
        ensure_dir(self.run_dir)
        if first_step or resumed:
            for name in (METRICS, TIMING):
                path = self.run_dir / name
                write_text_atomic(path, "".join(steps_before(path, first_step)))
        elif metrics.exists() and metrics.stat().st_size:
            raise RunFolderError(f"{metrics} is of another run: choose another folder with --out or pass --overwrite")
        for name in (METRICS, TIMING):
            with storage_errors(str(self.run_dir / name)):
                (self.run_dir / name).touch()
        self._writer: Any = None
        self._thread_hook = threading.excepthook
        if tensorboard:
            threading.excepthook = self._on_thread_error
            with self._without_tensorboard():
                self._writer = _summary_writer(self.run_dir, first_step)

    def log(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float] | None = None) -> None:
        """Writes one line to each file. Steps must increase; values are numbers or tensors of one element.

        Raises StorageError, and leaves no half line, where a file cannot be written.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}: steps must increase")
        self._last_step = step
        for file, values, prefix in ((METRICS, metrics, ""), (TIMING, timing or {}, "timing/")):
            line = {name: self._number(name, value) for name, value in values.items()}
            if "step" in line:
                raise ValueError("'step' is the line's own key and no metric may take it")
            # Synced: a state that is saved next must not know more than this file.
            append_text(self.run_dir / file, json.dumps({**line, "step": step}, sort_keys=True, allow_nan=False) + "\n")
            self._scalars(step, prefix, line)

    def _scalars(self, step: int, prefix: str, line: Mapping[str, float | None]) -> None:
        if self._writer is not None:
            with self._without_tensorboard():
                for name, value in line.items():
                    if value is not None:
                        self._writer.add_scalar(prefix + name, value, step)
                self._writer.flush()

    @contextmanager
    def _without_tensorboard(self) -> Iterator[None]:
        """Where event files cannot be written the run goes on without them: metrics.jsonl holds the same."""
        try:
            yield
        except OSError as error:
            warn(f"{self.run_dir / 'tensorboard'} cannot be written ({reason(error)}): the run goes on without it")
            self._writer = None

    def close(self) -> None:
        """Closes the event files; closing twice is fine."""
        if self._writer is not None:
            with self._without_tensorboard():
                self._writer.close()
            self._writer = None
        threading.excepthook = self._thread_hook

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Drops the traceback of tensorboard's writing thread: the same error is raised by its next call."""
        if not (isinstance(error.exc_value, OSError) and type(error.thread).__name__ == "_AsyncWriterThread"):
            self._thread_hook(error)

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


def logged_steps(run_dir: Path) -> int:
    """Lines in a run's metrics.jsonl; 0 where there is none."""
    try:
        return (run_dir / METRICS).read_bytes().count(b"\n")
    except OSError:
        return 0


def is_complete(run_dir: Path, steps: int | None) -> bool:
    """Whether the folder's final.json tells of a run of ``steps`` steps."""
    try:
        final = json.loads((run_dir / FINAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return steps is not None and isinstance(final, dict) and final.get("steps") == steps


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


def steps_before(path: Path, step: int) -> list[str]:
    """The lines of steps 0..step-1 of a metrics or timing file. Raises RunFolderError where one is missing."""
    lines: list[str] = []
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror}), so the run cannot go on") from None
    for raw in data.split(b"\n")[:-1][:step]:
        try:
            if json.loads(raw)["step"] != len(lines):
                break
            lines.append(raw.decode() + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            break
    if len(lines) < step:
        raise RunFolderError(f"{path} lacks step {len(lines)}, so the run cannot go on from step {step}")
    return lines


def _summary_writer(run_dir: Path, first_step: int) -> Any:
    # Imported on use: it pulls in tensorboard, which takes a second that `--help` should not pay.
    from torch.utils.tensorboard import SummaryWriter

    # purge_step: the viewer forgets what an earlier process wrote of steps that are run again; all, where that died
    # before its first state.
    folder = run_dir / "tensorboard"
    return SummaryWriter(str(folder), purge_step=first_step if any(folder.glob("events.*")) else None)
