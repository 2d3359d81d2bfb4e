"""Kind ``python``: a function of the user, called in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks.base import Check, CheckError, one_line
from tracefp4.tasks.checks.config import CheckConfig
from tracefp4.tasks.checks.pool import Outcome, WorkerPool


class FunctionCheck(Check):
    """The number or bool that ``function(prompt=..., response=...)`` returns.

    ``prompt`` is a dict with ``id``, ``text``, ``answer`` and ``metadata``. A call that raises, takes longer than
    ``timeout``, ends its process or returns no finite number stops the run with a CheckError that names the function
    and the problem, or scores 0 and is counted, as ``on_error`` says.

    Raises:
        CheckError: the function cannot be imported.
    """

    def __init__(self, config: CheckConfig) -> None:
        super().__init__(config)
        assert config.function is not None  # the config refuses this kind without it
        self._name = config.function
        self._pool = WorkerPool("python", {"function": self._name}, config.workers, config.seconds)
        try:
            self._pool.start()
        except BaseException:
            self._pool.close()
            raise

    def score_batch(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        jobs = [
            {"prompt": {"id": p.id, "text": p.text, "answer": p.answer, "metadata": p.metadata}, "response": text}
            for p, text in zip(prompts, responses, strict=True)
        ]
        outcomes = self._pool.run(jobs, self._stop if self.config.on_error == "stop" else None)
        return [self._score(outcome) for outcome in outcomes]

    def close(self) -> None:
        self._pool.close()

    def _stop(self, job: dict[str, Any], outcome: Outcome) -> None:
        if not _is_score(outcome):
            raise CheckError(
                f"the reward function {self._name} {self._problem(outcome)} on problem {job['prompt']['id']}"
            )

    def _score(self, outcome: Outcome) -> float:
        if _is_score(outcome):
            return float(outcome.value["score"])
        self.counts["timeouts" if outcome.kind == "timeout" else "errors"] += 1
        return 0.0

    def _problem(self, outcome: Outcome) -> str:
        if outcome.kind == "timeout":
            return f"did not return within {self.config.seconds:g} s (check.timeout)"
        if outcome.kind == "died":
            return str(outcome.value)
        if outcome.kind == "value":
            return f"returned {one_line(outcome.value['bad'])}, which is no finite number,"
        error: dict[str, Any] = outcome.value
        message = f": {one_line(error['message'])}" if error["message"] else ""
        place = f" ({self._place(error['trace'])})" if error["trace"] else ""
        return f"raised {error['type']}{message}{place}"

    def _place(self, trace: list[list[Any]]) -> str:
        """The innermost line that is in the file of the function itself."""
        own = trace[0][0]
        file, line = next(frame for frame in reversed(trace) if frame[0] == own)
        return f"{Path(file).name}, line {line}"


def _is_score(outcome: Outcome) -> bool:
    return outcome.kind == "value" and "score" in outcome.value
