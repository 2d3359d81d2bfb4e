"""Other processes, for tests that start some and look whether they are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not yet collected does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc").exists()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def read_pid(path: Path) -> int:
    """The number in a file that a process writes once it runs."""
    assert wait_for(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())
