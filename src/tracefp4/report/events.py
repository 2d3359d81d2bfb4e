"""events.jsonl: what the watchdogs of a run said.

    {"figures": {"ratio": 3.4, ...}, "level": "warn", "message": "...", "name": "mismatch", "step": 41}

One line per event, in order of steps, none for a step where all is well. As in metrics.jsonl there is no wall-clock
figure and keys are sorted: equal runs give equal files, resumed ones included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracefp4.files import append_text, write_text_atomic
from tracefp4.report.logger import EVENTS, RunFolderError


class EventLog:
    """Appends events to a run folder; each is on disk when ``write`` returns.

    first_step: go on from here; events of later steps, and a last line cut short, are dropped first. Raises
    RunFolderError for a line before them that is no event.
    """

    def __init__(self, run_dir: str | Path, first_step: int = 0) -> None:
        self.path = Path(run_dir) / EVENTS
        write_text_atomic(self.path, "".join(events_before(run_dir, first_step)))

    def write(self, event: Mapping[str, Any]) -> None:
        """event: plain JSON values, its step among them."""
        append_event(self.path.parent, event)


def append_event(run_dir: str | Path, event: Mapping[str, Any]) -> None:
    """Adds a line while no ``EventLog`` of another process is at work there. event: as for ``EventLog.write``."""
    append_text(Path(run_dir) / EVENTS, json.dumps(event, sort_keys=True, allow_nan=False) + "\n")


def events_before(run_dir: str | Path, step: int) -> list[str]:
    """The lines of events before ``step``. Raises RunFolderError for a whole line that is no event."""
    path = Path(run_dir) / EVENTS
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
            raise RunFolderError(f"line {number} of {path} is no event: mend or remove that file") from None
    return kept
