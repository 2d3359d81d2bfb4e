"""What all checks share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, Self

from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks.config import CheckConfig


class CheckError(TracefpError):
    """A check that cannot start or cannot judge: a broken reward function, a reference answer without meaning."""


class Check(ABC):
    """Scores responses; close it, or use it in a ``with`` block, to end its workers.

    ``counts`` holds, since the check was made, what its responses ran into, under the names in ``COUNTS``:
        timeouts: checks or program runs stopped at ``timeout`` and scored 0.
        errors: checks that broke and were scored 0; programs that raised or died.
        limits: program runs stopped at their memory or output limit.
    """

    COUNTS: ClassVar[tuple[str, ...]] = ("timeouts", "errors")

    def __init__(self, config: CheckConfig) -> None:
        self.config = config
        self.counts: Counter[str] = Counter(dict.fromkeys(self.COUNTS, 0))
        self._reported: Counter[str] = Counter()

    @abstractmethod
    def score_batch(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """One reward a response, in order, 1.0 for a right one. What a policy wrote never makes it raise.

        Raises:
            TracefpError: the check itself is broken: see each kind.
        """

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """TracefpError that names the first problem whose reference answer this check cannot use."""
        return

    def refusals(self, prompts: Sequence[Prompt]) -> list[str]:
        """Of each problem why ``validate`` would refuse it, "" where it would not."""
        found = []
        for prompt in prompts:
            try:
                self.validate([prompt])
            except CheckError as error:
                found.append(str(error))
            else:
                found.append("")
        return found

    def metrics(self) -> dict[str, float]:
        """The counts since the last call, under the names of a step's metrics: ``check/timeouts`` and so on."""
        since = {f"check/{name}": float(self.counts[name] - self._reported[name]) for name in self.COUNTS}
        self._reported = self.counts.copy()
        return since

    def close(self) -> None:
        """Ends what the check started; a closed check scores no more."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_line(text: str, limit: int = 300) -> str:
    """``text`` as a part of one sentence: no line breaks, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "..."
