"""From the metrics of each (method, seed) to one summary: medians over seeds and ratios to BF16.

Layout read: `out_dir/<method>/seed<k>/{metrics.jsonl, final.json}`.

Each figure is first reduced over the steps of one seed, then over seeds, so that "median of 3 seeds" means
what it says:

    logprob_abs_diff_mean    mean over the steps of mismatch/logprob_abs_diff_mean
    logprob_abs_diff_max     max over the steps of mismatch/logprob_abs_diff_max
    reward                   mean over the last quarter of the steps (rounded up) of reward/mean
    code_mismatch_before     mean over the steps that carry it of code_mismatch/before
    code_mismatch_after      the same of code_mismatch/after
    guidance_bytes_per_token the same of guidance/bytes_per_token
    pass_rate_start, _end    eval/pass_rate_start and eval/pass_rate_end of final.json

A figure no step carries is null (BF16 has no code mismatch). A figure that any step logged as null, because
it was NaN or infinite, is null for that seed, and a null seed makes the median null: a mean over the steps
that happened to be finite would hide a failure.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tracefp4.errors import TracefpError
from tracefp4.report.logger import FINAL, METRICS, read_jsonl

BASELINE = "bf16"

Line = dict[str, Any]
Figure = float | None


class SummaryError(TracefpError):
    """A run's folder does not hold what a summary needs."""


def summarize(out_dir: str | Path, modes: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """The summary of all methods: {"methods": {mode: {figure: spread}}, "modes", "seeds", "steps"}.

    A spread is {"median", "min", "max", "per_seed"}; `steps` is the common number, None if they differ.
    """
    methods = {mode: _method(Path(out_dir) / mode, mode, seeds) for mode in modes}
    for mode in modes:
        for figure in ("logprob_abs_diff_mean", "logprob_abs_diff_max"):
            name = figure.removesuffix("_mean") + "_over_bf16"
            methods[mode][name] = _ratio(methods[mode][figure], methods.get(BASELINE, {}).get(figure), len(seeds))
    counts = {count for method in methods.values() for count in method["steps"]}
    return {
        "methods": methods,
        "modes": list(modes),
        "seeds": list(seeds),
        "steps": counts.pop() if len(counts) == 1 else None,
    }


def spread(values: Sequence[Figure]) -> dict[str, Any]:
    """Median, extremes and the values themselves; all None if any value is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {"median": None, "min": None, "max": None, "per_seed": list(values)}
    return {
        "median": statistics.median(known),
        "min": min(known),
        "max": max(known),
        "per_seed": list(values),
    }


def _method(folder: Path, mode: str, seeds: Sequence[int]) -> dict[str, Any]:
    runs = [_read_metrics(folder / f"seed{seed}" / METRICS, mode, seed) for seed in seeds]
    finals = [_read_final(folder / f"seed{seed}" / FINAL) for seed in seeds]
    return {
        "logprob_abs_diff_mean": spread([over_steps(run, "mismatch/logprob_abs_diff_mean") for run in runs]),
        "logprob_abs_diff_max": spread([over_steps(run, "mismatch/logprob_abs_diff_max", max) for run in runs]),
        "reward": spread([over_steps(last_quarter(run), "reward/mean") for run in runs]),
        "code_mismatch_before": spread([over_steps(run, "code_mismatch/before") for run in runs]),
        "code_mismatch_after": spread([over_steps(run, "code_mismatch/after") for run in runs]),
        "guidance_bytes_per_token": spread([over_steps(run, "guidance/bytes_per_token") for run in runs]),
        "pass_rate_start": spread([final.get("eval/pass_rate_start") for final in finals]),
        "pass_rate_end": spread([final.get("eval/pass_rate_end") for final in finals]),
        "pass_rate_n": [final.get("eval/n") for final in finals],
        "steps": [len(run) for run in runs],
        "nonfinite": sum(value is None for run in runs for line in run for value in line.values()),
    }


def over_steps(lines: Sequence[Line], key: str, reduce: Callable[[list[float]], float] | None = None) -> Figure:
    """`reduce` (the mean unless told) over the steps that carry `key`; None if none does or one is null."""
    values = [line[key] for line in lines if key in line]
    if not values or None in values:
        return None
    return (reduce or statistics.fmean)(values)


def last_quarter(lines: Sequence[Line]) -> Sequence[Line]:
    """The last quarter of the steps, at least one."""
    return lines[len(lines) - math.ceil(len(lines) / 4) :]


def _ratio(figure: dict[str, Any], baseline: dict[str, Any] | None, seeds: int) -> dict[str, Any]:
    """Seed by seed, as both ran on the same prompts; a baseline of zero gives no ratio."""
    if baseline is None:
        return spread([None] * seeds)
    pairs = zip(figure["per_seed"], baseline["per_seed"], strict=True)
    return spread([value / base if value is not None and base else None for value, base in pairs])


def _read_metrics(path: Path, mode: str, seed: int) -> list[Line]:
    try:
        lines = read_jsonl(path)
    except FileNotFoundError:
        raise SummaryError(f"the run of {mode} with seed {seed} left no {path}") from None
    except json.JSONDecodeError as error:
        raise SummaryError(f"{path} is not one JSON object per line ({error})") from None
    if not lines:
        raise SummaryError(f"the run of {mode} with seed {seed} logged no step in {path}")
    return lines


def _read_final(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise SummaryError(f"{path} is not valid JSON ({error})") from None
