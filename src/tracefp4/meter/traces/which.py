"""What some rows of a trace have in common that the others have not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracefp4.meter.traces.pairing import Pairs
from tracefp4.meter.traces.reading import Table
from tracefp4.meter.traces.sampling import Floats, Tokens

SURE = 0.95
"""Probability that a row of the part lies above one of the rest, or share of the rows that a rule gets right."""
MOST_WORKERS, SHOWN = 64, 3

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Fact:
    """name: for scripts."""

    name: str
    sentence: str
    remedy: str


_LONG = (
    "look at what only long rows meet: chunked prefill, preemption and recomputation, a context window, the truncation "
    "of one side"
)
_SHORT = "look at what only short rows meet: padding, a batch of another size, an end token that one side scores alone"
_WORKER = (
    "compare the workers that made these rows with the others: version of the weights, sampling parameters, kernels, "
    "precision"
)
_TIME = "look at what changed there: a weight update that did not arrive, settings, a worker that was started again"
_PROMPT = "look at these prompts: another template, a system message, images, a prefix cache of older weights"
_TOKEN = "look at what that token brings: a turn of a tool, an image, a language, an added token without weights"


def which_rows(tokens: Tokens, flags: Flags, a: Table, pairs: Pairs) -> list[Fact]:
    """The facts that tell the flagged rows from the others, at most SHOWN, the most telling first."""
    lines = a.line[pairs.a[tokens.pair]].astype(np.float64)
    length = np.bincount(tokens.row, minlength=tokens.rows).astype(np.float64)
    found = [
        _steps(tokens, flags),
        _above("length", length, flags, "tokens (median)", ("the long ones", "the short ones"), (_LONG, _SHORT)),
        _every(tokens.pair, flags),
        _together(lines, flags),
        _prompts(tokens, flags),
        _token(tokens, flags),
    ]
    return [fact for fact in found if fact is not None][:SHOWN]


def separation(value: Floats, flags: Flags) -> float:
    """Probability that the value of a flagged row is above that of another, ties counted half; .5 where undefined."""
    n, m = int(flags.sum()), int((~flags).sum())
    if not n or not m:
        return 0.5
    _, inverse, counts = np.unique(value, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[flags].sum() - n * (n + 1) / 2) / (n * m))


def _above(
    name: str, value: Floats, flags: Flags, unit: str, words: tuple[str, str], remedies: tuple[str, str]
) -> Fact | None:
    chance = separation(value, flags)
    if max(chance, 1 - chance) < SURE:
        return None
    down = int(chance < 0.5)
    mine, others = np.median(value[flags]), np.median(value[~flags])
    return Fact(name, f"they are {words[down]}: {mine:.0f} {unit} against {others:.0f}", remedies[down])


def _steps(tokens: Tokens, flags: Flags) -> Fact | None:
    known = tokens.step >= 0
    if not known.all() or len(np.unique(tokens.step)) < 2:
        return None
    chance = separation(tokens.step.astype(np.float64), flags)
    if max(chance, 1 - chance) < SURE:
        return None
    late = chance > 0.5
    mine = tokens.step[flags]
    at = int(np.quantile(mine, 0.02, method="lower") if late else np.quantile(mine, 0.98, method="higher"))
    return Fact("step", f"they are {'from' if late else 'up to'} step {at}{' on' if late else ''}", _TIME)


def _every(place: NDArray[np.int64], flags: Flags) -> Fact | None:
    """Every k-th row, as of one of k workers. place: of each row among all."""
    for k in range(2, min(MOST_WORKERS, len(place) // 6) + 1):
        share = np.bincount(place % k, weights=flags, minlength=k) / np.maximum(np.bincount(place % k, minlength=k), 1)
        mine = share > 0.5
        if 0 < mine.sum() < k and ((mine[place % k] == flags).mean() >= SURE) and share[mine].min() > 0.8:
            first = np.flatnonzero(mine)
            which = ", ".join(str(int(i) + 1) for i in first[:4])
            if len(first) > max(1, k // 2):
                continue
            return Fact("every", f"they are {len(first)} of every {k} rows (number {which} of each {k})", _WORKER)
    return None


def _together(lines: Floats, flags: Flags) -> Fact | None:
    """They stand in one piece of the file."""
    mine = np.sort(lines[flags])
    low, high = mine[int(0.02 * (len(mine) - 1))], mine[int(np.ceil(0.98 * (len(mine) - 1)))]
    inside = (lines >= low) & (lines <= high)
    if (inside == flags).mean() < SURE or inside.all() or flags[inside].mean() < 0.9:
        return None
    return Fact("lines", f"they stand together: lines {low:.0f} to {high:.0f} of A", _WORKER)


def _prompts(tokens: Tokens, flags: Flags) -> Fact | None:
    if (tokens.prompt == 0).any():
        return None
    groups, inverse = np.unique(tokens.prompt, return_inverse=True)
    if not 1 < len(groups) <= len(flags) / 2:
        return None
    share = np.bincount(inverse, weights=flags) / np.bincount(inverse)
    mine = share > 0.5
    if (mine[inverse] == flags).mean() < SURE or mine.sum() in (0, len(groups)):
        return None
    return Fact("prompt", f"they are the answers to {int(mine.sum())} of {len(groups)} prompts", _PROMPT)


def _token(tokens: Tokens, flags: Flags) -> Fact | None:
    """A token id that they hold and the others do not."""
    if tokens.ids is None:
        return None
    ids, inverse = np.unique(tokens.ids, return_inverse=True)
    held = np.unique(np.stack([inverse, tokens.row]), axis=1)
    mine = np.bincount(held[0], weights=flags[held[1]], minlength=len(ids)) / flags.sum()
    others = np.bincount(held[0], weights=~flags[held[1]], minlength=len(ids)) / (~flags).sum()
    best = int(np.argmax(mine - others))
    if mine[best] < SURE or others[best] > 1 - SURE:
        return None
    return Fact("token", f"token {int(ids[best])} is in all of them and hardly in another", _TOKEN)
