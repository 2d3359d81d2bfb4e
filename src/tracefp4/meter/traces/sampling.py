"""A bounded sample of paired tokens, on which faults are recognised, and resamples of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracefp4.meter.traces.pairing import Pairs
from tracefp4.meter.traces.reading import Table

MAX_ROWS, MAX_TOKENS = 2000, 100_000
RESAMPLES = 40

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tokens:
    """Paired log-probs, token by token, of r rows.

    a (trainer), b (rollout): f64 [n], -inf among them, no NaN. row: int64 [n], 0..r - 1, ascending. position: int64
    [n],
    in the response. ids: int64 [n] or None. pair: int64 [r], the pair each row is of. step: int64 [r], -1 unknown; lag,
    temperature: f64 [r], NaN unknown; prompt: int64 [r], 0 unknown.
    """

    a: Floats
    b: Floats
    row: NDArray[np.int64]
    position: NDArray[np.int64]
    ids: NDArray[np.int64] | None
    pair: NDArray[np.int64]
    step: NDArray[np.int64]
    lag: Floats
    prompt: NDArray[np.int64]
    temperature: Floats

    @property
    def rows(self) -> int:
        return len(self.pair)

    @property
    def finite(self) -> NDArray[np.bool_]:
        return np.isfinite(self.a) & np.isfinite(self.b)

    def take(self, rows: NDArray[np.int64]) -> Tokens:
        """The same of these rows; a row may come several times."""
        starts = np.searchsorted(self.row, np.arange(self.rows + 1))
        counts = (starts[1:] - starts[:-1])[rows]
        index = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows]) if len(rows) else rows
        return Tokens(
            self.a[index],
            self.b[index],
            np.repeat(np.arange(len(rows)), counts),
            self.position[index],
            None if self.ids is None else self.ids[index],
            self.pair[rows],
            self.step[rows],
            self.lag[rows],
            self.prompt[rows],
            self.temperature[rows],
        )


def counted(a: Table, b: Table, pairs: Pairs, i: int) -> tuple[slice, slice, NDArray[np.bool_]]:
    """(tokens of pair i in ``a``, in ``b``, bool: those that both masks count and neither leaves empty)."""
    at_a = int(a.offsets[pairs.a[i]] + pairs.start_a[i])
    at_b = int(b.offsets[pairs.b[i]] + pairs.start_b[i])
    n = int(pairs.length[i])
    left, right = slice(at_a, at_a + n), slice(at_b, at_b + n)
    x, y = a.role("train")[left], b.role("rollout")[right]
    return left, right, a.mask[left] & b.mask[right] & ~np.isnan(x) & ~np.isnan(y)


def draw(a: Table, b: Table, pairs: Pairs, seed: int = 0) -> Tokens:
    """Up to MAX_ROWS pairs, drawn evenly, and of them up to MAX_TOKENS tokens."""
    order = np.random.default_rng(seed).permutation(len(pairs))[:MAX_ROWS]
    chosen, total = [], 0
    for i in order.tolist():
        chosen.append(i)
        total += int(pairs.length[i])
        if total >= MAX_TOKENS:
            break
    parts: dict[str, list[NDArray[np.generic]]] = {"a": [], "b": [], "row": [], "position": [], "ids": []}
    kept: list[int] = []
    for i in sorted(chosen):
        left, right, use = counted(a, b, pairs, i)
        if not use.any():
            continue
        parts["a"].append(a.role("train")[left][use])
        parts["b"].append(b.role("rollout")[right][use])
        parts["row"].append(np.full(int(use.sum()), len(kept)))
        parts["position"].append(np.flatnonzero(use))
        if a.tokens is not None:
            parts["ids"].append(a.tokens[left][use])
        kept.append(i)
    pair = np.array(kept, dtype=np.int64)
    rows = pairs.a[pair] if len(pair) else pair
    other = pairs.b[pair] if len(pair) else pair

    def joined(name: str) -> NDArray[np.generic]:
        return np.concatenate(parts[name]) if parts[name] else np.empty(0)

    def known(name: str) -> Floats:
        mine, theirs = getattr(a, name)[rows], getattr(b, name)[other]
        return np.where(np.isnan(theirs), mine, theirs)

    return Tokens(
        joined("a").astype(np.float64),
        joined("b").astype(np.float64),
        joined("row").astype(np.int64),
        joined("position").astype(np.int64),
        None if a.tokens is None or pairs.shift else joined("ids").astype(np.int64),
        pair,
        np.where(a.step[rows] >= 0, a.step[rows], b.step[other]),
        known("lag"),
        np.where(a.prompt[rows] != 0, a.prompt[rows], b.prompt[other]),
        known("temperature"),
    )


def confidence(tokens: Tokens, holds: Callable[[Tokens], bool], seed: int = 0) -> float:
    """Share of RESAMPLES resamples of the rows, with replacement, in which a test holds."""
    rng = np.random.default_rng(seed)
    return float(np.mean([holds(tokens.take(rng.integers(0, tokens.rows, tokens.rows))) for _ in range(RESAMPLES)]))
