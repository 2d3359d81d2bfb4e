"""Samples of one prompt that share their first tokens: a temperature without the normaliser of the distribution."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tracefp4.meter.traces.sampling import Tokens


@dataclass(frozen=True)
class Shared:
    """slope: b's differences over a's. pairs of tokens. explained: share of the distance that the slope takes away."""

    slope: float
    pairs: int
    correlation: float
    explained: float


def shared_prefix_slope(tokens: Tokens, depth: int = 8) -> Shared | None:
    """Differences of b over those of a, between different tokens after one and the same context.

    Samples of one prompt share their first tokens for a while. The normaliser of the distribution then cancels in the
    difference of two log-probs, and what remains scales by 1/T exactly.
    """
    if tokens.ids is None or not (tokens.prompt != 0).any():
        return None
    contexts: dict[tuple[int, ...], dict[int, tuple[float, float]]] = defaultdict(dict)
    starts = np.searchsorted(tokens.row, np.arange(tokens.rows + 1))
    for r in range(tokens.rows):
        if tokens.prompt[r] == 0:
            continue
        context: tuple[int, ...] = (int(tokens.prompt[r]), int(tokens.step[r]))
        for t in range(starts[r], min(starts[r + 1], starts[r] + depth)):
            if tokens.position[t] != t - starts[r]:
                break
            token = int(tokens.ids[t])
            if np.isfinite(tokens.a[t]) and np.isfinite(tokens.b[t]):
                contexts[context][token] = (float(tokens.a[t]), float(tokens.b[t]))
            context = (*context, token)
    xs, ys = [], []
    for seen in contexts.values():
        for (a1, b1), (a2, b2) in list(combinations(seen.values(), 2))[:10]:
            xs.append(a1 - a2)
            ys.append(b1 - b2)
    if len(xs) < 10:
        return None
    x, y = np.array(xs), np.array(ys)
    if not x.any() or not y.any():
        return None
    # Through the origin, and both ways: the sign of a pair is arbitrary.
    slope = math.sqrt(float((y * y).sum() / (x * x).sum()))
    explained = 1 - float(np.abs(y - slope * x).sum() / max(np.abs(y - x).sum(), 1e-300))
    return Shared(slope, len(xs), float((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())), explained)
