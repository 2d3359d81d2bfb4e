"""Figures over all paired tokens, in one pass: metrics, by step, by position, and the tokens farthest apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracefp4.meter.traces.pairing import Pairs, indices, parts
from tracefp4.meter.traces.reading import Table

OUTLIERS, CONTEXT = 25, 8
TIS_CAP = 5.0
_LARGEST = 300.0
"""Exponents above it are cut: the square of a sum of such weights is still a number."""
_STEPS = np.logspace(-4, 1, 21)
_EDGES = np.concatenate([[-np.inf], -_STEPS[::-1], _STEPS, [np.inf]])
"""Bounds of delta's histogram: four bars a decade to either side, what is below 1e-4 in the middle."""


class Sums:
    """What the metrics of ``align.metrics`` need of ``delta = a - b``: sums, so that parts can be added."""

    def __init__(self) -> None:
        self.n = self.extreme = self.clipped = 0
        self.size = self.largest = self.k1 = self.k3 = self.mult = 0.0
        self.w = self.w2 = self.t = self.t2 = self.largest_w = 0.0
        self.product = np.zeros(5)

    def add(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> None:
        """f64 [n] each, finite."""
        if not len(a):
            return
        delta = a - b
        size = np.abs(delta)
        w = np.exp(np.minimum(delta, _LARGEST))
        t = np.minimum(w, TIS_CAP)
        self.n += len(a)
        self.size += float(size.sum())
        self.largest = max(self.largest, float(size.max()))
        self.k1 -= float(delta.sum())
        self.k3 += float((w - delta - 1).sum())
        self.mult += float(np.exp(np.minimum(size, _LARGEST)).sum())
        self.extreme += int((size > math.log(2)).sum())
        self.clipped += int((w > TIS_CAP).sum())
        self.w += float(w.sum())
        self.w2 += float((w * w).sum())
        self.t += float(t.sum())
        self.t2 += float((t * t).sum())
        self.largest_w = max(self.largest_w, float(w.max()))
        self.product += [a.sum(), b.sum(), (a * a).sum(), (b * b).sum(), (a * b).sum()]

    def metrics(self) -> dict[str, float]:
        """The names of ``tracefp4.align.metrics``, and the correlation; empty where nothing was added."""
        n = self.n
        if not n:
            return {}
        k1, k3, mult, size = self.k1 / n, self.k3 / n, self.mult / n, self.size / n
        sa, sb, saa, sbb, sab = self.product / n
        spread = math.sqrt(max(0.0, saa - sa * sa) * max(0.0, sbb - sb * sb))
        return {
            "mismatch/logprob_abs_diff_mean": size,
            "mismatch/logprob_abs_diff_max": self.largest,
            "mismatch/kl_k1": k1,
            "mismatch/kl_k3": k3,
            "mismatch/mult_prob_error": mult,
            "mismatch/extreme_token_frac": self.extreme / n,
            "tis/mean": self.t / n,
            "tis/max": min(self.largest_w, TIS_CAP),
            "tis/max_untruncated": self.largest_w,
            "tis/clip_frac": self.clipped / n,
            "tis/ess": self.t**2 / (n * self.t2),
            "tis/ess_untruncated": self.w**2 / (n * self.w2),
            "logprob_correlation": (sab - sa * sb) / spread if spread else 0.0,
            "rollout_corr/kl": k1,
            "rollout_corr/k3_kl": k3,
            "train_rollout_logprob_abs_diff": size,
            "token_mult_prob_error": mult,
        }


@dataclass
class Figures:
    """All that a page shows of the pairs."""

    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    by_step: list[dict[str, float]] = field(default_factory=list)
    by_position: list[dict[str, float]] = field(default_factory=list)
    by_logprob: list[dict[str, float]] = field(default_factory=list)
    histogram: list[dict[str, float]] = field(default_factory=list)
    outliers: list[dict[str, Any]] = field(default_factory=list)
    impossible: int = 0
    undefined: list[dict[str, Any]] = field(default_factory=list)


def measure(a: Table, b: Table, pairs: Pairs, outliers: int = OUTLIERS) -> Figures:
    """One pass over all pairs. impossible: tokens that one side alone gives -inf, which no mean can hold; undefined: of
    each side with tokens that are no numbers, {"side", "count", "line", "position"}, the last two of the first."""
    total, steps = Sums(), dict[int, Sums]()
    positions, surprises = [Sums() for _ in range(64)], [Sums() for _ in range(16)]
    histogram = np.zeros(len(_EDGES) - 1, dtype=np.int64)
    worst: list[tuple[float, int, int]] = []
    impossible = 0
    undefined: dict[str, dict[str, Any]] = {}
    step_of = np.where(a.step[pairs.a] >= 0, a.step[pairs.a], b.step[pairs.b])
    for part in parts(pairs.length):
        length = pairs.length[part]
        at_a, row = indices(a.offsets[pairs.a[part]], pairs.start_a[part], length)
        at_b, _ = indices(b.offsets[pairs.b[part]], pairs.start_b[part], length)
        x, y = a.role("train")[at_a], b.role("rollout")[at_b]
        use = a.mask[at_a] & b.mask[at_b] & ~np.isnan(x) & ~np.isnan(y)
        finite = np.isfinite(x) & np.isfinite(y)
        impossible += int((use & (np.isneginf(x) != np.isneginf(y))).sum())
        position = at_a - (a.offsets[pairs.a[part]] + pairs.start_a[part])[row]
        for side, table, rows, values in (("A", a, pairs.a, x), ("B", b, pairs.b, y)):
            wrong = np.flatnonzero(use & np.isposinf(values))
            if len(wrong):
                line = int(table.line[rows[row[wrong[0]] + part.start]])
                first = {"side": side, "count": 0, "line": line, "position": int(position[wrong[0]])}
                undefined.setdefault(side, first)["count"] += len(wrong)
        use &= finite
        position = position[use]
        x, y, row = x[use], y[use], row[use] + part.start
        if not len(x):
            continue
        total.add(x, y)
        _by_bucket(positions, _bucket(position + 1), x, y)
        _by_bucket(surprises, np.clip((-x * 2).astype(np.int64), 0, 15), x, y)
        for step in np.unique(step_of[row]).tolist():
            of_step = step_of[row] == step
            steps.setdefault(step, Sums()).add(x[of_step], y[of_step])
        histogram += np.histogram(x - y, _EDGES)[0]
        size = np.abs(x - y)
        largest = np.argsort(-size, kind="stable")[:outliers]
        worst += zip(size[largest].tolist(), row[largest].tolist(), position[largest].tolist(), strict=True)
        worst = sorted(worst, reverse=True)[:outliers]
    return Figures(
        tokens=total.n,
        metrics=total.metrics(),
        by_step=[_point({"step": float(step)}, sums) for step, sums in sorted(steps.items()) if step >= 0],
        by_position=[_point({"position": float(_start(k))}, s) for k, s in enumerate(positions) if s.n],
        by_logprob=[_point({"logprob": -k / 2 - 0.25}, s) for k, s in enumerate(surprises) if s.n],
        histogram=_bars(histogram),
        outliers=[_outlier(a, b, pairs, *entry) for entry in worst],
        impossible=impossible,
        undefined=list(undefined.values()),
    )


def _bucket(position: NDArray[np.int64]) -> NDArray[np.int64]:
    """Four buckets a doubling of the 1-based position."""
    return np.minimum((4 * np.log2(position)).astype(np.int64), 63)


def _start(bucket: int) -> int:
    return math.ceil(2 ** (bucket / 4))


def _by_bucket(sums: list[Sums], bucket: NDArray[np.int64], x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    for k in np.unique(bucket).tolist():
        part = bucket == k
        sums[k].add(x[part], y[part])


def _point(at: dict[str, float], sums: Sums) -> dict[str, float]:
    n = sums.n
    return at | {"tokens": float(n), "mean": sums.size / n, "kl_k1": sums.k1 / n, "kl_k3": sums.k3 / n}


def _bars(counts: NDArray[np.int64]) -> list[dict[str, float]]:
    """From the most negative delta to the most positive: {"low", "high", "count"}; the outermost have no bound, which
    is written as 1000."""
    edges = np.clip(_EDGES, -1e3, 1e3).tolist()
    return [
        {"low": low, "high": high, "count": float(count)}
        for low, high, count in zip(edges[:-1], edges[1:], counts.tolist(), strict=True)
    ]


def _outlier(a: Table, b: Table, pairs: Pairs, size: float, i: int, position: int) -> dict[str, Any]:
    """A token with its surroundings; ids, not text: only a tokenizer knows that."""
    at = int(a.offsets[pairs.a[i]] + pairs.start_a[i]) + position
    other = int(b.offsets[pairs.b[i]] + pairs.start_b[i]) + position
    row = int(pairs.a[i])
    out: dict[str, Any] = {
        "line_a": int(a.line[row]),
        "line_b": int(b.line[pairs.b[i]]),
        "id": a.ids[row],
        "step": int(a.step[row]) if a.step[row] >= 0 else None,
        "position": position,
        "train": float(a.role("train")[at]),
        "rollout": float(b.role("rollout")[other]),
        "abs_diff": size,
    }
    if a.tokens is not None:
        span = a.span(row)
        out["token"] = int(a.tokens[at])
        out["before"] = [int(t) for t in a.tokens[max(span.start, at - CONTEXT) : at]]
        out["after"] = [int(t) for t in a.tokens[at + 1 : min(span.stop, at + 1 + CONTEXT // 2)]]
    return out
