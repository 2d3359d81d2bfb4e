"""Messages between the processes of an asynchronous run."""

from __future__ import annotations

import os
import pickle
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


class Gone(ConnectionError):
    """The other end of a channel is closed. No other lost connection (of a reward, a store) is one."""


class Channel:
    """One end of a duplex pipe that carries pickled messages.

    Plain pickle copies tensors. The connection's own ``send`` would pass torch's shared-memory handles, which die with
    the process that made them, and these processes are expected to be killed.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, message: Any) -> None:
        """Raises Gone where the other end is gone."""
        try:
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        except (BrokenPipeError, OSError) as error:
            raise Gone("the other end of the channel is gone") from error

    def receive(self) -> Any:
        """The next message; waits for it. Raises Gone where the other end is gone, also in mid-message."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise Gone("the other end of the channel is gone") from error

    def pending(self, timeout: float = 0.0) -> bool:
        """Whether ``receive`` would return, or raise, at once."""
        try:
            return self.connection.poll(timeout)
        except OSError as error:
            raise Gone("the other end of the channel is gone") from error

    def shut(self) -> None:
        """Ends the wait of threads in ``send`` and ``receive``, even where another process holds the other end."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()
