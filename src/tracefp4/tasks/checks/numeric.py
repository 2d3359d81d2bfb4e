"""Kind ``numeric``: the answer is a number within a tolerance of the reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks.base import Check, CheckError
from tracefp4.tasks.checks.config import CheckConfig
from tracefp4.tasks.checks.extract import extract, first_of

# At most this many digits and this exponent: an exact fraction of "1e999999999" would fill the memory.
_MAX_DIGITS, _MAX_EXPONENT = 400, 400

# Bounded repetition: no response may make the search quadratic.
_PLAIN = r"(?:\d{1,3}(?:,\d{3}){1,130}(?![\d,])|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
_NUMBER = re.compile(
    rf"""(?<![\w.])                       # not the tail of a word or of another number
    (?P<sign>[-+\u2212]?)\s?(?P<currency>[$€£¥]|\\\$)?\s?(?P<inner>[-+\u2212]?)
    (?:\\[dt]?frac\{{(?P<top>{_PLAIN})\}}\{{(?P<bottom>{_PLAIN})\}}
      |(?P<number>{_PLAIN})(?:[eE](?P<exponent>[-+]?\d{{1,400}})|\s?/\s?(?P<over>{_PLAIN}))?)
    (?P<percent>\s?\\?%)?(?!\d)""",
    re.VERBOSE,
)
_SIGNS = {"": 1, "+": 1, "-": -1, "\u2212": -1}


def last_number(text: str, percent: bool = False) -> Fraction | None:
    """The last number in ``text``, exactly: ``$1,234.50``, ``-3``, ``1e3``, ``3/4``, ``\\frac{3}{4}``, ``12%``.

    None where there is none, or where the last one is a fraction over zero or has over 400 digits. NaN and infinity
    are words here. ``percent`` divides what carries a percent sign by 100.
    """
    last = None
    for found in _NUMBER.finditer(text):
        last = found
    return None if last is None else _value(last, percent)


def _value(found: re.Match[str], percent: bool) -> Fraction | None:
    exponent = int(found["exponent"]) if found["exponent"] else 0
    if len(found[0]) > _MAX_DIGITS or abs(exponent) > _MAX_EXPONENT:
        return None
    top, bottom = (found["top"], found["bottom"]) if found["top"] else (found["number"], found["over"] or "1")
    divisor = Fraction(bottom.replace(",", ""))
    if divisor == 0:
        return None
    value = Fraction(top.replace(",", "")) / divisor * Fraction(10) ** exponent
    value *= _SIGNS[found["sign"]] * _SIGNS[found["inner"]]
    return value / 100 if percent and found["percent"] else value


class NumericCheck(Check):
    """1.0 where the answer lies within ``max(rel_tol * |reference|, abs_tol)`` of the reference, else 0.0."""

    def __init__(self, config: CheckConfig) -> None:
        super().__init__(config)
        self._rel_tol, self._abs_tol = Fraction(self.config.rel_tol), Fraction(self.config.abs_tol)

    def score_batch(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        references = [self._reference(prompt) for prompt in prompts]
        return [self._score(*pair) for pair in zip(references, responses, strict=True)]

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self._reference(prompt)

    def _reference(self, prompt: Prompt) -> Fraction:
        text = prompt.answer
        found = first_of(text, self.config.marker)
        value = last_number(text if found is None else found, self.config.percent)
        if value is None:
            raise CheckError(
                f'the answer of problem {prompt.id}, {text!r}, holds no number; kind = "numeric" needs one'
            )
        return value

    def _score(self, reference: Fraction, text: str) -> float:
        where = self.config.extract
        found = first_of(text, self.config.marker) if where == "auto" else extract(text, where, self.config.marker)
        if found is None and where == "auto":
            found = text
        value = None if found is None else last_number(found, self.config.percent)
        if value is None:
            return 0.0
        return float(abs(value - reference) <= max(self._rel_tol * abs(reference), self._abs_tol))
