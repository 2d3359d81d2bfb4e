"""What a meter found, and whether it is within the band."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A named cause.

    kind: stable name for scripts, e.g. "shift" or "temperature". confidence: share of resamples of the rows in which
    the same test names the same cause, in [0, 1]. evidence: one sentence a figure. values: the figures by name.
    """

    kind: str
    title: str
    confidence: float
    evidence: tuple[str, ...]
    remedy: str
    values: dict[str, float | str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"evidence": list(self.evidence)}


@dataclass(frozen=True)
class Verdict:
    """passed: nothing was found and the distance is at most ``ceiling`` (mean |log-prob difference|)."""

    passed: bool
    ceiling: float
    ceiling_from: str
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"reasons": list(self.reasons)}


def number(value: float) -> str:
    """Three digits, plainly: 0.0213, 1.44, 213000."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text and abs(value) >= 1 else text


def percent(share: float) -> str:
    """'12 %'; one decimal below 10 %."""
    return f"{100 * share:.1f} %" if 0 < share < 0.1 or 0.9995 > share > 0.99 else f"{100 * share:.0f} %"
