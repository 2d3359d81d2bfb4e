"""Tells a command of the user's what happens to a run: mail, a chat's webhook, a pager.

watch.command = "jq -r .message | mail -s 'run needs a look' me"

The command runs in a shell of its own, with one JSON object on standard input; the run neither waits for it nor fails
with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tracefp4.files import warn

_AT_END_SECONDS = 10.0


class Notifier:
    """Runs ``command`` once a message, each in its own process group and for at most ``seconds``.

    facts: added to every message, such as the run's folder. A command that fails or takes too long is warned about
    once. An empty command does nothing.
    """

    def __init__(self, command: str, seconds: float, facts: Mapping[str, Any]) -> None:
        self.command, self.seconds, self.facts = command, seconds, dict(facts)
        self._threads: list[threading.Thread] = []
        self._warned = False

    def send(self, kind: str, message: str, **more: Any) -> None:
        """kind: "warning", "stopped", "done" or "failed"."""
        if not self.command:
            return
        text = json.dumps({**self.facts, "kind": kind, "message": message, **more}, sort_keys=True, default=str)
        thread = threading.Thread(target=self._run, args=(text + "\n",), name="notify", daemon=True)
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def close(self) -> None:
        """Waits a moment for what is under way: the last message is the one that matters."""
        for thread in self._threads:
            thread.join(_AT_END_SECONDS)

    def _run(self, text: str) -> None:
        try:
            process = subprocess.Popen(
                self.command,
                shell=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._say(f"could not be started ({error.strerror})")
            return
        try:
            _, errors = process.communicate(text, self.seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            self._say(f"took more than {self.seconds:g} s and was ended")
            return
        if process.returncode:
            last = errors.strip().splitlines()[-1:] or ["it said nothing"]
            self._say(f"failed with exit code {process.returncode} ({last[0][:200]})")

    def _say(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warn(f"watch.command {what}; the run goes on, and later failures are not shown")


def for_run(run_dir: Path, method: str, seed: int, command: str, seconds: float) -> Notifier:
    """The notifier of one run."""
    return Notifier(command, seconds, {"run": str(run_dir.absolute()), "method": method, "seed": seed})
