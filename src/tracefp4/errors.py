"""The common base of every error that is the user's to fix, not a bug.

The command line prints such an error as one sentence, without a traceback, and exits with `exit_code`.
Anything else keeps its traceback.
"""

from __future__ import annotations


class TracefpError(Exception):
    """Something the user can fix: a config, a file, a record. The message is one sentence."""

    exit_code: int = 2
