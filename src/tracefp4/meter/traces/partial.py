"""Faults of a part of the data: some rows, some positions, some token ids, while the rest is as it should be.

Each test finds the part by its distance alone and says what else its members have in common. A part is reported where
its own mean |delta| exceeds the ceiling and is several times that of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracefp4.meter.findings import Finding, number, percent
from tracefp4.meter.traces.figures import CONTEXT
from tracefp4.meter.traces.pairing import Pairs
from tracefp4.meter.traces.patterns import MIN_TOKENS, VALUE_PATTERNS
from tracefp4.meter.traces.reading import Table
from tracefp4.meter.traces.sampling import RESAMPLES, Floats, Tokens, confidence
from tracefp4.meter.traces.structure import MAX_SHIFT, best_shift, shift_errors
from tracefp4.meter.traces.which import which_rows

RATIO = 3.0
"""Least mean |delta| of a part over that of the rest."""
GAP = 4.0
"""Least distance of the two groups of rows, of log mean |delta|, in their standard deviations: the best split of one
normal group is at 2.7, of a uniform one at 3.5."""
EMPTY = 0.25
"""Least share of that distance without a single row: a long tail has rows all along."""
MOST = 0.7
"""Least share of the rows in which a position's jump shows."""
STEP = 2.5
"""Least ratio just behind a position to just before it: a distance that grows slowly has no such position."""
LEAST_ROWS, LEAST_ROW_TOKENS = 3, 4
_EQUAL = 1e-4
"""Rows nearer than this are alike."""

Flags = NDArray[np.bool_]


def partial(tokens: Tokens, a: Table, pairs: Pairs, ceiling: float) -> Finding | None:
    """The part at fault, if it is only a part. ceiling: mean |delta| that is in order."""
    if tokens.rows < 2 * LEAST_ROWS or not tokens.finite.any():
        return None
    for look in (_positions, _rows, _ids):
        found = look(tokens, a, pairs, ceiling)
        if found is not None:
            return found
    return None


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """inside: mean |delta| of the part; outside: of the rest."""

    flags: Flags
    inside: float
    outside: float


def split_rows(size: Floats, counts: Floats, ceiling: float) -> Split | None:
    """Rows in two groups by their mean |delta|, where they are two; size, counts f64 [r], size NaN where unknown."""
    known = np.flatnonzero(~np.isnan(size) & (counts >= LEAST_ROW_TOKENS))
    if len(known) < 2 * LEAST_ROWS:
        return None
    order = known[np.argsort(size[known], kind="stable")]
    x = np.log(np.maximum(size[order], _EQUAL))
    n = len(x)
    low = np.arange(LEAST_ROWS, n - LEAST_ROWS + 1)  # rows below the split
    sums = np.concatenate([[0.0], np.cumsum(x)])
    means = sums[low] / low, (sums[n] - sums[low]) / (n - low)
    k = int(np.argmax(low * (n - low) * (means[1] - means[0]) ** 2))
    # That is two groups of one width; between their means the widest gap tells better who belongs where.
    start, stop = (int(np.searchsorted(x, means[group][k])) for group in (0, 1))
    if stop <= start:
        return None
    cut = max(start, 1) + int(np.argmax(np.diff(x[max(start, 1) - 1 : stop + 1])))
    if not LEAST_ROWS <= cut <= n - LEAST_ROWS:
        return None
    within = np.concatenate([x[:cut] - x[:cut].mean(), x[cut:] - x[cut:].mean()])
    apart = x[cut:].mean() - x[:cut].mean()
    if apart < GAP * max(0.05, float(within.std())) or x[cut] - x[cut - 1] < EMPTY * apart:
        return None
    flags = np.zeros(len(size), dtype=bool)
    flags[order[cut:]] = True
    rest = np.zeros(len(size), dtype=bool)
    rest[order[:cut]] = True
    inside, outside = (float(np.average(size[group], weights=counts[group])) for group in (flags, rest))
    return Split(flags, inside, outside) if inside > max(ceiling, RATIO * outside) else None


