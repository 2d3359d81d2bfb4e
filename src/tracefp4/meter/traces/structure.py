"""Faults of the arrangement: rows, tokens or positions that do not belong together. Each finding says how to lay them
right, and what follows is measured on that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tracefp4.meter.findings import Finding, number, percent
from tracefp4.meter.traces.front import prompt_of_both
from tracefp4.meter.traces.pairing import ALIGNED, SHIFTED, Pairs, pair_by_tokens
from tracefp4.meter.traces.patterns import correlation, mask_of_tail, mean_abs
from tracefp4.meter.traces.reading import Table
from tracefp4.meter.traces.sampling import RESAMPLES, Tokens, draw

MOST = 0.7
SOME = 0.02
PROBES, PREFIX = 64, 16
MAX_SHIFT = 2


@dataclass(frozen=True)
class Structure:
    """pairs: laid right. lost: what is compared is not the same tokens, so that values say nothing more."""

    pairs: Pairs
    findings: tuple[Finding, ...]
    lost: bool = False


def examine(a: Table, b: Table, pairs: Pairs) -> Structure:
    """All checks, in the order in which one fault can hide another."""
    findings: list[Finding] = []
    if pairs.relation is not None and a is not b:
        pairs, found = _shuffled_ids(a, b, pairs)
        findings += found
        named, lost = _other_tokens(a, b, pairs)
        if named is not None:
            findings.append(named)
        if lost:
            return Structure(pairs, tuple(findings), True)
        findings += [f for f in (_extra(a, b, pairs), _shifted_ids(pairs)) if f is not None]
    elif pairs.relation is None:
        pairs, named = _extra_without_ids(a, b, pairs)
        findings += [named] if named else []
    for look in (_padding, prompt_of_both):
        pairs, named = look(a, b, pairs)
        findings += [named] if named else []
    pairs, named = _shifted_values(a, b, pairs)
    findings += [named] if named else []
    if named is None:
        named = _shuffled_values(a, b, pairs)
        if named is not None:
            return Structure(pairs, (*findings, named), True)
    return Structure(pairs, tuple(findings))


def _share(flags: NDArray[np.bool_], holds: Callable[[float], bool]) -> float:
    """Share of resamples of the pairs in which the share of flagged ones passes."""
    rng = np.random.default_rng(0)
    n = len(flags)
    return float(np.mean([holds(float(flags[rng.integers(0, n, n)].mean())) for _ in range(RESAMPLES)]))


# -- with token ids ----------------------------------------------------------------------------------------------------


def _shuffled_ids(a: Table, b: Table, pairs: Pairs) -> tuple[Pairs, list[Finding]]:
    assert pairs.relation is not None
    wrong = ~np.isin(pairs.relation, ALIGNED)
    if wrong.mean() <= SOME:
        return pairs, []
    again = pair_by_tokens(a, b, pairs)
    if again is None:
        return pairs, []
    moved = np.flatnonzero(again.b != pairs.b[np.isin(pairs.a, again.a)])
    if not len(moved):
        return pairs, []
    first = int(moved[0])
    evidence = (
        f"paired by {pairs.by}, {percent(float(wrong.mean()))} of the rows have other token ids; {len(moved)} of "
        "them have "
        "the very ids of another row",
        f"line {a.line[again.a[first]]} of A is line {b.line[again.b[first]]} of B",
    )
    finding = Finding(
        "shuffled_rows",
        "the rows of B are in another order than those of A",
        _share(wrong, lambda share: share > SOME),
        evidence,
        "write an id with each sample (the same in both files), or undo the reordering before log-probs are joined; "
        "figures here are of the rows paired by their token ids",
        {"rows": float(len(moved)), "share": float(wrong.mean())},
    )
    return again, [finding]


def _other_tokens(a: Table, b: Table, pairs: Pairs) -> tuple[Finding | None, bool]:
    """Another tokenizer, or other responses; and whether next to nothing is left to compare."""
    assert pairs.relation is not None
    assert a.tokens is not None
    assert b.tokens is not None
    wrong = ~np.isin(pairs.relation, (*ALIGNED, *SHIFTED))
    share = float(wrong.mean())
    if share <= SOME:
        return None, False
    rows = np.flatnonzero(wrong)[:2000]
    prefix = pairs.length[rows]
    shortest = np.minimum(np.diff(a.offsets)[pairs.a[rows]], np.diff(b.offsets)[pairs.b[rows]])
    begun = float((prefix >= np.maximum(1, 0.1 * shortest)).mean())
    lasts = f"{percent(share)} of the rows have other token ids in A and in B"
    sure = _share(wrong, lambda s: s > SOME)
    common = float(np.median(prefix))
    if begun > 0.5:
        evidence = (
            f"{lasts}; {percent(begun)} of these begin alike and go apart after {common:.0f} tokens (median), as two "
            "generations from one prompt do"
        )
        remedy = (
            "score the very tokens that the rollout sampled (teacher forcing); log-probs of two generations cannot be "
            "compared token by token"
        )
        return _other_responses(sure, evidence, remedy, share, common), share > 0.5
    mapped, pairs_seen = _mapping(a, b, pairs, rows)
    if mapped <= 0.95 and _one_vocabulary(a, b, pairs, rows):
        evidence = f"{lasts}, from the first tokens on; but every id is about as frequent in B as in A: one tokenizer"
        remedy = (
            "pair the rows (write an id with each sample, the same in both files), and score the very tokens that the "
            "rollout sampled (teacher forcing)"
        )
        return _other_responses(sure, evidence, remedy, share, common), share > 0.5
    return _tokenizer(a, b, pairs, rows, sure, lasts, share, mapped, pairs_seen), share > 0.5


def _other_responses(sure: float, evidence: str, remedy: str, share: float, common_prefix: float) -> Finding:
    figures: dict[str, float | str] = {"share": share, "common_prefix": common_prefix}
    return Finding("other_responses", "A and B are of different responses", sure, (evidence,), remedy, figures)


def _tokenizer(
    a: Table,
    b: Table,
    pairs: Pairs,
    rows: NDArray[np.int64],
    sure: float,
    lasts: str,
    share: float,
    mapped: float,
    pairs_seen: int,
) -> Finding:
    assert a.tokens is not None
    assert b.tokens is not None
    sizes = [int(t.max()) if len(t) else 0 for t in (a.tokens, b.tokens)]
    lengths = float(np.diff(b.offsets)[pairs.b[rows]].sum() / max(1, np.diff(a.offsets)[pairs.a[rows]].sum()))
    evidence = [f"{lasts}, from the first tokens on"]
    if mapped > 0.95:
        evidence.append(
            f"every id of A stands for one and the same id of B ({percent(mapped)} of {pairs_seen} positions): the "
            "same pieces under other numbers"
        )
    else:
        evidence.append(f"B has {lengths:.2f} times as many tokens as A: the text is cut into other pieces")
    evidence.append(f"the largest id is {sizes[0]} in A and {sizes[1]} in B")
    return Finding(
        "tokenizer",
        "A and B use different tokenizers",
        sure,
        tuple(evidence),
        "load the same tokenizer files on both sides (compare tokenizer.json, added tokens and vocabulary size), "
        "and pass token ids, not text, from the rollout to the trainer",
        {"share": share, "mapped": mapped, "length_ratio": lengths, "largest_a": sizes[0], "largest_b": sizes[1]},
    )


def _mapping(a: Table, b: Table, pairs: Pairs, rows: NDArray[np.int64]) -> tuple[float, int]:
    """(share of positions that one map of A's ids to B's explains, positions), over rows of equal length."""
    assert a.tokens is not None
    assert b.tokens is not None
    seen: Counter[tuple[int, int]] = Counter()
    for i in rows.tolist():
        ta, tb = a.tokens[a.span(int(pairs.a[i]))], b.tokens[b.span(int(pairs.b[i]))]
        if len(ta) == len(tb):
            seen.update(zip(ta.tolist(), tb.tolist(), strict=True))
    best: dict[int, int] = {}
    for (left, _), count in seen.items():
        best[left] = max(best.get(left, 0), count)
    total = sum(seen.values())
    distinct = len({right for _, right in seen})
    if total < 50 or distinct < 0.5 * len(best):
        return 0.0, total
    return sum(best.values()) / total, total


def _one_vocabulary(a: Table, b: Table, pairs: Pairs, rows: NDArray[np.int64]) -> bool:
    """Ids of one half of A's rows are nearly as alike to those of B's other half as to those of A's other half."""
    assert a.tokens is not None
    assert b.tokens is not None

    def frequencies(table: Table, of: NDArray[np.int64]) -> dict[int, float]:
        assert table.tokens is not None
        ids, counts = np.unique(np.concatenate([table.tokens[table.span(int(i))] for i in of]), return_counts=True)
        return dict(zip(ids.tolist(), (counts / max(1, counts.sum())).tolist(), strict=True))

    def common(x: dict[int, float], y: dict[int, float]) -> float:
        return sum(min(share, y.get(token, 0.0)) for token, share in x.items())

    if len(rows) < 4:
        return False
    half = frequencies(a, pairs.a[rows[::2]])
    own = common(half, frequencies(a, pairs.a[rows[1::2]]))
    return own > 0.1 and common(half, frequencies(b, pairs.b[rows[1::2]])) > 0.6 * own


