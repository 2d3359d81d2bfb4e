"""The gate: may the serving form be used, by the drop that its owners allow?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tracefp4.errors import TracefpError
from tracefp4.gap.statistics import Difference, inquiries_needed, paired, planned_inquiries

Passed = NDArray[np.bool_]


class Verdict(IntEnum):
    """Its value is the exit code of the command."""

    PASS = 0
    FAIL = 1
    UNDECIDED = 2


@dataclass(frozen=True)
class Gate:
    """max_drop: the largest drop of the pass rate that is allowed, as a share. confidence: of the interval, a share.

    It passes where the whole interval of the difference lies above -max_drop and fails where all of it lies below.
    A wrong decision thus needs an interval that misses the truth: its probability is at most 1 - confidence, and
    about half of that, since the interval must miss on one certain side.
    """

    max_drop: float
    confidence: float = 0.95


@dataclass(frozen=True)
class Decision:
    """verdict, one sentence why, and, where there were not enough inquiries, how many would be needed (or None)."""

    verdict: Verdict
    reason: str
    needed: int | None = None


def decide(gate: Gate, train: Passed, serve: Passed, missing: int) -> Decision:
    """Applies the gate. train, serve: passed bool [n, k], of the inquiries with all answers of both forms.

    missing: inquiries left out because an answer or its check is missing. They are no evidence, but the forms may
    differ exactly there (a form that loops until a time limit), so the verdict must hold whichever way they went.
    """
    limit = _points(gate.max_drop)
    if not len(train):
        return Decision(Verdict.UNDECIDED, "no inquiry has answers of both forms")
    seen = paired(train, serve, gate.confidence)
    verdict = _verdict(gate, seen)
    if verdict is Verdict.UNDECIDED:
        needed = inquiries_needed(train, serve, gate.max_drop, gate.confidence)
        reason = (
            f"{len(train):,} inquiries are not enough to tell whether the drop is larger than {limit}: the truth lies "
            f"between {_change(seen.low)} and {_change(seen.high)}"
        )
        alike = planned_inquiries(gate.max_drop, gate.confidence, float((train != serve).mean()))
        if alike is not None:
            reason += f"; about {max(alike, len(train) + 1):,} would be needed if neither form is better"
        if needed is None:
            return Decision(verdict, f"{reason}, and no number would do if the drop is the one seen here")
        needed = max(needed, len(train) + 1)
        return Decision(verdict, f"{reason}, about {needed:,} if the drop is the one seen here", needed)
    if missing and _verdict(gate, _worst(gate, train, serve, missing, against=verdict)) is not verdict:
        return Decision(
            Verdict.UNDECIDED,
            f"{missing} inquiries lack an answer or its check, so many that they could turn the result; ask again for "
            "those with --resume",
        )
    if verdict is Verdict.PASS:
        return Decision(verdict, f"the drop is smaller than {limit}: at worst {_change(seen.low)}")
    return Decision(verdict, f"the drop is larger than {limit}: at best {_change(seen.high)}")


def _verdict(gate: Gate, seen: Difference) -> Verdict:
    if seen.low > -gate.max_drop:
        return Verdict.PASS
    return Verdict.FAIL if seen.high < -gate.max_drop else Verdict.UNDECIDED


def _worst(gate: Gate, train: Passed, serve: Passed, missing: int, against: Verdict) -> Difference:
    """The difference if all missing inquiries had gone against the verdict."""
    shape = (missing, train.shape[1])
    lost = against is Verdict.PASS
    return paired(
        np.concatenate([train, np.full(shape, lost)]),
        np.concatenate([serve, np.full(shape, not lost)]),
        gate.confidence,
    )


def _points(share: float) -> str:
    """'2 points' for .02."""
    return f"{100 * share:.3g} point{'' if share == 0.01 else 's'}"


def _change(difference: float) -> str:
    """'a drop of 1.3 points' for -.013, 'a gain of 1.3 points' for .013."""
    return f"a {'gain' if difference > 0 else 'drop'} of {abs(100 * difference):.1f} points"


def parse_share(option: str, text: str, low: float, high: float) -> float:
    """'2%' or '0.02' to .02, within [low, high]. Raises TracefpError, naming the option, for anything else."""
    bare = text.strip()
    percent = bare.endswith("%")
    try:
        value = float(bare.rstrip("% "))
    except ValueError:
        value = float("nan")
    share = value / 100 if percent else value
    if not low <= share <= high:
        hint = ""
        if not percent and low <= value / 100 <= high:
            hint = f"; did you mean {bare}%?"
        raise TracefpError(
            f"{option} must be a share from {100 * low:g}% to {100 * high:g}%, such as 2% or 0.02, got {text!r}{hint}"
        )
    return share
