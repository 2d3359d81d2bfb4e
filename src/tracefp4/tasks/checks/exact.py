"""Kind ``exact``: the answer's text, normalized, is the reference's text."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks.base import Check, CheckError
from tracefp4.tasks.checks.extract import extract


class ExactCheck(Check):
    """1.0 where extracted answer and reference are the same text after normalization, else 0.0."""

    def score_batch(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        return [self._score(prompt, text) for prompt, text in zip(prompts, responses, strict=True)]

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if not self.normalized(prompt.answer):
                raise CheckError(
                    f"the answer of problem {prompt.id}, {prompt.answer!r}, is empty after normalization, and an "
                    "empty response would score 1"
                )

    def _score(self, prompt: Prompt, text: str) -> float:
        where = self.config.extract
        if where == "auto":
            where = "marker" if self.config.marker in text else "last_line"
        answer = extract(text, where, self.config.marker)
        return float(answer is not None and self.normalized(answer) == self.normalized(prompt.answer))

    def normalized(self, text: str) -> str:
        """``text`` in Unicode NFC, without what the config says does not count."""
        text = unicodedata.normalize("NFC", text)
        if self.config.strip_punctuation:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        if self.config.casefold:
            text = text.casefold()
        return " ".join(text.split())
