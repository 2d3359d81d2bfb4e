"""The reward of running sums, as verl calls it: 1 where what follows the last ``#`` is the answer."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """1.0 or 0.0. A response without ``#``, or with something else than a number after it, scores 0."""
    _, marker, answer = solution_str.split("<eos>", 1)[0].rpartition("#")
    try:
        return float(bool(marker) and int(answer) == int(ground_truth))
    except ValueError:
        return 0.0
