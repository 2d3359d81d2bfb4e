"""Which row of one trace belongs to which of the other, and which part of it to which."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tracefp4.meter.traces.reading import Table, TraceError

Rows = NDArray[np.int64]
ALIGNED = ("equal", "front a", "front b", "tail a", "tail b")
DIVERGED = "diverge"
SHIFTED = ("ids ahead a", "ids ahead b")


@dataclass(frozen=True)
class Pairs:
    """m pairs of rows. Of pair i, tokens start_a[i] + k of row a[i] and start_b[i] + k of row b[i] belong together, k
    in
    0..length[i] - 1. by: what paired them. unmatched: rows of either table without a partner. relation: how the token
    ids of the two rows lie to each other, None where a table has none. shift: positions by which log-probs were moved
    against one another; which side's ids they belong to is then open."""

    a: Rows
    b: Rows
    start_a: Rows
    start_b: Rows
    length: Rows
    by: str
    unmatched_a: int = 0
    unmatched_b: int = 0
    relation: NDArray[np.str_] | None = None
    shift: int = 0

    def __len__(self) -> int:
        return len(self.a)

    def shifted(self, ahead: int) -> Pairs:
        """Pairs token t + ahead of ``a`` with token t of ``b``."""
        cut = abs(ahead)
        return replace(
            self,
            start_a=self.start_a + max(ahead, 0),
            start_b=self.start_b + max(-ahead, 0),
            length=np.maximum(self.length - cut, 0),
            shift=ahead,
        )

    def trimmed(self, length: Rows) -> Pairs:
        """The first ``length[i]`` tokens of each pair, at most as many as there are."""
        return replace(self, length=np.minimum(self.length, length))


def pair_rows(a: Table, b: Table) -> Pairs:
    """By (step, id) where both files have ids that are mostly the same, else by order within a step, else by order.

    Ids that occur several times (a group's id) are paired in order. Raises TraceError where nothing pairs.
    """
    if a is b:
        rows = np.arange(a.rows)
        return _of_rows(a, b, rows, rows, "one file", 0, 0)
    steps = bool((a.step >= 0).all() and (b.step >= 0).all() and set(a.step.tolist()) & set(b.step.tolist()))
    named = None not in a.ids and None not in b.ids
    if named and set(a.ids) & set(b.ids):
        left, right = _join(_keys(a, steps, True), _keys(b, steps, True))
        if len(left) >= 0.5 * min(a.rows, b.rows):
            return _of_rows(a, b, left, right, "id", a.rows - len(left), b.rows - len(left))
    left, right = _join(_keys(a, steps, False), _keys(b, steps, False))
    if not len(left):
        raise TraceError(f"no row of {a.path} has a partner in {b.path}: their steps differ")
    by = "order within the step" if steps else "order"
    return _of_rows(a, b, left, right, by, a.rows - len(left), b.rows - len(left))


def _keys(table: Table, steps: bool, named: bool) -> list[tuple[object, ...]]:
    """(step, id, occurrence) of every row."""
    seen: Counter[tuple[object, ...]] = Counter()
    out: list[tuple[object, ...]] = []
    for row in range(table.rows):
        key = (int(table.step[row]) if steps else 0, table.ids[row] if named else None)
        out.append((*key, seen[key]))
        seen[key] += 1
    return out


def _join(left: list[tuple[object, ...]], right: list[tuple[object, ...]]) -> tuple[Rows, Rows]:
    at = {key: row for row, key in enumerate(right)}
    both = [(i, at[key]) for i, key in enumerate(left) if key in at]
    return np.array([i for i, _ in both], dtype=np.int64), np.array([j for _, j in both], dtype=np.int64)


def _of_rows(a: Table, b: Table, left: Rows, right: Rows, by: str, lone_a: int, lone_b: int) -> Pairs:
    zero = np.zeros(len(left), dtype=np.int64)
    length = np.minimum(np.diff(a.offsets)[left], np.diff(b.offsets)[right])
    return relate(a, b, Pairs(left, right, zero, zero, length, by, lone_a, lone_b))


