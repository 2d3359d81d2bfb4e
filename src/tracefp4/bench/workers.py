"""Processes of one script side by side, on the visible GPUs in turn; none outlives the script."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tracefp4 import signals
from tracefp4.device import visible_gpus

DIFFERENT = 3
"""Exit code of a worker that found a difference; Python's own for an error nobody caught is 1."""
_ENDS = (0, DIFFERENT)
POLL_SECONDS, GRACE_SECONDS = 0.2, 10.0


def run_workers(commands: Sequence[Sequence[str]]) -> list[int]:
    """Exit codes, in order, negative for a signal. The first that fails, with neither 0 nor ``DIFFERENT``, ends all.

    A worker calls ``signals.end_with_stdin`` first, so that it goes with this process however that ends.

    Raises:
        signals.Stopped: after a signal has ended all workers.
    """
    gpus = visible_gpus()
    children: list[subprocess.Popen[bytes]] = []
    with signals.stoppable():
        try:
            for i, command in enumerate(commands):
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = gpus[i % len(gpus)]
                children.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
                )
            while any(child.poll() is None for child in children) and not any(map(_failed, children)):
                time.sleep(POLL_SECONDS)
        finally:
            _end(children)
    return [child.returncode for child in children]


def told_failure(codes: Sequence[int]) -> bool:
    """Whether a worker failed; says which."""
    failed = [i for i, code in enumerate(codes) if code not in _ENDS]
    if failed:
        print(f"error: process {failed[0]} failed with exit code {codes[failed[0]]}; all were ended", file=sys.stderr)
    return bool(failed)


def _failed(child: subprocess.Popen[bytes]) -> bool:
    return child.poll() not in (None, *_ENDS)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
