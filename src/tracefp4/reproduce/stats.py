"""Means, standard errors and intervals over seeds; when a curve rises and when it collapses.

Legend: S seeds, P problems, n samples of each; rewards f64 [P, n].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracefp4.align.passrate import paired_difference

Floats = NDArray[np.float64]

# Student's t, two-sided 95 %, by degrees of freedom; beyond, the normal's 1.960 is within 5 %.
_T_TO_15 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T_TO_30 = (2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
_T95 = (*_T_TO_15, *_T_TO_30)

HOLD = 0.8
"""A control is stable that stays at this reward or above once it has risen to it."""
COLLAPSED = 0.5
"""A run has collapsed whose smoothed reward falls below this share of its best so far."""
SMOOTH_STEPS = 20
SPAN = 50
"""Steps in a row whose distance is looked at by itself: a mean over a run hides where it rose for a while."""


def t95(degrees: int) -> float:
    """Half-width of a 95 % interval in standard errors. Raises ValueError below one degree of freedom."""
    if degrees < 1:
        raise ValueError(f"an interval needs at least two values, got {degrees + 1}")
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.960


def mean_and_error(values: Sequence[float]) -> dict[str, Any]:
    """{"mean", "se", "per_seed"}: the standard error over seeds, None for one seed."""
    array = np.array(values, dtype=np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return {"mean": float(array.mean()), "se": error, "per_seed": [float(v) for v in array]}


def score(per_seed: Sequence[Floats]) -> dict[str, Any]:
    """Mean reward of a policy over problems and samples, then over seeds; rewards f64 [P, n] of each seed.

    The standard error is that over seeds, whose spread holds the sampling of responses; of one seed that over problems.
    "se_problems": the latter for every seed.
    """
    means = [rewards.mean(1) for rewards in per_seed]
    problems = [float(m.std(ddof=1) / math.sqrt(len(m))) if len(m) > 1 else None for m in means]
    found = mean_and_error([float(m.mean()) for m in means])
    if found["se"] is None:
        found["se"] = problems[0]
    return found | {"se_problems": problems, "problems": len(means[0])}


def difference(ours: Sequence[Floats], theirs: Sequence[Floats]) -> dict[str, Any]:
    """Mean of ours - theirs, paired by seed and problem; rewards f64 [P, n] of each seed, in the same order.

    {"value", "low", "high", "kind"}: with several seeds Student's t over their differences, which holds for other seeds
    of these problems; with one a bootstrap over problems, which holds for other problems of this seed.
    """
    if len(ours) == 1:
        found = paired_difference(ours[0], theirs[0])
        return found.as_dict() | {"kind": "problems"}
    each = np.array([float((a.mean(1) - b.mean(1)).mean()) for a, b in zip(ours, theirs, strict=True)])
    half = t95(len(each) - 1) * float(each.std(ddof=1)) / math.sqrt(len(each))
    mean = float(each.mean())
    return {"value": mean, "low": mean - half, "high": mean + half, "kind": "seeds", "per_seed": each.tolist()}


def ratio(ours: Mapping[int, Floats], theirs: Mapping[int, Floats]) -> dict[str, float] | None:
    """Ours over theirs, values f64 [steps] by seed, over the seeds and, of each, the steps that both have.

    {"mean": of the means over steps and seeds; "worst": the largest of any seed's SPAN steps in a row, of shorter runs
    all}. None where they have none in common, or a value is not finite.
    """
    pairs = []
    for seed in ours.keys() & theirs.keys():
        n = min(len(ours[seed]), len(theirs[seed]))
        pairs += [(ours[seed][:n], theirs[seed][:n])] if n else []
    if not pairs or not all(np.isfinite(a).all() and np.isfinite(b).all() and b.all() for a, b in pairs):
        return None
    mean = sum(float(a.mean()) for a, _ in pairs) / sum(float(b.mean()) for _, b in pairs)
    worst = max(float((_in_a_row(a) / _in_a_row(b)).max()) for a, b in pairs)
    return {"mean": mean, "worst": worst}


def _in_a_row(values: Floats) -> Floats:
    """Sums of every SPAN steps in a row, of fewer steps of all."""
    return np.convolve(values, np.ones(min(SPAN, len(values))), mode="valid")


def smoothed(values: Floats, width: int = SMOOTH_STEPS) -> Floats:
    """Mean over the ``width`` steps that end at each; at the start over those that there are. NaN is left out."""
    known = np.isfinite(values)
    totals = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    end = np.arange(1, len(values) + 1)
    first = np.maximum(end - width, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Floats = (totals[end] - totals[first]) / (counts[end] - counts[first])
    return means


def width_for(steps: int) -> int:
    """Steps that a reward is smoothed over: 20, of shorter runs a tenth."""
    return max(1, min(SMOOTH_STEPS, steps // 10))


def collapse_step(rewards: Floats) -> int | None:
    """The first step whose smoothed reward lies below half of the best before it; None where there is none.

    What counts as the best is at least a tenth: noise around zero is no collapse.
    """
    curve = smoothed(rewards, width_for(len(rewards)))
    best = np.maximum.accumulate(np.nan_to_num(curve, nan=0.0))
    fallen = np.flatnonzero((curve < COLLAPSED * best) & (best >= 0.1))
    return int(fallen[0]) if len(fallen) else None


@dataclass(frozen=True)
class Stability:
    """Of a control's run. rise: the step from which its smoothed reward has been at HOLD, None for never; fall: the
    first one after it below, None for none; low: the smallest value after the rise."""

    rise: int | None
    fall: int | None
    low: float | None

    @property
    def stable(self) -> bool:
        return self.rise is not None and self.fall is None


def stability(rewards: Floats) -> Stability:
    """Whether a control's reward stays at 0.8 or above once it has risen to it."""
    curve = smoothed(rewards, width_for(len(rewards)))
    risen = np.flatnonzero(curve >= HOLD)
    if not len(risen):
        return Stability(None, None, None)
    rise = int(risen[0])
    below = np.flatnonzero(curve[rise:] < HOLD)
    return Stability(rise, rise + int(below[0]) if len(below) else None, float(np.nanmin(curve[rise:])))
