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
        write_text_atomic(self.path, "".join(_lines_before(self.path, first_step)))

    def write(self, event: Mapping[str, Any]) -> None:
        """event: plain JSON values, its step among them."""
        append_text(self.path, json.dumps(event, sort_keys=True, allow_nan=False) + "\n")


def _lines_before(path: Path, step: int) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if step and path.exists() else []
    kept = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            if json.loads(line)["step"] < step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            raise RunFolderError(f"line {number} of {path} is no event: mend or remove that file") from None
    return kept