def row_sizes(tokens: Tokens) -> tuple[Floats, Floats]:
    """f64 [r] each: mean |delta| of each row without its largest tenth (one token at least), since a single token is no
    matter of its row, NaN where nothing is left; and the row's finite tokens."""
    ok = tokens.finite
    row, size = tokens.row[ok], np.abs(tokens.a[ok] - tokens.b[ok])
    order = np.lexsort((size, row))
    row, size = row[order], size[order]
    counts = np.bincount(row, minlength=tokens.rows)
    rank = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = rank < (counts - np.maximum(1, counts // 10))[row]
    left = np.bincount(row[kept], minlength=tokens.rows)
    sums = np.bincount(row[kept], weights=size[kept], minlength=tokens.rows)
    return np.where(left > 0, sums / np.maximum(left, 1), np.nan), counts.astype(np.float64)


def _rows(tokens: Tokens, a: Table, pairs: Pairs, ceiling: float) -> Finding | None:
    size, counts = row_sizes(tokens)
    split = split_rows(size, counts, ceiling)
    if split is None:
        return None
    rng = np.random.default_rng(0)
    draws = (rng.integers(0, tokens.rows, tokens.rows) for _ in range(RESAMPLES))
    sure = float(np.mean([split_rows(size[i], counts[i], ceiling) is not None for i in draws]))
    rest = tokens.take(np.flatnonzero(~split.flags))
    part = tokens.take(np.flatnonzero(split.flags))
    cause = _cause(part, ceiling)
    if sure < 0.5 or (cause is not None and cause.of_all(rest)):
        return None
    share = float(split.flags.mean())
    facts = which_rows(tokens, split.flags, a, pairs)
    title = f"{percent(share)} of the rows are apart, the others are not"
    evidence = [
        f"mean |delta|, without a row's largest tenth, is {number(split.inside)} in {int(split.flags.sum())} of "
        f"{tokens.rows} rows and {number(split.outside)} in the others, with hardly a row between"
    ]
    evidence += [fact.sentence for fact in facts] or [
        "they have nothing in common that the files show: neither length, nor place, step, prompt or a token"
    ]
    remedy = facts[0].remedy if facts else "compare how these rows were made with how the others were"
    if cause is not None:
        title += f"; in them {cause.title}"
        evidence += [f"in these rows: {sentence}" for sentence in cause.evidence]
        remedy += f"; in these rows: {cause.remedy}"
    values: dict[str, float | str] = {
        "share": share,
        "inside": split.inside,
        "outside": split.outside,
        "which": ", ".join(fact.name for fact in facts),
        "cause": "" if cause is None else cause.kind,
    }
    return Finding("some_rows", title, sure, tuple(evidence), remedy, values)


@dataclass(frozen=True)
class Cause:
    """What a part looks like by itself. of_all: whether the rest looks so too, and the part is no part."""

    kind: str
    title: str
    evidence: tuple[str, ...]
    remedy: str
    of_all: Callable[[Tokens], bool]


def _cause(part: Tokens, ceiling: float) -> Cause | None:
    errors = shift_errors(part)
    shift = best_shift(errors)
    if shift:
        means = np.nanmean(errors, axis=0)
        way = "early" if shift > 0 else "late"
        return Cause(
            "shift",
            f"log-probs of B stand {abs(shift)} position{'s' * (abs(shift) > 1)} too {way}",
            (f"shifted, mean |delta| is {number(float(means[shift + MAX_SHIFT]))}",),
            "gather log-probs from logits[:-1] with tokens[1:] on both sides",
            lambda rest: best_shift(shift_errors(rest)) == shift,
        )
    for pattern in VALUE_PATTERNS:
        found = pattern.find(part)
        if found is not None:

            def of_all(rest: Tokens, test: Callable[[Tokens], object] = pattern.test) -> bool:
                return test(rest) is not None

            return Cause(found.kind, found.title, found.evidence, found.remedy, of_all)
    at = _step_position(part, ceiling)
    if at is not None:
        words = _position_words(part, at)
        return Cause("positions", words[0], words[1], words[2], lambda rest: _step_position(rest, ceiling) is not None)
    return None


# -- positions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class At:
    """position: the first one behind the step, from 0. late: what is behind it is apart, else what is before."""

    position: int
    late: bool
    inside: float
    outside: float


def _step_position(tokens: Tokens, ceiling: float, near: int | None = None) -> At | None:
    """The position at which |delta| jumps, within rows that have tokens on both sides of it. near: look there only."""
    ok = tokens.finite
    position, row = tokens.position[ok], tokens.row[ok]
    size = np.abs(tokens.a[ok] - tokens.b[ok])
    if len(size) < 2 * MIN_TOKENS:
        return None
    last = np.zeros(tokens.rows, dtype=np.int64)
    np.maximum.at(last, row, position)
    counts = np.bincount(position).astype(np.float64)
    sums = np.bincount(position, weights=size)
    n, total = np.cumsum(counts), np.cumsum(sums)  # through position p
    places = np.arange(1, len(counts))
    enough = (n[places - 1] >= MIN_TOKENS) & (n[-1] - n[places - 1] >= MIN_TOKENS)
    if near is not None:
        enough &= np.abs(places - near) <= max(1, near // 5)
    places = places[enough]
    if not len(places):
        return None
    before = total[places - 1] / n[places - 1]
    behind = (total[-1] - total[places - 1]) / (n[-1] - n[places - 1])
    p = int(places[np.argmax(n[places - 1] * (n[-1] - n[places - 1]) * (before - behind) ** 2)])
    # Long rows may be others than short ones: only rows that pass the position are asked.
    passing = last[row] >= p
    below, above = size[passing & (position < p)], size[passing & (position >= p)]
    reach = max(1, p // 2)
    edge = (
        size[passing & (position < p) & (position >= p - reach)],
        size[passing & (position >= p) & (position < p + reach)],
    )
    if min(len(below), len(above), *map(len, edge)) < MIN_TOKENS // 2:
        return None
    late = float(above.mean()) > float(below.mean())
    inside, outside = (float(x.mean()) for x in ((above, below) if late else (below, above)))
    jump = [float(x.mean()) for x in (edge if late else edge[::-1])]
    holds = inside > max(ceiling, RATIO * outside) and jump[1] > STEP * jump[0]
    holds = holds and _most_rows_jump(row[passing], size[passing], (position[passing] >= p) == late)
    return At(p, late, inside, outside) if holds else None


def _most_rows_jump(row: NDArray[np.int64], size: Floats, inside: Flags) -> bool:
    """Whether it is a matter of positions, and not of positions in some rows."""
    rows = int(row.max()) + 1
    means = []
    for part in (inside, ~inside):
        counts = np.bincount(row[part], minlength=rows)
        means.append(np.bincount(row[part], weights=size[part], minlength=rows) / np.maximum(counts, 1))
    present = np.unique(row)
    return float((means[0][present] > 1.5 * means[1][present]).mean()) > MOST


def _position_words(tokens: Tokens, at: At) -> tuple[str, tuple[str, ...], str]:
    share = float(((tokens.position >= at.position) == at.late).mean())
    if at.late:
        title = f"the distance jumps at position {at.position} of the response"
        remedy = (
            "look for what begins there: a sliding window or a maximum length of one side, the second chunk of a "
            "prefill, a page of the KV cache, another rotary scaling, a turn of the environment"
        )
    else:
        many = at.position > 1
        title = (
            f"the first {f'{at.position} tokens' if many else 'token'} of the responses {'are' if many else 'is'} apart"
        )
        remedy = (
            "look at what the first tokens see alone: the end of the prompt or template (a token more or less), the "
            "prefill in place of decode steps, a prefix cache of older weights"
        )
    evidence = (
        f"within one row, mean |delta| is {number(at.inside)} {'from there on' if at.late else 'there'} and "
        f"{number(at.outside)} {'before' if at.late else 'behind'}",
        f"{percent(share)} of the tokens stand there",
    )
    return title, evidence, remedy


def _positions(tokens: Tokens, a: Table, pairs: Pairs, ceiling: float) -> Finding | None:
    at = _step_position(tokens, ceiling)
    if at is None:
        return None
    found = at

    def holds(again: Tokens) -> bool:
        other = _step_position(again, ceiling, near=found.position)
        return other is not None and other.late == found.late

    sure = confidence(tokens, holds)
    if sure < 0.5:
        return None
    title, evidence, remedy = _position_words(tokens, at)
    values: dict[str, float | str] = {
        "position": float(at.position),
        "where": "late" if at.late else "early",
        "inside": at.inside,
        "outside": at.outside,
    }
    return Finding("some_positions", title, sure, evidence, remedy, values)


# -- token ids ---------------------------------------------------------------------------------------------------------

LEAST_SEEN, MOST_TOKENS, LEAST_HELD = 3, 0.2, 0.5
"""Times that an id must be seen; share of the tokens that the ids may be; share of the distance they must hold."""


def _distant_ids(ids: NDArray[np.int64], size: Floats, ceiling: float) -> NDArray[np.int64]:
    names, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, weights=size) / counts
    typical = float(np.median(means[counts >= LEAST_SEEN])) if (counts >= LEAST_SEEN).any() else 0.0
    return names[(counts >= LEAST_SEEN) & (means > max(ceiling, RATIO * typical))]


def _ids_hold(tokens: Tokens, ceiling: float) -> tuple[NDArray[np.int64], float, float, float, float] | None:
    """(ids, their share of the tokens, of the distance, mean inside, outside). The ids are chosen by one half of the
    rows and tried on the other: the largest of many means is large by chance."""
    assert tokens.ids is not None
    ok = tokens.finite
    ids, row = tokens.ids[ok], tokens.row[ok]
    size = np.abs(tokens.a[ok] - tokens.b[ok])
    even = row % 2 == 0
    chosen = _distant_ids(ids[even], size[even], ceiling)
    mine = np.isin(ids, chosen)
    tried = mine & ~even
    if tried.sum() < 10 or not len(chosen):
        return None
    inside, outside = float(size[tried].mean()), float(size[~mine & ~even].mean())
    held = float(size[tried].sum() / max(size[~even].sum(), 1e-300))
    share = float(mine.mean())
    if share > MOST_TOKENS or held < LEAST_HELD or inside <= max(ceiling, RATIO * outside):
        return None
    return chosen, share, held, inside, outside


def _ids(tokens: Tokens, a: Table, pairs: Pairs, ceiling: float) -> Finding | None:
    if tokens.ids is None or tokens.rows < 20:
        return None
    found = _ids_hold(tokens, ceiling)
    if found is None:
        return None
    sure = confidence(tokens, lambda again: _ids_hold(again, ceiling) is not None)
    if sure < 0.5:
        return None
    chosen, share, held, inside, outside = found
    shown = ", ".join(map(str, chosen[:CONTEXT].tolist())) + (", ..." if len(chosen) > CONTEXT else "")
    many = len(chosen) > 1
    evidence = (
        f"{'ids' if many else 'id'} {shown}: {percent(share)} of the tokens hold {percent(held)} of the distance",
        f"mean |delta| is {number(inside)} at {'them' if many else 'it'}, {number(outside)} at other tokens",
    )
    remedy = (
        "compare the rows of these ids in embedding and head of both sides (added tokens, a vocabulary that is padded "
        "or split over ranks), and the experts that they are sent to"
    )
    values: dict[str, float | str] = {
        "ids": float(len(chosen)),
        "share": share,
        "held": held,
        "inside": inside,
        "outside": outside,
    }
    title = f"{len(chosen)} token id{'s' * many} {'are' if many else 'is'} apart, the others are not"
    return Finding("some_tokens", title, sure, evidence, remedy, values)
