"""The prompt in front of the responses, where both sides hold it and only one has log-probs for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tracefp4.meter.findings import Finding, number, percent
from tracefp4.meter.traces.pairing import Pairs
from tracefp4.meter.traces.reading import Table

MIN_RUN, MIN_SHARE, FAR = 2, 0.3, 0.3
"""Positions of one value in a row; share of the rows; mean |difference| that is no rounding of a certain token."""


def prompt_of_both(a: Table, b: Table, pairs: Pairs) -> tuple[Pairs, Finding | None]:
    """Rows without a mask that begin with a run of one value on one side, as engines fill up a prompt."""
    if a.masked or b.masked or len(pairs) < 4:
        return pairs, None
    for side, other in (("A", "B"), ("B", "A")):
        values, runs, far = _runs(a, b, pairs, side)
        flags = (runs >= MIN_RUN) & (runs < pairs.length) & (far > FAR)
        if flags.mean() <= MIN_SHARE:
            continue
        value = float(np.median(values[flags]))
        if (values[flags] == value).mean() < 0.98:
            continue
        cut = np.where(flags, runs, 0)
        laid = replace(pairs, start_a=pairs.start_a + cut, start_b=pairs.start_b + cut, length=pairs.length - cut)
        size, away = np.median(runs[flags]), float(far[flags].mean())
        finding = Finding(
            "prompt",
            "the prompt is counted",
            1.0,
            (
                f"{percent(float(flags.mean()))} of the rows begin with {size:.0f} positions (median) at "
                f"{number(value)} in {side}, which in {other} are {number(away)} away on average",
                f"that is {percent(float(cut.sum() / pairs.length.sum()))} of all positions",
            ),
            "export the response mask (response_mask, loss_mask), or the log-probs of the response alone; figures here "
            "leave those positions out",
            {"side": side, "tokens": float(size), "share": float(cut.sum() / pairs.length.sum())},
        )
        return laid, finding
    return pairs, None


def _runs(
    a: Table, b: Table, pairs: Pairs, side: str
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Of each pair: the side's first value, how many positions from the first on have it, and their mean |delta|."""
    values, far = np.zeros(len(pairs)), np.zeros(len(pairs))
    runs = np.zeros(len(pairs), dtype=np.int64)
    first_a, first_b = a.offsets[pairs.a] + pairs.start_a, b.offsets[pairs.b] + pairs.start_b
    own, first = (a.role("train"), first_a) if side == "A" else (b.role("rollout"), first_b)
    long = np.flatnonzero(pairs.length > MIN_RUN)
    alike = long[own[first[long]] == own[first[long] + 1]] if len(long) else long
    if len(alike) <= MIN_SHARE * len(pairs):
        return values, runs, far  # the rows need not be gone through
    for i in alike.tolist():
        n = int(pairs.length[i])
        mine = own[first[i] : first[i] + n]
        runs[i] = n if (mine == mine[0]).all() else int(np.argmin(mine == mine[0]))
        x = a.role("train")[first_a[i] : first_a[i] + runs[i]]
        y = b.role("rollout")[first_b[i] : first_b[i] + runs[i]]
        known = np.isfinite(x) & np.isfinite(y)
        values[i], far[i] = mine[0], float(np.abs(x[known] - y[known]).mean()) if known.any() else 0.0
    return values, runs, far
