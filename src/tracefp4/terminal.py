"""What a command says to a terminal or a log: lines that neither fail nor smuggle control characters."""

from __future__ import annotations

import errno
import sys
from contextlib import suppress
from typing import TextIO

_LONGEST_ERROR = 2000
_REFUSALS = frozenset(
    getattr(errno, name) for name in ("ENAMETOOLONG", "ELOOP", "ENOSPC", "EROFS", "EDQUOT", "EACCES", "EPERM", "EIO")
)


def print_error(message: str) -> None:
    """One line that a terminal shows as it is, whatever line breaks and control characters the message holds."""
    line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(message.split()))
    say("error: " + (line if len(line) <= _LONGEST_ERROR else line[:_LONGEST_ERROR] + " ..."), sys.stderr)


def system_refusal(error: Exception) -> str | None:
    """A sentence where the operating system refuses a path or an output that the user chose; None for a bug."""
    if not isinstance(error, OSError) or error.errno not in _REFUSALS:
        return None
    if error.filename is None:  # writing to what is open already
        return f"the output cannot be written ({error.strerror})"
    return f"{error.filename} cannot be used ({error.strerror}): choose another path"


def say(line: str, file: TextIO | None = None) -> None:
    """A log on a full disk, or of another encoding, changes neither what a command does nor its exit code."""
    with suppress(OSError):
        try:
            print(line, file=file, flush=True)
        except UnicodeEncodeError:
            print(line.encode("ascii", "backslashreplace").decode(), file=file, flush=True)
