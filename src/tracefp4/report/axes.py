"""Scales of an axis: which values it spans, where its ticks are, how they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Axis:
    """low < high, both positive where log. ticks: values inside, ascending; labels: their text."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def place(self, values: np.ndarray) -> np.ndarray:
        """float64 [n] -> 0..1 from low to high; NaN stays."""
        if self.log:
            return (np.log10(values) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (values - self.low) / (self.high - self.low)


def linear_axis(
    values: np.ndarray, *, zero: bool = False, whole: bool = False, share: bool = False, ticks: int = 5
) -> Axis:
    """Over the finite values, of which there is at least one.

    zero: from 0; whole: ticks at whole numbers only; share: to 1 at most, unless a value is above it.
    """
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    limit = 1.0 if share and high <= 1 else np.inf
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # one value: give it room
        room = abs(high) / 2 or 1.0
        low, high = (low if whole or (zero and low >= 0) else low - room), high + (1.0 if whole else room)
    step = _round_step((high / ticks) - (low / ticks))
    if whole:
        step = max(1.0, step)
    else:  # whole ticks at both ends keep the curve off the frame
        low, high = math.floor(low / step + 1e-9) * step, min(limit, math.ceil(high / step - 1e-9) * step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    marks = tuple(index * step for index in range(first, last + 1))
    return Axis(low, high, False, marks, tuple(_labels(marks, step)))


def log_axis(values: np.ndarray, ticks: int = 5) -> Axis:
    """Over the finite values, all positive, of which there is at least one."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    if last - first > 2:
        stride = math.ceil((last - first) / ticks)
        marks = [10.0**e for e in range(first, last + 1, stride)]
        low, high = 10.0**first, 10.0**last
    else:  # under three decades: 1, 2 and 5 of each that lie near the values
        grid = [m * 10.0**e for e in range(first - 1, last + 2) for m in (1, 2, 5)]
        below, above = max(m for m in grid if m <= low * 1.0001), min(m for m in grid if m >= high * 0.9999)
        if below == above:
            below, above = grid[grid.index(below) - 1], grid[grid.index(above) + 1]
        marks = [m for m in grid if below <= m <= above]
        low, high = below, above
    return Axis(low, high, True, tuple(marks), tuple(number(mark) for mark in marks))


def number(value: float) -> str:
    """Three digits: '0.0123', '1.5e-5', '120k'."""
    size = abs(value)
    if size >= 1e6 or (size and size < 1e-3):
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.4g}" if size >= 100 else f"{value:.3g}"


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))


def _labels(marks: Sequence[float], step: float) -> list[str]:
    largest = max(abs(mark) for mark in marks)
    if largest >= 1e4 or largest < 1e-2:
        return [number(mark) for mark in marks]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(step * 10**digits - round(step * 10**digits)) > 1e-6:
        digits += 1  # steps of 2.5
    return [f"{mark:.{digits}f}" for mark in marks]
