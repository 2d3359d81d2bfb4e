"""The state of a command as a few files of bounded size, to go on with on another machine.

A pack holds the plan, the figures of every run, the scores of the evaluated ones, the warm starts, and the newest state
of each run that is not done, in so far as they fit: states of runs that lack the fewest steps first. A run whose state
does not fit starts anew over there. Left out: policies and responses of runs that are evaluated, pages, pictures.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tracefp4.errors import TracefpError
from tracefp4.files import storage_errors
from tracefp4.report import ensure_dir
from tracefp4.report.logger import CONFIG, EVENTS, FINAL, METRICS, RUN, TIMING
from tracefp4.reproduce.plan import PLAN, RECIPES, SCORES, STARTS, Plan, Spec
from tracefp4.reproduce.runner import INVOCATIONS, steps_done
from tracefp4.saves import CHECKPOINT, STATES

DEFAULT_MEGABYTES, PART_MEGABYTES = 60, 15
_MB = 10**6
_PART = "state.tar.gz.{:03d}"
_RUN_FILES = (CONFIG, FINAL, METRICS, RUN, TIMING, EVENTS)
_FACTS = "pack.json"


def pack(plan: Plan, folder: Path, megabytes: float = DEFAULT_MEGABYTES) -> dict[str, object]:
    """Writes ``folder`` anew, in parts of at most 15 MB, together at most ``megabytes``; returns what was packed:
    {"bytes", "parts", "states", "anew"}.

    Raises:
        TracefpError: what must travel does not fit, or the folder holds something else.
        StorageError: the disk refuses.
    """
    _clear(folder)
    ensure_dir(folder)
    limit = int(megabytes * _MB)
    unfinished = sorted((s for s in plan.specs if not s.done), key=lambda spec: spec.steps - steps_done(spec))
    fixed = [*_always(plan), *(item for spec in plan.specs for item in _figures(spec, plan.out))]
    fixed += [item for spec in unfinished for item in _policy(spec, plan)]
    fixed += [item for start in plan.starts for item in _tree(start, f"{STARTS}/{start.name}")]
    states, anew, chosen = [], [], list(fixed)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, storage_errors(str(folder)):
        target = Path(scratch) / "pack"
        # Weights do not compress; whatever they leave is for the figures, which do.
        room = limit - _write(target, fixed)
        if room < 0:
            raise TracefpError(f"the state without those of unfinished runs takes {_mb(limit - room)}: allow more MB")
        for spec in unfinished:
            items = list(_state(spec, plan.out))
            size = sum(path.stat().st_size for path, _ in items) + 4096 * len(items)
            if items and size <= room:
                room -= size
                chosen += items
                states.append(spec.name)
            elif items or steps_done(spec):
                anew.append(spec.name)
        size = _write(target, chosen)
        if size > limit:
            raise TracefpError(f"the state takes {_mb(size)}: allow more MB")
        parts = _split(target, folder)
    facts = {"bytes": size, "parts": parts, "states": states, "anew": anew}
    (folder / _FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return facts


def unpack(folder: Path, out: Path) -> None:
    """Puts a pack's files into ``out`` and the warm starts beside it; ``out`` must hold no plan yet.

    Raises:
        TracefpError: a part is missing or damaged, or there is a plan already.
    """
    if (out / PLAN).exists():
        raise TracefpError(f"{out} holds a plan already: unpack into another folder, or go on with this one")
    parts = sorted(folder.glob("state.tar.gz.*"))
    try:
        facts = json.loads((folder / _FACTS).read_bytes())
    except (OSError, ValueError) as error:
        raise TracefpError(f"{folder} is no pack: {_FACTS} cannot be read ({error})") from None
    if len(parts) != facts["parts"] or sum(part.stat().st_size for part in parts) != facts["bytes"]:
        raise TracefpError(f"{folder} lacks some of its {facts['parts']} parts of {_mb(facts['bytes'])} together")
    ensure_dir(out)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        try:
            with tarfile.open(fileobj=io.BufferedReader(_Parts(parts)), mode="r|gz") as archive:
                archive.extractall(scratch, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise TracefpError(f"{folder} is damaged: {error}") from None
        for start in (Path(scratch) / STARTS).glob("*"):
            target = out.parent / STARTS / start.name
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                shutil.move(start, target)
        for item in (Path(scratch) / "out").iterdir():
            if item.name != PLAN:  # last: what holds a plan is whole
                shutil.move(item, out / item.name)
        shutil.move(Path(scratch) / "out" / PLAN, out / PLAN)


# What travels: (file, name in the archive)


def _always(plan: Plan) -> Iterator[tuple[Path, str]]:
    for name in (PLAN, INVOCATIONS):
        if (plan.out / name).is_file():
            yield plan.out / name, f"out/{name}"
    yield from _tree(plan.out / RECIPES, f"out/{RECIPES}")


def _figures(spec: Spec, out: Path) -> Iterator[tuple[Path, str]]:
    files = [spec.run_dir / name for name in _RUN_FILES] if spec.trains else []
    for path in (*files, spec.failure, spec.origin, spec.eval_dir / SCORES, spec.folder / f"seed{spec.seed}.log"):
        if path.is_file():
            yield path, f"out/{path.relative_to(out)}"


def _policy(spec: Spec, plan: Plan) -> Iterator[tuple[Path, str]]:
    """Of a trained run that is not evaluated."""
    if spec.trained and not spec.evaluated:
        folder = spec.policy_dir / CHECKPOINT
        yield from _tree(folder, f"out/{folder.relative_to(plan.out)}")


def _state(spec: Spec, out: Path) -> Iterator[tuple[Path, str]]:
    """Of a run that is not trained: its newest state."""
    if spec.trains and not spec.trained:
        newest = sorted((spec.run_dir / STATES).glob("step-*"))[-1:]
        for folder in newest:
            yield from _tree(folder, f"out/{folder.relative_to(out)}")


def _tree(folder: Path, name: str) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path, f"{name}/{path.relative_to(folder)}"


# Files


def _write(target: Path, items: list[tuple[Path, str]]) -> int:
    """Its size in bytes."""
    with tarfile.open(target, "w:gz", compresslevel=6) as archive:
        for path, name in {name: (path, name) for path, name in items}.values():
            archive.add(path, name, recursive=False)
    return target.stat().st_size


def _split(source: Path, folder: Path) -> int:
    ensure_dir(folder)
    count = 0
    with source.open("rb") as stream:
        while data := stream.read(int(PART_MEGABYTES * _MB)):
            (folder / _PART.format(count)).write_bytes(data)
            count += 1
    return count


def _clear(folder: Path) -> None:
    """Removes an earlier pack."""
    if folder.exists() and (not folder.is_dir() or any(not _ours(path) for path in folder.iterdir())):
        raise TracefpError(f"{folder} holds other files than a pack's: choose another folder")
    for path in folder.glob("*"):
        path.unlink()


def _ours(path: Path) -> bool:
    return path.name == _FACTS or path.name.startswith("state.tar.gz.")


class _Parts(io.RawIOBase):
    """The parts as one stream."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = iter(paths)
        self._open: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while True:
            if self._open is None:
                path = next(self._paths, None)
                if path is None:
                    return 0
                self._open = path.open("rb")
            if data := self._open.read(len(buffer)):
                buffer[: len(data)] = data
                return len(data)
            self._open.close()
            self._open = None


def _mb(count: int) -> str:
    return f"{count / _MB:.1f} MB"
