"""Pass rates with their uncertainty: avg@k, unbiased pass@k, intervals, and paired differences.

Legend: P problems, n samples of each, rewards f64 [P, n].
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
"""Bootstrap resamples: the interval's ends are then off by about 1 % of its width."""
DRAWS_AT_ONCE = 1 << 22
"""Problems drawn at a time: 64 MiB of numbers and figures, however many problems there are."""

Rewards = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure with its confidence interval [low, high]."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate, from n samples of which ``correct`` passed, that at least one of k passes.

    1 - C(n - correct, k) / C(n, k), Chen et al. 2021 (arXiv 2107.03374), equation 1. Raises ValueError unless
    1 <= k <= n and 0 <= correct <= n.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got n={n}, correct={correct}, k={k}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def wilson(passed: int, total: int, confidence: float = 0.95) -> Estimate:
    """Wilson's score interval of a proportion (Wilson 1927): right at 0 and at 1 too. Raises ValueError for total 0."""
    if total < 1 or not 0 <= passed <= total:
        raise ValueError(f"a proportion needs 0 <= passed <= total and total >= 1, got {passed} of {total}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p, z2 = passed / total, z * z / total
    centre = (p + z2 / 2) / (1 + z2)
    half = z * sqrt(p * (1 - p) / total + z2 / (4 * total)) / (1 + z2)
    # At 0 and 1 the ends meet the value exactly; arithmetic would miss it by an ulp.
    return Estimate(p, 0.0 if passed == 0 else centre - half, 1.0 if passed == total else centre + half)


def cluster_mean(per_problem: Rewards, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Mean over problems with a percentile bootstrap over problems: samples of one problem are no independent draws.

    per_problem f64 [P]. Raises ValueError where there is none.
    """
    if per_problem.ndim != 1 or not len(per_problem):
        raise ValueError(f"expected figures of at least one problem, got shape {per_problem.shape}")
    rng = np.random.default_rng(seed)
    P = len(per_problem)
    some = max(1, DRAWS_AT_ONCE // P)
    means = [per_problem[rng.integers(0, P, (min(some, RESAMPLES - i), P))].mean(1) for i in range(0, RESAMPLES, some)]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(per_problem.mean()), float(low), float(high))


@dataclass(frozen=True)
class PassRates:
    """avg: mean reward over problems and samples (avg@n). at_k: unbiased pass@k by k; a pass: a reward of 1 or more."""

    problems: int
    samples: int
    avg: Estimate
    at_k: dict[int, Estimate]


def pass_rates(rewards: Rewards, ks: tuple[int, ...] = (1,), confidence: float = 0.95) -> PassRates:
    """Figures of one form. rewards f64 [P, n]; ks up to n.

    Intervals: Wilson's where n is 1 and rewards are 0 or 1, else a bootstrap over problems.
    Raises ValueError for an empty array, a reward that is not finite, or a k beyond n.
    """
    if rewards.ndim != 2 or not rewards.size or not np.isfinite(rewards).all():
        raise ValueError(f"expected finite rewards [problems, samples], got shape {rewards.shape}")
    problems, n = rewards.shape
    passed = (rewards >= 1.0).sum(1)
    binary = bool(np.isin(rewards, (0.0, 1.0)).all())

    def of(values: Rewards) -> Estimate:
        if n == 1 and binary:
            return wilson(int(passed.sum()), problems, confidence)
        return cluster_mean(values, confidence)

    at_k = {k: of(np.array([pass_at_k(n, int(c), k) for c in passed])) for k in ks}
    return PassRates(problems, n, of(rewards.mean(1)), at_k)


def paired_difference(ours: Rewards, theirs: Rewards, confidence: float = 0.95) -> Estimate:
    """Mean reward of ``ours`` minus that of ``theirs`` on the same problems, f64 [P, n] each (n may differ)."""
    if len(ours) != len(theirs):
        raise ValueError(f"a paired difference needs the same problems, got {len(ours)} and {len(theirs)}")
    return cluster_mean(ours.mean(1) - theirs.mean(1), confidence)
