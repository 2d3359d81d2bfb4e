"""Kind ``regex``: the answer matches a pattern, Python's ``re``, in a worker that is killed where it backtracks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks.base import CheckError
from tracefp4.tasks.checks.config import CheckConfig
from tracefp4.tasks.checks.extract import extract
from tracefp4.tasks.checks.pool import WorkerPool, YesNoCheck


class RegexCheck(YesNoCheck):
    """1.0 where the pattern (of the config, else the problem's answer) matches, else 0.0.

    Raises:
        CheckError: the configured pattern does not compile.
    """

    def __init__(self, config: CheckConfig) -> None:
        super().__init__(config)
        if config.pattern is not None:
            _compile(config.pattern, "check.pattern")
        self._pool = WorkerPool("regex", {"match": config.match}, config.workers, config.seconds)

    def validate(self, prompts: Sequence[Prompt]) -> None:
        if self.config.pattern is None:
            for prompt in prompts:
                _compile(prompt.answer, f"the answer of problem {prompt.id}")

    def score_batch(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        self.validate(prompts)
        where = "whole" if self.config.extract == "auto" else self.config.extract
        answers = [extract(text, where, self.config.marker) for text in responses]
        patterns = [p.answer if self.config.pattern is None else self.config.pattern for p in prompts]
        pairs = zip(patterns, answers, strict=True)
        return self.judge([None if answer is None else (pattern, answer) for pattern, answer in pairs])


def _compile(pattern: str, what: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckError(f"{what}, {pattern!r}, is no regular expression: {error}") from None