def _extra(a: Table, b: Table, pairs: Pairs) -> Finding | None:
    """The prompt, a first token, an end token or padding that only one side counts."""
    assert pairs.relation is not None
    for where in ("front", "tail"):
        for side, table, rows in (("A", a, pairs.a), ("B", b, pairs.b)):
            flags = pairs.relation == f"{where} {side.lower()}"
            if flags.mean() <= 0.3:
                continue
            sizes = np.diff(table.offsets)[rows[flags]] - pairs.length[flags]
            name, title, evidence = _name_extra(table, rows[flags], sizes, where, side)
            return Finding(
                name,
                title,
                _share(flags, lambda s: s > 0.3),
                (f"{percent(float(flags.mean()))} of the rows: {evidence}",),
                "leave those positions out of the export, or give them a mask; figures here are of the common tokens",
                {"side": side, "tokens": float(np.median(sizes)), "share": float(flags.mean())},
            )
    return None


def _name_extra(
    table: Table, rows: NDArray[np.int64], sizes: NDArray[np.int64], where: str, side: str
) -> tuple[str, str, str]:
    assert table.tokens is not None
    other = "B" if side == "A" else "A"
    ends: list[NDArray[np.int64]] = []
    for row, size in zip(rows[:500].tolist(), sizes[:500].tolist(), strict=True):
        ids = table.tokens[table.span(row)]
        ends.append(ids[:size] if where == "front" else ids[len(ids) - size :])
    distinct = {int(t) for part in ends for t in part}
    one = f"token {next(iter(distinct))}" if len(distinct) == 1 else ""
    median = float(np.median(sizes))
    if where == "front":
        if one and (sizes == 1).all():
            return "bos", f"{side} counts a first token that {other} does not", f"{one} stands before those of {other}"
        if one:
            text = f"{one} stands before those of {other}, {median:.0f} times (median)"
            return "padding", f"{side} counts padding", text
        text = f"{median:.0f} more tokens (median) stand before those of {other}"
        return "prompt", f"{side} includes the prompt, {other} does not", text
    if one and (sizes == 1).all():
        return "end_token", f"{side} counts an end token that {other} does not", f"{one} follows those of {other}"
    if one:
        text = f"{one} follows those of {other}, {median:.0f} times (median)"
        return "padding", f"{side} counts padding", text
    return "cut_off", f"{other} is cut off", f"{median:.0f} more tokens (median) follow in {side}"


