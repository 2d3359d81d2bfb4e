"""What both child processes of an asynchronous run do around their work."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tracefp4.asynchronous.channel import Channel, Gone
from tracefp4.asynchronous.messages import Failed
from tracefp4.errors import TracefpError
from tracefp4.loop import RunConfig
from tracefp4.loop.training import guidance_url
from tracefp4.report.provenance import usable_cores
from tracefp4.signals import SIGNALS, Stopped

_PR_SET_PDEATHSIG = 1
ALIVE_SECONDS = 5.0
"""A child that works and has nothing to hand over says so this often."""


@dataclass(frozen=True)
class Payload:
    """What both processes are given. resume: go on from a state, if there is one."""

    config: RunConfig
    run_dir: Path
    resume: bool

    @property
    def guidance_url(self) -> str:
        """Two processes cannot share memory's store: the run folder holds it unless a place was given."""
        url = guidance_url(self.config)
        return str(self.run_dir / "guidance") if url == "memory" else url


@contextmanager
def child(connection: Connection, payload: Payload) -> Iterator[Channel]:
    """The body of a child process: errors become a message to the supervisor, and the channel is closed.

    A supervisor that is gone ends the child without a word and at once, also inside an update or where it hangs:
    `--resume` may be at work in the run folder already. Signals that a terminal sends to all processes are left to the
    supervisor, which tells its children what to do.
    """
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the supervisor starts its children with them blocked
    torch.set_num_threads(payload.config.run.threads or max(1, usable_cores() // 2))
    faulthandler.register(signal.SIGUSR1)  # where a hung process stands, before the supervisor ends it
    _die_with_supervisor()
    threading.Thread(target=_end_with_supervisor, name="end-with-supervisor", daemon=True).start()
    channel = Channel(connection)
    try:
        yield channel
    except (Gone, Stopped):
        pass
    except TracefpError as error:
        _tell(channel, Failed(str(error), user_error=True, exit_code=error.exit_code))
    except BaseException:
        _tell(channel, Failed(traceback.format_exc(), user_error=False, exit_code=1))
    finally:
        channel.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads of torch and of the store must not hold up the end


def _tell(channel: Channel, failed: Failed) -> None:
    try:
        channel.send(failed)
    except Gone:
        print(failed.text, file=sys.stderr)


def _die_with_supervisor() -> None:
    """On Linux the kernel sees to it, whatever state this process is in. A supervisor that is gone by now is noticed by
    ``_end_with_supervisor``."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_supervisor() -> None:
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:
        supervisor.join()
        os._exit(1)
