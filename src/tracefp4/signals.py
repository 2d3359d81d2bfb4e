"""Ctrl-C, SIGTERM and SIGHUP of a training process, and children that end with their parent.

The signals become the exception `Stopped`, raised where the main thread stands, except between `hold` and `release`:
there the first one waits. A second one is raised at once, everywhere.

    with stoppable():
        hold()        # a policy that is half updated is no state to go on from
        update()
        release()     # raises Stopped if a signal came since
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ORPHAN_GRACE_SECONDS = 20.0


class Stopped(KeyboardInterrupt):
    """A signal asked the process to end.

    signum: which. at_once: it came twice, so nothing should be saved any more. exit_code: 128 + signum, as in shells.
    """

    def __init__(self, signum: int, at_once: bool = False) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum, self.at_once, self.exit_code = signum, at_once, 128 + signum


class _Pending:
    """What the handler knows; signals belong to the process, so there is one of it."""

    held = False
    first: int | None = None


@contextmanager
def stoppable() -> Iterator[None]:
    """Turns the signals into `Stopped` within the block. Outside the main thread it changes nothing."""
    before: dict[signal.Signals, Any] = {}
    _Pending.held, _Pending.first = False, None
    if threading.current_thread() is threading.main_thread():
        for signum in SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP, and is meant to
                before[signum] = signal.signal(signum, _handle)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _Pending.held = False


def hold() -> None:
    """From here on a first signal waits for `release`."""
    _Pending.held = True


def release() -> None:
    """Ends `hold`; raises `Stopped` where a signal waits."""
    if _Pending.held:
        _Pending.held = False
        if _Pending.first is not None:
            raise Stopped(_Pending.first)


@contextmanager
def deferred() -> Iterator[None]:
    """Signals that come within the block are handled after it. A process started there does not take them at all,
    until it unblocks them: a Ctrl-C, which a terminal sends to both, finds no child that is still importing."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _handle(signum: int, _: FrameType | None) -> None:
    if _Pending.first is not None:
        raise Stopped(_Pending.first, at_once=True)
    _Pending.first = signum
    if not _Pending.held:
        raise Stopped(signum)
    with suppress(OSError):
        print("stopping after this update; once more to stop at once", file=sys.stderr, flush=True)


def end_with_stdin() -> None:
    """Ends this process by SIGTERM, then by force, once standard input closes.

    A parent that keeps the other end of that pipe takes its children along however it dies, on every system; what was
    closed before this call is noticed too.
    """
    threading.Thread(target=_watch, name="end-with-stdin", daemon=True).start()


def _watch() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_SECONDS)
    os._exit(128 + signal.SIGTERM)