def _shifted_ids(pairs: Pairs) -> Finding | None:
    assert pairs.relation is not None
    for relation, ahead, behind in ((SHIFTED[1], "B", "A"), (SHIFTED[0], "A", "B")):
        flags = pairs.relation == relation
        if flags.mean() > 0.3:
            return Finding(
                "shift",
                f"token ids of {ahead} are one position ahead of those of {behind}",
                _share(flags, lambda s: s > 0.3),
                (f"in {percent(float(flags.mean()))} of the rows its ids are those of {behind} from the second on",),
                f"drop the first token of {behind}, or shift one of the two by one before they are joined; figures "
                "here are "
                "of the shifted rows",
                {"ahead": ahead, "share": float(flags.mean())},
            )
    return None


# -- by values ---------------------------------------------------------------------------------------------------------


def _padding(a: Table, b: Table, pairs: Pairs) -> tuple[Pairs, Finding | None]:
    """Both sides hold padded rows without a mask: rows of one length that end in runs of one id, constant on one "
    "side."""
    if a.tokens is None or a.masked or b.masked or len(pairs) < 4:
        return pairs, None
    whole = np.diff(a.offsets)[pairs.a]
    if (whole != whole[0]).any() or (whole != pairs.length).any() or whole[0] < 4:
        return pairs, None
    # The last two tokens of a padded row are the same; only then is every run measured.
    if (a.tokens[a.offsets[pairs.a + 1] - 1] == a.tokens[a.offsets[pairs.a + 1] - 2]).mean() < 0.3:
        return pairs, None
    real = np.array([mask_of_tail(a.tokens[a.span(int(i))]) for i in pairs.a])
    runs = whole - real
    long = runs >= 2
    ids = Counter(int(a.tokens[a.offsets[i + 1] - 1]) for i in pairs.a[long].tolist())
    pad, count = ids.most_common(1)[0]
    if count < 0.9 * long.sum():
        return pairs, None
    sides = []
    for side, table, rows, role in (("A", a, pairs.a, "train"), ("B", b, pairs.b, "rollout")):
        values = table.role(role)
        tails = np.concatenate(
            [
                values[table.offsets[r + 1] - n + 1 : table.offsets[r + 1]]
                for r, n in zip(rows[long], runs[long], strict=True)
            ]
        )
        if len(tails) and (np.isnan(tails).all() or (tails == tails[0]).mean() > 0.98):
            sides.append((side, float(tails[0])))
    if not sides:
        return pairs, None
    # The first token of the run may be real: an end token that is the padding token too.
    side, value = sides[0]
    table, rows, role = (a, pairs.a, "train") if side == "A" else (b, pairs.b, "rollout")
    first = table.role(role)[table.offsets[rows] + np.minimum(real, whole - 1)]
    begins = real + ((first != value) & ~np.isnan(first))
    trimmed = pairs.trimmed(np.where(long, begins, whole))
    share = 1 - trimmed.length.sum() / pairs.length.sum()
    constant = " and ".join(f"{value:g} in {side}" for side, value in sides)
    finding = Finding(
        "padding",
        "padding is counted",
        _share(long, lambda s: s >= 0.3),
        (
            f"all rows have {whole[0]} tokens and {percent(float(long.mean()))} of them end in a run of token "
            f"{pad}, whose "
            f"log-probs are {constant}",
            f"that is {percent(float(share))} of all positions",
        ),
        "export the response mask (response_mask, loss_mask), or cut the rows at their length; figures here leave "
        "the runs "
        "out",
        {"token": float(pad), "share": float(share)},
    )
    return trimmed, finding


