"""Kind ``math``: math-verify says whether the answer equals the reference, in workers with a time limit of ours.

Math-verify's own limits are alarms, which work in a process's main thread only and never stop a comparison that
stays inside C code; here they are off and a worker that does not answer is killed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks.base import CheckError
from tracefp4.tasks.checks.config import CheckConfig
from tracefp4.tasks.checks.extract import extract, first_of
from tracefp4.tasks.checks.pool import WorkerPool, YesNoCheck

_MAX_ANSWER = 1000
"""Characters of an extracted answer; a longer one scores 0 unread."""
_TAIL = 4000
r"""Characters at a response's end that are searched for the last expression where nothing marks the answer."""


class MathCheck(YesNoCheck):
    r"""1.0 where the answer equals the reference, else 0.0.

    With ``extract = "auto"`` the answer is the last ``\boxed{}``, else what follows the last marker, else the
    ``<answer>`` tag, else the last expression that math-verify finds.
    """

    def __init__(self, config: CheckConfig) -> None:
        super().__init__(config)
        self._pool = WorkerPool("math", {"float_rounding": config.float_rounding}, config.workers, config.seconds)
        self._usable: set[str] = set()

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """TracefpError that names the first problem whose reference answer math-verify cannot read."""
        for refusal in self.refusals(prompts):
            if refusal:
                raise CheckError(refusal)

    def refusals(self, prompts: Sequence[Prompt]) -> list[str]:
        new = [answer for answer in dict.fromkeys(p.answer for p in prompts) if answer not in self._usable]
        outcomes = self._pool.run([{"gold": self._gold(answer), "answer": None} for answer in new])
        read = dict(zip(new, outcomes, strict=True))
        self._usable |= {answer for answer, outcome in read.items() if outcome.value is True}
        found = []
        for p in prompts:
            why = ""
            if p.answer not in self._usable:
                slow = read[p.answer].kind == "timeout"
                what = "took too long to read" if slow else "cannot be read by math-verify"
                why = f'the answer of problem {p.id}, {p.answer!r}, {what}; mend it, or use kind = "exact"'
            found.append(why)
        return found

    def score_batch(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        self.validate(prompts)
        answers = [self._answer(text) for text in responses]
        pairs = zip(prompts, answers, strict=True)
        return self.judge([None if a is None else {"gold": self._gold(p.answer), "answer": a} for p, a in pairs])

    def _gold(self, text: str) -> list[str]:
        found = first_of(text, self.config.marker)
        return _readings(text if found is None else found)

    def _answer(self, text: str) -> list[str] | None:
        where = self.config.extract
        found = first_of(text, self.config.marker) if where == "auto" else extract(text, where, self.config.marker)
        if found is None:
            return [text[-_TAIL:]] if where == "auto" else None
        return _readings(found) if 0 < len(found) <= _MAX_ANSWER else None


def _readings(answer: str) -> list[str]:
    """Texts to hand to math-verify, the first that parses counts: as LaTeX, then as it is written."""
    bare = answer.strip().strip("$").strip()
    return [f"\\boxed{{{bare}}}", f"${bare}$", answer]
