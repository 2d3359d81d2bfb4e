"""A child process as its supervisor sees it: its channel, how long it has shown no progress, how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from tracefp4.asynchronous.channel import Channel
from tracefp4.asynchronous.messages import Alive, Evaluated, Finished, Published

TURN_SECONDS = 1.0
MESSAGE_SECONDS = 60.0
"""How long the rest of a message that has begun may take: its sender may be stopped within it."""
STACKS_SECONDS = 2.0
"""How long a hung child is given to write where its threads stand."""


@dataclass(frozen=True)
class Patience:
    """start: seconds without a sign of progress that a child is granted until its first work is done, for it imports,
    loads weights and compiles kernels; hang: seconds from then on. 0: no limit."""

    start: float = 1800.0
    hang: float = 1200.0


class Child:
    """One child process.

    Messages go out whole and in order on a thread of its own and come in on another: no signal cuts one, and a child
    that has stopped reading, or stopped in the middle of a message, holds up nobody for ever.
    """

    def __init__(self, name: str, process: BaseProcess, channel: Channel, patience: Patience | None = None) -> None:
        self.name, self.process, self.channel = name, process, channel
        self._patience = patience or Patience()
        self._sender, self._receiver = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._silent = 0.0
        self._worked = False

    def tell(self, message: Any) -> None:
        """Sends a message. A child that is gone is noticed when its channel is read next."""
        if self.process.is_alive():
            self._sender.submit(self._send, message)

    def _send(self, message: Any) -> None:
        with suppress(ConnectionError):
            self.channel.send(message)

    def receive(self, owes: bool) -> Any:
        """The next message. owes: others wait for work of this child, so that it is no progress to be idle. Raises
        ConnectionError where the child is gone."""
        try:
            message = self._receiver.submit(self.channel.receive).result(MESSAGE_SECONDS)
        except TimeoutError:
            raise ConnectionError("the message does not end") from None
        idle = isinstance(message, Alive) and message.idle
        if not (idle and owes):
            self._silent = 0.0
        self._worked |= isinstance(message, Alive | Finished | Evaluated | Published) and not idle
        return message

    @property
    def is_gone(self) -> bool:
        """Dead and read to the end. A process that it left behind may hold its end of the channel open."""
        return not self.process.is_alive() and not self.channel.pending()

    def wait_on(self, seconds: float) -> None:
        """``seconds`` more have gone by in which others waited for this child."""
        self._silent += seconds

    def forgive(self) -> None:
        """Nobody waits for this child."""
        self._silent = 0.0

    @property
    def hangs(self) -> str | None:
        """'showed no progress for 1200 s (run.hang_seconds)' where that is beyond its limit."""
        limit = self._patience.hang if self._worked else self._patience.start
        if not limit or self._silent <= limit:
            return None
        return f"showed no progress for {limit:g} s (run.{'hang' if self._worked else 'start'}_seconds)"

    def kill(self, stacks: bool = False) -> None:
        """stacks: standard error says first where its threads stand, as far as it still can."""
        if stacks and self.process.pid is not None and self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(STACKS_SECONDS)
        self.process.kill()

    def end(self, seconds: float | None, hear: Callable[[Any], None] = lambda message: None) -> str | None:
        """Waits for the process for so many seconds, with None as long as it shows progress, then ends it.

        hear: is given the messages that still come. Returns why it had to be ended while it worked, else None.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        open_channels: list[Any] = [self.channel.connection]
        while self.process.is_alive() and not self.hangs and (deadline is None or time.monotonic() < deadline):
            left = TURN_SECONDS if deadline is None else min(TURN_SECONDS, max(0.0, deadline - time.monotonic()))
            if self.channel.connection in wait([self.process.sentinel, *open_channels], timeout=left):
                try:
                    hear(self.receive(owes=True))
                except ConnectionError:
                    open_channels.clear()  # its end of the pipe; the process itself is about to follow
            else:
                self.wait_on(left)
        why = self.hangs if deadline is None and self.process.is_alive() else None
        if self.process.is_alive():
            self.kill(stacks=why is not None)
        self.process.join()
        self.channel.shut()  # a message that it was killed in may never end
        self._sender.shutdown()
        self._receiver.shutdown()
        self.channel.close()
        return why