def shift_errors(tokens: Tokens) -> NDArray[np.float64]:
    """f64 [r, 2 MAX_SHIFT + 1]: mean |a[t + s] - b[t]| of each row for s from -MAX_SHIFT on; NaN where too short."""
    starts = np.searchsorted(tokens.row, np.arange(tokens.rows + 1))
    out = np.full((tokens.rows, 2 * MAX_SHIFT + 1), np.nan)
    for r in range(tokens.rows):
        a, b = tokens.a[starts[r] : starts[r + 1]], tokens.b[starts[r] : starts[r + 1]]
        for k, s in enumerate(range(-MAX_SHIFT, MAX_SHIFT + 1)):
            x, y = (a[s:], b[: len(b) - s]) if s >= 0 else (a[:s], b[-s:])
            ok = np.isfinite(x) & np.isfinite(y)
            if ok.sum() >= 3:
                out[r, k] = np.abs(x[ok] - y[ok]).mean()
    return out


def best_shift(errors: NDArray[np.float64]) -> int:
    """The shift under which most rows are much nearer than unshifted; 0 where there is none."""
    use = errors[~np.isnan(errors).any(1)]
    if len(use) < 2:
        return 0
    means = use.mean(0)
    best = int(np.argmin(means))
    nearer = float((use[:, best] < 0.6 * use[:, MAX_SHIFT]).mean())
    return best - MAX_SHIFT if means[best] < 0.5 * means[MAX_SHIFT] and nearer > MOST else 0


def _shifted_values(a: Table, b: Table, pairs: Pairs) -> tuple[Pairs, Finding | None]:
    tokens = draw(a, b, pairs)
    if tokens.rows < 2:
        return pairs, None
    errors = shift_errors(tokens)
    shift = best_shift(errors)
    if shift == 0:
        return pairs, None
    means = np.nanmean(errors, axis=0)
    rng = np.random.default_rng(0)
    again = [best_shift(errors[rng.integers(0, len(errors), len(errors))]) for _ in range(RESAMPLES)]
    count = abs(shift)
    early = "early" if shift > 0 else "late"
    where = f"t {'+' if shift > 0 else '-'} {count}"
    finding = Finding(
        "shift",
        f"log-probs of B stand {count} position{'s' * (count > 1)} too {early}",
        float(np.mean([s == shift for s in again])),
        (
            f"B's value at position t is that of A at {where}: shifted so, mean |delta| is "
            f"{number(float(means[shift + MAX_SHIFT]))}, unshifted {number(float(means[MAX_SHIFT]))}",
        ),
        f"move B {count} {'later' if shift > 0 else 'earlier'}, or A the other way: logits at position t predict "
        "token t + 1, "
        "so log-probs are gathered from logits[:-1] with tokens[1:]; figures here are of the shifted rows",
        {"shift": float(shift), "before": float(means[MAX_SHIFT]), "after": float(means[shift + MAX_SHIFT])},
    )
    return pairs.shifted(shift), finding


