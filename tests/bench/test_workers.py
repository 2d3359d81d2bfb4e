"""Workers of a script: exit codes, one that fails, and their end with the script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tracefp4.bench.workers import DIFFERENT, run_workers

WAITS = "import time; time.sleep(60)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_exit_codes_in_order() -> None:
    assert run_workers([python("pass"), python(f"raise SystemExit({DIFFERENT})")]) == [0, DIFFERENT]


def test_one_that_fails_ends_all() -> None:
    started = time.monotonic()
    codes = run_workers([python(WAITS), python("1 / 0"), python(WAITS)])
    assert codes == [-signal.SIGTERM, 1, -signal.SIGTERM]
    assert time.monotonic() - started < 30


def test_a_killed_script_takes_its_workers_along(tmp_path: Path) -> None:
    worker = f"""
import os, pathlib, time
from tracefp4 import signals
signals.end_with_stdin()
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
time.sleep(60)
"""
    script = f"from tracefp4.bench.workers import run_workers; run_workers([[{sys.executable!r}, '-c', {worker!r}]])"
    parent = subprocess.Popen(python(script))
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text()):
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    for _ in range(200):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the worker is still there")
