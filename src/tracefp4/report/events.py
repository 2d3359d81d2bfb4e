"""Logs of a run that have lines for some steps only: events.jsonl, samples.jsonl.

    {"figures": {"ratio": 3.4, ...}, "level": "warn", "message": "...", "name": "mismatch", "step": 41}

events.jsonl: what the watchdogs said, a line an event. samples.jsonl: a line a response, see
``loop.training.response_samples``. Lines are in order of steps. As in metrics.jsonl there is no wall-clock figure and
keys are sorted: equal runs give equal files, resumed ones included.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tracefp4.files import append_text, write_text_atomic
from tracefp4.report.logger import EVENTS, RunFolderError


class StepLog:
    """Appends lines to a file of a run folder; each is on disk when ``write`` returns.

    first_step: go on from here; lines of later steps, and a last line cut short, are dropped first. Raises
    RunFolderError for a line before them that is none of a step.
    """

    def __init__(self, run_dir: str | Path, first_step: int = 0, name: str = EVENTS) -> None:
        self.path = Path(run_dir) / name
        write_text_atomic(self.path, "".join(lines_before(run_dir, first_step, name)))

    def write(self, *lines: Mapping[str, Any]) -> None:
        """lines: plain JSON values, their step among them."""
        append_text(self.path, _text(lines))


def append_event(run_dir: str | Path, event: Mapping[str, Any]) -> None:
    """Adds a line to events.jsonl beside a ``StepLog`` of this process, which has no file open between lines."""
    append_text(Path(run_dir) / EVENTS, _text([event]))


def _text(lines: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in lines)


def lines_before(run_dir: str | Path, step: int, name: str = EVENTS) -> list[str]:
    """The lines of such a file before ``step``. Raises RunFolderError for a whole line that is none of a step."""
    path = Path(run_dir) / name
    try:
        data = path.read_bytes() if step and path.exists() else b""
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror}): mend or remove it") from None
    kept = []
    for number, raw in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            if json.loads(raw)["step"] < step:
                kept.append(raw.decode() + "\n")
        except (ValueError, KeyError, TypeError):
            raise RunFolderError(f"line {number} of {path} is of no step: mend or remove that file") from None
    return kept