def _extra_without_ids(a: Table, b: Table, pairs: Pairs) -> tuple[Pairs, Finding | None]:
    """Rows of other lengths, without ids to tell which part is common: by values."""
    differ = np.diff(b.offsets)[pairs.b] - np.diff(a.offsets)[pairs.a]
    if (differ != 0).mean() <= 0.3:
        return pairs, None
    side, table, rows = ("B", b, pairs.b) if np.median(differ) > 0 else ("A", a, pairs.a)
    extra = np.abs(differ)
    front = replace(
        pairs,
        start_a=np.where(differ < 0, extra, 0),
        start_b=np.where(differ > 0, extra, 0),
    )
    fits = []
    for candidate in (pairs, front):
        tokens = draw(a, b, candidate)
        ok = tokens.finite
        fits.append((mean_abs(tokens.a[ok] - tokens.b[ok]), correlation(tokens.a[ok], tokens.b[ok]), candidate))
    tail, head = fits
    if min(tail[0], head[0]) > 0.5 * max(tail[0], head[0]):
        return pairs, None
    at_front = head[0] < tail[0]
    other = "B" if side == "A" else "A"
    kind = "prompt" if at_front else "padding"
    size = float(np.median(np.diff(table.offsets)[rows] - pairs.length))
    finding = Finding(
        kind,
        f"{side} includes the prompt or a first token, {other} does not" if at_front else f"{side} has more at its end",
        _share(differ != 0, lambda s: s > 0.3),
        (
            f"{side} is {size:.0f} tokens longer (median); laid over each other at the "
            f"{'end' if at_front else 'start'}, mean "
            f"|delta| is {number(min(tail[0], head[0]))}, else {number(max(tail[0], head[0]))}",
        ),
        "leave those positions out of the export, or write token ids too; figures here are of the common part",
        {"side": side, "tokens": size},
    )
    return (front if at_front else pairs), finding


def _distances(heads: NDArray[np.float64], head: NDArray[np.float64]) -> NDArray[np.float64]:
    """f64 [m]: mean |difference| of each row of heads [m, n] to head [n], of what is finite in both; inf below 4."""
    size = np.abs(heads - head)
    known = np.isfinite(size)
    counts = known.sum(1)
    return np.where(counts >= 4, np.where(known, size, 0.0).sum(1) / np.maximum(counts, 1), np.inf)


def _shuffled_values(a: Table, b: Table, pairs: Pairs) -> Finding | None:
    """Log-probs that are those of another row: by the nearest first PREFIX values among all rows of that length."""
    lengths = pairs.length
    usable = np.flatnonzero(lengths >= 4)
    if len(usable) < 8:
        return None
    at = (b.offsets[pairs.b] + pairs.start_b)[:, None] + np.arange(PREFIX)
    inside = (np.arange(PREFIX) < lengths[:, None]) & (lengths >= 4)[:, None]
    column = b.role("rollout")
    heads = np.where(inside, column[np.where(inside, at, 0)], np.nan)
    heads[~np.isfinite(heads)] = np.nan
    mine, theirs = a.role("train"), np.diff(b.offsets)[pairs.b]
    probes = np.random.default_rng(0).permutation(usable)[:PROBES]
    own, best, where = np.zeros(len(probes)), np.zeros(len(probes)), np.zeros(len(probes), dtype=np.int64)
    for k, i in enumerate(probes.tolist()):
        first = int(a.offsets[pairs.a[i]] + pairs.start_a[i])
        head = mine[first : first + min(PREFIX, int(lengths[i]))]
        distance = _distances(heads[:, : len(head)], head)
        distance[theirs != theirs[i]] = np.inf
        own[k], where[k] = distance[i], int(np.argmin(distance))
        best[k] = distance[where[k]]
    moved = (where != probes) & (best < 0.4 * own) & (own > 0.05)
    if moved.mean() <= 0.5:
        return None
    example = int(np.flatnonzero(moved)[0])
    return Finding(
        "shuffled_rows",
        "log-probs of B are those of other rows",
        _share(moved, lambda s: s > 0.5),
        (
            f"{percent(float(moved.mean()))} of {len(probes)} rows looked at are much nearer to the log-probs of "
            "another row "
            f"(mean |delta| {number(float(np.median(best[moved])))}) than to those they stand beside "
            f"({number(float(np.median(own[moved])))})",
            f"line {a.line[pairs.a[probes[example]]]} of A is like line {b.line[pairs.b[where[example]]]} of B",
        ),
        "undo the reordering (length balancing, shuffling of micro-batches) before log-probs are joined with the "
        "samples",
        {"share": float(moved.mean())},
    )
