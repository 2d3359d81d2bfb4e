"""From runs to figures: which curves a plot holds. Drawing them is for `svg` and `export`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tracefp4.report import catalog
from tracefp4.report.catalog import LAYER, PASS_RATE, Plot
from tracefp4.report.runs import Group, Run, Series

MAX_POINTS = 1000
"""Of a curve; a longer one keeps the smallest and the largest value of each of about MAX_POINTS / 2 equal stretches."""

SMOOTH_FROM, SMOOTH_PARTS = 150, 50
"""Lines of more steps than the first are drawn bold as a running mean over that part of them, and thin as they are."""


@dataclass(frozen=True)
class Curve:
    """One line. x, y: float64 [n], y finite or NaN at a gap; thin: one seed of several; points: no line between."""

    group: int
    label: str
    x: np.ndarray
    y: np.ndarray
    thin: bool = False
    points: bool = False


@dataclass(frozen=True)
class Band:
    """Smallest and largest value over seeds; float64 [n] each, finite."""

    group: int
    x: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass
class Figure:
    """A plot with its curves. notes: what its caption must say; extent: values the axis spans besides the curves';
    window: steps of the running mean that bold lines and bands are of, 0 for none."""

    plot: Plot
    curves: list[Curve] = field(default_factory=list)
    bands: list[Band] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extent: tuple[float, ...] = ()
    window: int = 0

    def values(self) -> np.ndarray:
        """All that the value axis must span: float64 [n], NaN among them."""
        edges = [edge for band in self.bands for edge in (band.low, band.high)]
        return np.concatenate([*(curve.y for curve in self.curves), *edges, np.array(self.extent)])


@dataclass
class FigureSection:
    """absent: a line for each plot that has no data, with the reason, and one for those that are 0 throughout."""

    key: str
    title: str
    text: str
    figures: list[Figure]
    absent: list[str]


def build_sections(groups: Sequence[Group]) -> list[FigureSection]:
    """All sections of a report, in order."""
    runs = [run for group in groups for run in group.runs]
    metrics = sorted({name for run in runs for name in run.series})
    sections = []
    for section in catalog.SECTIONS:
        plots = list(section.plots)
        if section.key == "codes":
            plots += catalog.layer_plots(metrics)
        if section.key == "guidance":
            plots += catalog.fallback_plots(metrics)
        sections.append(_section(section.key, section.title, section.text, plots, groups))
    others = catalog.other_plots(metrics)
    if others:
        sections.append(_section("other", "Other metrics", "Logged, and unknown to this report.", others, groups))
    return sections


def _section(key: str, title: str, text: str, plots: Sequence[Plot], groups: Sequence[Group]) -> FigureSection:
    figures, absent, zero = [], [], []
    for plot in plots:
        figure = build_figure(plot, groups)
        if not figure.curves:
            absent.append(f"{plot.title} ({plot.metric}): {_why_empty(plot, groups)}")
        elif not figure.plot.log and not any(np.nan_to_num(curve.y, nan=1.0).any() for curve in figure.curves):
            zero.append(f"{plot.title} ({plot.metric})")
        else:
            figures.append(figure)
    if zero:
        absent.append(f"0 at every step of every run that logs it: {', '.join(zero)}.")
    for figure in figures:
        if figure.plot.pair:
            alike = np.concatenate([other.values() for other in figures if other.plot.pair == figure.plot.pair])
            figure.extent = (float(np.nanmin(alike)), float(np.nanmax(alike)))
    return FigureSection(key, title, text, figures, absent)


def build_figure(plot: Plot, groups: Sequence[Group]) -> Figure:
    """The curves of one plot. Without any curve where no run has a finite value of it."""
    runs = [run for group in groups for run in group.runs]
    found = {id(run): series_of(plot, run) for run in runs}
    logged = [series for series in found.values() if series is not None]
    longest = max((len(series.steps) for series in logged), default=0)
    figure = Figure(plot)
    if longest > SMOOTH_FROM and plot.x == "step":
        figure.window = math.ceil(longest / SMOOTH_PARTS)
    for group in groups:
        drawable = [(run, _drawable(s, plot.log)) for run in group.runs if (s := found[id(run)]) is not None]
        present = [(run, series) for run, series in drawable if np.isfinite(series.values).any()]
        if present:
            _add_group(figure, group, present)
    if figure.curves:
        missing = [run for run in runs if found[id(run)] is None]
        below = sum(int((series.values <= 0).sum()) for series in logged) if plot.log else 0
        figure.notes += _notes(figure, longest, below, missing, runs)
    return figure


def _notes(figure: Figure, longest: int, below: int, missing: Sequence[Run], runs: Sequence[Run]) -> list[str]:
    notes = []
    if missing:
        notes.append(f"Not logged: {catalog.reasons_absent(figure.plot.metric, missing, runs)}.")
    if below:
        notes.append(f"{below} values of 0 or less have no place on a log axis.")
    if figure.window:
        notes.append(f"Bold: running mean over {figure.window} steps; thin: every step.")
    if longest > MAX_POINTS:
        parts = MAX_POINTS // 2 - 1
        notes.append(f"{longest:,} steps, drawn by the smallest and the largest value of each of {parts} stretches.")
    return notes


def series_of(plot: Plot, run: Run) -> Series | None:
    """What a plot draws of a run; None where the run has nothing of it."""
    if plot.metric == PASS_RATE:
        return pass_rate_series(run)
    if plot.x == "layer":
        return layer_series(plot.metric, run)
    return run.series.get(plot.metric)


def pass_rate_series(run: Run) -> Series | None:
    """Pass rates over steps done: 0 is before the first step. The ends are in final.json."""
    start, end, _ = run.pass_rates()
    logged = run.series.get(PASS_RATE)
    points: dict[int, float] = {} if start is None else {0: start}
    if logged is not None:
        points |= {int(step) + 1: float(value) for step, value in zip(logged.steps, logged.values, strict=True)}
    if end is not None:
        points[run.steps_done] = end
    if not points:
        return None
    return Series(np.array(sorted(points), dtype=np.int64), np.array([points[step] for step in sorted(points)]))


def layer_series(prefix: str, run: Run) -> Series | None:
    """Mean over the last quarter of the probed steps, by layer."""
    values = {}
    for name, series in run.series.items():
        match = LAYER.match(name)
        if match and f"{match['rate']}/{match['site']}" == prefix:
            tail = series.last_quarter()
            values[int(match["layer"])] = float(tail.mean()) if len(tail) else np.nan
    if not values:
        return None
    return Series(np.array(sorted(values), dtype=np.int64), np.array([values[layer] for layer in sorted(values)]))


def _add_group(figure: Figure, group: Group, present: Sequence[tuple[Run, Series]]) -> None:
    """The bold line of a group: its only run, or the mean over the steps that all its seeds have, with a band."""
    if len(present) > 1 or figure.window:
        for run, series in present:
            figure.curves.append(_curve(group, f"{group.label}, seed {run.seed}", series, thin=True))
    smooth = [running_mean(series, figure.window) for _, series in present]
    if len(present) == 1:
        figure.curves.append(_curve(group, group.label, smooth[0], points=figure.plot.metric == PASS_RATE))
        return
    steps, values = common_steps(smooth)
    if len(steps):
        mean = Series(steps, values.mean(axis=0))
        figure.curves.append(_curve(group, f"{group.label}, mean of {len(present)} seeds", mean))
        x, low = downsample(steps, values.min(axis=0), MAX_POINTS // 2, "min")
        _, high = downsample(steps, values.max(axis=0), MAX_POINTS // 2, "max")
        figure.bands.append(Band(group.index, x, low, high))


def running_mean(series: Series, width: int) -> Series:
    """Centred, over the finite ones of `width` logged steps, fewer at the ends; NaN stays NaN. 0: the series itself."""
    if not width:
        return series
    known = np.isfinite(series.values)
    totals = np.concatenate([[0.0], np.cumsum(np.where(known, series.values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    place = np.arange(len(known))
    first, end = np.maximum(place - width // 2, 0), np.minimum(place - width // 2 + width, len(known))
    means = (totals[end] - totals[first]) / np.maximum(counts[end] - counts[first], 1)
    return Series(series.steps, np.where(known, means, np.nan))


def common_steps(series: Sequence[Series]) -> tuple[np.ndarray, np.ndarray]:
    """(steps int64 [n], values float64 [seeds, n]) where every seed has a finite value."""
    finite = [one.finite for one in series]
    steps = finite[0].steps
    for one in finite[1:]:
        steps = np.intersect1d(steps, one.steps, assume_unique=True)
    return steps, np.stack([one.values[np.searchsorted(one.steps, steps)] for one in finite])


def _curve(group: Group, label: str, series: Series, thin: bool = False, points: bool = False) -> Curve:
    x, y = downsample(series.steps, series.values, MAX_POINTS, "both")
    return Curve(group.index, label, x, y, thin, points)


def downsample(x: np.ndarray, y: np.ndarray, limit: int, keep: str) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` points. keep: "both" the smallest and largest of each stretch, where they are, and the two ends;
    "min" or "max" one of them, at the middle of the stretch. NaN stays where a stretch holds nothing else."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    if len(x) <= limit:
        return x, y
    stretches = np.array_split(np.arange(len(x)), limit // 2 - 1 if keep == "both" else limit)
    picked_x, picked_y = [], []
    ends = {0, len(x) - 1}
    for part in stretches:
        finite = part[np.isfinite(y[part])]
        if not len(finite):
            finite = part[:1]
        low, high = finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]
        if keep == "both":
            chosen = sorted({low, high, *(ends & {part[0], part[-1]})})
            picked_x += [x[i] for i in chosen]
            picked_y += [y[i] for i in chosen]
        else:
            picked_x.append(x[part[len(part) // 2]])
            picked_y.append(y[low if keep == "min" else high])
    return np.array(picked_x), np.array(picked_y)


def _drawable(series: Series, log: bool) -> Series:
    """What no axis can show becomes a gap: beyond 1e300, and 0 or less where it is logarithmic."""
    values = np.nan_to_num(series.values, nan=np.inf)
    shown = (np.abs(values) < 1e300) & (values > 1e-300 if log else True)
    return Series(series.steps, np.where(shown, series.values, np.nan))


def _why_empty(plot: Plot, groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    lacking = [run for run in runs if series_of(plot, run) is None]
    reasons = [f"not logged: {catalog.reasons_absent(plot.metric, lacking, runs)}"] if lacking else []
    if len(lacking) < len(runs):
        what = "null or not above 0, which a log axis cannot show" if plot.log else "null"
        reasons.append(f"every logged value is {what}")
    return "; ".join(reasons) + "."