def relate(a: Table, b: Table, pairs: Pairs) -> Pairs:
    """Compares token ids, where both have them, and lays the common part of each pair over each other."""
    if a.tokens is None or b.tokens is None:
        return pairs
    if a is b:
        return replace(pairs, relation=np.full(len(pairs), "equal"))
    starts_a, starts_b, lengths = (np.array(x) for x in (pairs.start_a, pairs.start_b, pairs.length))
    names = np.full(len(pairs), "equal", dtype="<U12")
    for i in np.flatnonzero(~_equal(a, b, pairs)).tolist():
        left, right = a.span(int(pairs.a[i])), b.span(int(pairs.b[i]))
        names[i], starts_a[i], starts_b[i], lengths[i] = relation(a.tokens[left], b.tokens[right])
    return replace(pairs, start_a=starts_a, start_b=starts_b, length=lengths, relation=names)


def _equal(a: Table, b: Table, pairs: Pairs) -> NDArray[np.bool_]:
    """bool [m]: pairs of the same tokens, part by part of all of them."""
    assert a.tokens is not None
    assert b.tokens is not None
    whole_a, whole_b = np.diff(a.offsets)[pairs.a], np.diff(b.offsets)[pairs.b]
    out = whole_a == whole_b
    zero = np.zeros(len(pairs), dtype=np.int64)
    for part in parts(np.where(out, whole_a, 0)):
        of_a, row = indices(a.offsets[pairs.a[part]], zero[part], np.where(out, whole_a, 0)[part])
        of_b, _ = indices(b.offsets[pairs.b[part]], zero[part], np.where(out, whole_a, 0)[part])
        differ = a.tokens[of_a] != b.tokens[of_b]
        out[part.start + np.unique(row[differ])] = False
    return out


def parts(lengths: Rows, tokens: int = 1 << 18) -> Iterator[slice]:
    """Slices of the pairs, in order, of about so many tokens each."""
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + tokens, side="right")))
        yield slice(start, stop)
        start = stop


def indices(offsets: Rows, starts: Rows, lengths: Rows) -> tuple[Rows, Rows]:
    """(place of every token of these rows in a column, the row's number among them), int64 [sum of lengths] each."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return (offsets + starts)[row] + within, row


def relation(ta: Rows, tb: Rows) -> tuple[str, int, int, int]:
    """(how they lie to each other, start in ta, start in tb, length of the common part).

    "front b": tb has more tokens before those of ta; "tail b": after them. "ids ahead b": tb holds the ids of ta from
    its second on. "diverge": they begin alike and go apart, as two generations from one prompt do.
    """
    n, m = len(ta), len(tb)
    short = min(n, m)
    if n == m and np.array_equal(ta, tb):
        return "equal", 0, 0, n
    if short and n != m:
        if np.array_equal(ta[:short], tb[:short]):
            return ("tail b" if m > n else "tail a"), 0, 0, short
        if np.array_equal(ta[n - short :], tb[m - short :]):
            return ("front b" if m > n else "front a"), n - short, m - short, short
    if n == m and n > 2:
        if np.array_equal(ta[1:], tb[:-1]):
            return "ids ahead b", 1, 0, n - 1
        if np.array_equal(ta[:-1], tb[1:]):
            return "ids ahead a", 0, 1, n - 1
    same = ta[:short] == tb[:short]
    prefix = short if same.all() else int(np.argmin(same))
    return (DIVERGED if prefix else "differ"), 0, 0, prefix


def pair_by_tokens(a: Table, b: Table, pairs: Pairs) -> Pairs | None:
    """Pairs the rows whose ids do not fit anew, by equal token ids; None where that leaves most of them alone."""
    assert a.tokens is not None
    assert b.tokens is not None
    assert pairs.relation is not None
    wrong = ~np.isin(pairs.relation, ALIGNED)
    waiting: dict[bytes, list[int]] = defaultdict(list)
    for row in pairs.b[wrong].tolist():
        waiting[b.tokens[b.span(row)].tobytes()].append(row)
    right, found = pairs.b.copy(), 0
    left_over = []
    for i in np.flatnonzero(wrong).tolist():
        candidates = waiting.get(a.tokens[a.span(int(pairs.a[i]))].tobytes())
        if candidates:
            right[i] = candidates.pop(0)
            found += 1
        else:
            left_over.append(i)
    if found < 0.8 * wrong.sum():
        return None
    keep = np.setdiff1d(np.arange(len(pairs)), left_over)
    again = _of_rows(a, b, pairs.a[keep], right[keep], "token ids", 0, 0)
    return replace(
        again, unmatched_a=pairs.unmatched_a + len(left_over), unmatched_b=pairs.unmatched_b + len(left_over)
    )
