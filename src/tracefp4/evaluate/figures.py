"""The figures of one form, and of two on the same problems.

Legend: P problems, n samples of each, rewards f64 [P, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracefp4.align.passrate import Rewards, cluster_mean, paired_difference, pass_at_k, pass_rates


def form_figures(lines: Sequence[dict[str, Any]], rewards: Rewards, ks: tuple[int, ...]) -> dict[str, Any]:
    """Figures of one form. lines: of its responses file; rewards f64 [P, n]."""
    rates = pass_rates(rewards, ks)
    samples = [s for line in lines for s in line["samples"]]
    return {
        "avg": rates.avg.as_dict(),
        "pass_at": {str(k): estimate.as_dict() for k, estimate in rates.at_k.items()},
        "response_length_mean": sum(s["tokens"] for s in samples) / len(samples),
        "truncated_share": sum(s["finish_reason"] == "length" for s in samples) / len(samples),
        "overlong": sum(line["overlong"] for line in lines),
    }


def difference_figures(ours: Rewards, theirs: Rewards, ks: tuple[int, ...]) -> dict[str, Any]:
    """What changes from one form to another on the same problems, rewards f64 [P, n] each.

    avg, pass_at: ours - theirs. flipped: samples of one seed that pass in one form and fail in the other, as a share;
    lost: those that passed in theirs, gained: those that pass in ours. With one sample these are shares of problems.
    """
    a, b = ours >= 1.0, theirs >= 1.0

    def at(passed: np.ndarray, k: int) -> Rewards:
        return np.array([[pass_at_k(passed.shape[1], int(c), k)] for c in passed.sum(1)])

    return {
        "avg": paired_difference(ours, theirs).as_dict(),
        "pass_at": {str(k): paired_difference(at(a, k), at(b, k)).as_dict() for k in ks},
        "flipped": cluster_mean((a != b).mean(1)).as_dict(),
        "lost": float((b & ~a).mean()),
        "gained": float((a & ~b).mean()),
    }
