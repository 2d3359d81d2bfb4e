"""What to look at: checks on the figures of each run, and across runs. Every sentence holds the numbers it is from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tracefp4.report.axes import number
from tracefp4.report.catalog import FALLBACK, TIMING_PREFIX
from tracefp4.report.overview import BASELINE, DIFF, over_baseline, ratio_text
from tracefp4.report.runs import Group, Run, Series

RISE = 3.0
"""The |log-prob difference|, or the entropy, over its start."""
COLLAPSE = 0.1
"""The entropy over its start."""
WINDOW = 5
"""Steps of a running median, fewer in a run of under 20."""
CUT_OFF = 0.1
CAPPED = 0.01
IDLE = 0.5
SPIKE = 10.0

CHECKS = (
    f"mean |log-prob difference| above {RISE:g}x its start; guided share below 1; null values; entropy below "
    f"{COLLAPSE:g}x or above {RISE:g}x its start; more than {CUT_OFF:.0%} of responses cut off, {CAPPED:.0%} of "
    f"importance weights capped, or {IDLE:.0%} of responses without an advantage, in the last quarter; a gradient norm "
    f"above {SPIKE:g}x its median; pass rates before and after; unfinished runs; differing commits and versions"
)


def findings(groups: Sequence[Group]) -> list[str]:
    """A sentence each: of each run, of the seeds of each setting, of all runs."""
    runs = [run for group in groups for run in group.runs]
    out = [f"{run.name}: {text}" for run in runs for check in _CHECKS for text in check(run)]
    for group in groups:
        out += [f"{group.label}: {text}" for text in (*_pass_rates(group), *_over_baseline(group, runs))]
    return out + list(_across(runs))


def running_median(series: Series) -> Series:
    """Of the finite values, over `WINDOW` steps (a quarter of a shorter run); steps are those a window ends at."""
    finite = series.finite
    width = max(1, min(WINDOW, len(finite.steps) // 4))
    if not len(finite.steps):
        return finite
    windows = np.lib.stride_tricks.sliding_window_view(finite.values, width)
    return Series(finite.steps[width - 1 :], np.median(windows, axis=1))


def _unfinished(run: Run) -> Iterator[str]:
    planned = run.steps_planned
    if planned is not None and run.steps_done < planned:
        yield f"stands at step {run.steps_done} of {planned}: still running, or stopped."


def _nulls(run: Run) -> Iterator[str]:
    broken = {name: series.nulls for name, series in run.series.items() if len(series.nulls)}
    if broken:
        first = min(int(steps[0]) for steps in broken.values())
        names = ", ".join(list(broken)[:4]) + (f" and {len(broken) - 4} more" if len(broken) > 4 else "")
        yield f"NaN or infinite values, logged as null, in {names}; the first at step {first}."


def _distance(run: Run) -> Iterator[str]:
    smooth = running_median(_series(run, DIFF))
    if len(smooth.steps) < 2 or not smooth.values[0] > 0:
        return
    start = float(smooth.values[0])
    over = smooth.values > RISE * start
    if over.any():
        at, worst = int(smooth.steps[over][0]), float(smooth.values.max())
        back = "" if over[-1] else f", and is back at {number(float(smooth.values[-1]))}"
        yield (
            f"mean |log-prob difference| rose above {RISE:g}x its start ({number(start)}) at step {at}; "
            f"highest {number(worst)}, {worst / start:.1f}x{back}."
        )


def _guided(run: Run) -> Iterator[str]:
    share = _series(run, "guidance/guided_share").finite
    below = share.values < 1
    if not below.any():
        return
    rows = {name.removeprefix(FALLBACK): s.finite.values.sum() for name, s in run.series.items() if FALLBACK in name}
    reasons = ", ".join(
        f"{name} {total:.0f} rows" for name, total in sorted(rows.items(), key=lambda r: -r[1]) if total
    )
    lowest = int(np.argmin(share.values))
    yield (
        f"guided share below 1 in {below.sum()} of {len(share.steps)} steps, lowest {share.values[lowest]:.3f} at step "
        f"{share.steps[lowest]}{f'; fallback by reason: {reasons}' if reasons else ''}."
    )


def _entropy(run: Run) -> Iterator[str]:
    smooth = running_median(_series(run, "train/entropy"))
    if len(smooth.steps) < 2 or not smooth.values[0] > 0:
        return
    start, end = float(smooth.values[0]), float(smooth.values[-1])
    if end < COLLAPSE * start or end > RISE * start:
        what = "fell" if end < start else "rose"
        yield f"entropy {what} from {number(start)} to {number(end)} nats per token."


def _shares(run: Run) -> Iterator[str]:
    limit = run.setting("sampling.max_new_tokens")
    cut = f"of responses were cut off at the length limit{f' (sampling.max_new_tokens {limit})' if limit else ''}"
    cap = run.setting("train.tis_cap")
    capped = f"of tokens had an importance weight above the cap{f' (train.tis_cap {cap:g})' if _real(cap) else ''}"
    idle = "of responses were in groups of equal reward and taught nothing"
    for metric, threshold, text in (
        ("response/truncated_share", CUT_OFF, cut),
        ("tis/clip_frac", CAPPED, capped),
        ("train/no_advantage_share", IDLE, idle),
    ):
        tail = _series(run, metric).last_quarter()
        if len(tail) and tail.mean() > threshold:
            yield f"{100 * tail.mean():.3g} % {text}, in the last quarter."


def _gradient(run: Run) -> Iterator[str]:
    norm = _series(run, "train/grad_norm").finite
    if len(norm.steps) < 4:
        return
    median, worst = float(np.median(norm.values)), int(np.argmax(norm.values))
    if norm.values[worst] > SPIKE * median > 0:
        yield (
            f"gradient norm {number(float(norm.values[worst]))} at step {norm.steps[worst]}, "
            f"{norm.values[worst] / median:.0f}x its median."
        )


_CHECKS: tuple[Callable[[Run], Iterator[str]], ...] = (
    _unfinished,
    _nulls,
    _distance,
    _guided,
    _entropy,
    _shares,
    _gradient,
)


def _pass_rates(group: Group) -> Iterator[str]:
    """Unpaired, although both ends are the same problems: rather too cautious than not."""
    known = [(start, end, n) for start, end, n in (run.pass_rates() for run in group.runs) if n]
    rates = [(start, end, n) for start, end, n in known if start is not None and end is not None]
    if not rates:
        return
    moves = [_move(start, end, n) for start, end, n in rates]
    first, last = (statistics.fmean(rate[i] for rate in rates) for i in (0, 1))
    verdicts = [f"{what} in {moves.count(what)}" for what in (UP, SAME, DOWN) if what in moves]
    seeds = f" (mean of {len(rates)} seeds)" if len(rates) > 1 else ""
    problems = " or ".join(str(n) for n in sorted({n for _, _, n in rates}))
    verdict = "; ".join(verdicts) + f" of {len(rates)}" if len(rates) > 1 else moves[0]
    yield f"pass rate {first:.3f} → {last:.3f}{seeds} on {problems} held-out problems: {verdict}."


UP, SAME, DOWN = "up beyond sampling noise", "within sampling noise", "down beyond sampling noise"


def _move(start: float, end: float, n: int) -> str:
    pooled = (start + end) / 2
    error = math.sqrt(max(0.0, 2 * pooled * (1 - pooled) / n))
    if abs(end - start) <= 1.96 * error:
        return SAME
    return UP if end > start else DOWN


def _over_baseline(group: Group, runs: Sequence[Run]) -> Iterator[str]:
    if group.runs[0].method == BASELINE:
        return
    ratios = [ratio for ratio in (over_baseline(run, runs) for run in group.runs) if ratio is not None]
    if ratios:
        ends = dict.fromkeys(ratio_text(ratio) for ratio in (min(ratios), max(ratios)))
        yield f"mean |log-prob difference| of the last quarter is {' to '.join(ends)} {BASELINE}'s."


def _across(runs: Sequence[Run]) -> Iterator[str]:
    for what, values in (
        ("commits", {str(run.run["commit"])[:12] for run in runs if run.run.get("commit")}),
        ("versions", {str(sorted(run.run["versions"].items())) for run in runs if _is_dict(run, "versions")}),
        ("hardware", {str(sorted(run.run["hardware"].items())) for run in runs if _is_dict(run, "hardware")}),
    ):
        if len(values) > 1:
            names = f" ({', '.join(sorted(values))})" if what == "commits" else ""
            yield f"The runs are of {len(values)} different {what}{names}: part of a difference may come from there."
    dirty = [run.name for run in runs if str(run.run.get("commit")).endswith("-dirty")]
    if dirty:
        yield f"Run from a checkout with uncommitted changes: {', '.join(dirty)}."
    train, rollout = (
        sum(float(_series(run, f"{TIMING_PREFIX}{part}_seconds").finite.values.sum()) for run in runs)
        for part in ("train", "rollout")
    )
    if train and rollout:
        total = train + rollout
        yield f"Of {total:.0f} s of rollout and training, {100 * rollout / total:.0f} % were rollout."


def _series(run: Run, metric: str) -> Series:
    return run.series.get(metric) or Series(np.array([], dtype=np.int64), np.array([]))


def _is_dict(run: Run, key: str) -> bool:
    return isinstance(run.run.get(key), dict)


def _real(value: object) -> bool:
    return isinstance(value, int | float)
