"""Checks of kind ``command``: a program of the user says by its exit code whether an answer passes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from tracefp4.gap.checks import CheckSpec, CommandConfig, Mark, Marker, Question
from tracefp4.tasks.checks import CheckError
from tracefp4.tasks.checks.base import one_line
from tracefp4.tasks.checks.pool import OrderedPool

TIMED_OUT = "the check command ran out of time"


class CommandMarker(Marker):
    """0 passes, 1 fails, what takes longer than ``timeout`` is killed with all it started and fails; any other exit
    code, or a command that cannot start, stops the run: then it is the check that is broken."""

    def __init__(self, spec: CheckSpec) -> None:
        assert isinstance(spec.config, CommandConfig)
        self.config = spec.config
        self.pool = OrderedPool(0, "command")

    def mark(self, questions: Sequence[Question], responses: Sequence[str]) -> list[Mark]:
        return self.pool.map(self._one, list(zip(questions, responses, strict=True)))

    def close(self) -> None:
        self.pool.close()

    def _one(self, item: tuple[Question, str]) -> Mark:
        question, response = item
        answer = question.answers[0] if len(question.answers) == 1 else list(question.answers)
        given = {**question.fields, "id": question.id, "prompt": question.text, "answer": answer, "response": response}
        try:
            process = subprocess.Popen(
                self.config.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise CheckError(f"the check command {self.config.command[0]} cannot start: {error.strerror}") from None
        try:
            said, _ = process.communicate(json.dumps(given).encode(), timeout=self.config.timeout)
        except subprocess.TimeoutExpired:
            return Mark(False, TIMED_OUT)
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        text = one_line(said.decode(errors="replace"))
        if process.returncode not in (0, 1):
            how = f"exit code {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
            raise CheckError(
                f"the check command {self.config.command[0]} ended with {how} on inquiry {question.id}, which neither "
                f"passes (0) nor fails (1) it{': ' + text if text else ''}"
            )
        return Mark(process.returncode == 0, text)
