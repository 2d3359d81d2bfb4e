"""A figure as inline SVG: styled by the page's CSS, so that it follows dark mode, text size and print.

One unit is one CSS pixel on a 340 px wide phone; the page scales the picture up, not its text (`page/base.css`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape

from tracefp4.report.axes import Axis, linear_axis, log_axis, number
from tracefp4.report.figures import Band, Curve, Figure
from tracefp4.report.style import look

WIDTH, HEIGHT = 340, 224
RIGHT, TOP, BOTTOM = 16, 10, 44
DIGIT = 10.2
"""Width of a digit at the largest text size."""
MARKED = 8
"""Markers along a long curve."""


def tag(name: str, *children: Markup | str, **attributes: object) -> Markup:
    """An element; text and attributes are escaped. `class_` and `aria_label` stand for class and aria-label."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{written}>{''.join(escape(child) for child in children)}</{name}>")


def figure_axes(figure: Figure) -> tuple[Axis, Axis]:
    """(horizontal, vertical) around all curves and bands."""
    xs = np.concatenate([curve.x for curve in figure.curves])
    ys, plot = figure.values(), figure.plot
    vertical = log_axis(ys) if plot.log else linear_axis(ys, zero=plot.zero, share=plot.share, ticks=4)
    return linear_axis(xs, whole=True, ticks=6 if np.nanmax(xs) < 1000 else 4), vertical


def figure_svg(figure: Figure) -> Markup:
    """The whole picture. Its ids start with the plot's key."""
    x_axis, y_axis = figure_axes(figure)
    frame = _Frame(x_axis, y_axis)
    key = figure.plot.key
    parts = [
        tag("title", f"{figure.plot.title} ({figure.plot.unit}) over {figure.plot.x}", id=f"{key}-title"),
        tag("desc", describe(figure), id=f"{key}-desc"),
        *frame.grid(figure.plot.x),
        *(frame.band(band) for band in figure.bands),
        *(frame.curve(curve) for curve in sorted(figure.curves, key=lambda c: not c.thin)),
    ]
    return tag(
        "svg",
        *parts,
        class_="plot smooth" if figure.window else "plot",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        data_box=f"{frame.left} {TOP} {WIDTH - RIGHT} {HEIGHT - BOTTOM}",
        data_x=f"{x_axis.low!r} {x_axis.high!r}",
        data_y=f"{y_axis.low!r} {y_axis.high!r}",
        data_log=int(y_axis.log),
        data_name=figure.plot.x,
    )


def describe(figure: Figure) -> str:
    """What a reader who does not see the picture gets: first, last, smallest and largest value of each curve."""
    return " ".join(_described(curve, figure.plot.x) for curve in figure.curves if not curve.thin or not figure.bands)


def swatch(group: int) -> Markup:
    """A short piece of a group's line, for the legend."""
    line = tag("path", d="M2 8H38", class_=f"line c{look(group).colour}", stroke_dasharray=look(group).dash or "none")
    mark = _marker(look(group).marker, 20, 8, f"mark c{look(group).colour}")
    return tag("svg", line, mark, class_="swatch", viewBox="0 0 40 16", aria_hidden="true")


class _Frame:
    """Places values in the picture."""

    def __init__(self, x_axis: Axis, y_axis: Axis) -> None:
        self.x_axis, self.y_axis = x_axis, y_axis
        self.left = round(8 + DIGIT * max(4, *(len(label) for label in y_axis.labels)))

    def x(self, values: np.ndarray) -> np.ndarray:
        return self.left + self.x_axis.place(values) * (WIDTH - RIGHT - self.left)

    def y(self, values: np.ndarray) -> np.ndarray:
        return HEIGHT - BOTTOM - self.y_axis.place(values) * (HEIGHT - BOTTOM - TOP)

    def grid(self, x_name: str) -> list[Markup]:
        """Lines and labels of both axes."""
        bottom = HEIGHT - BOTTOM
        parts = []
        for y, label in zip(self.y(np.array(self.y_axis.ticks)), self.y_axis.labels, strict=True):
            parts.append(tag("path", d=f"M{self.left} {_n(y)}H{WIDTH - RIGHT}", class_="tick"))
            parts.append(tag("text", label, x=self.left - 5, y=_n(y + 5), text_anchor="end"))
        parts.append(tag("path", d=f"M{self.left} {bottom}H{WIDTH - RIGHT}", class_="axis"))
        ticks = self.x(np.array(self.x_axis.ticks))
        for x, label in zip(ticks, self.x_axis.labels, strict=True):
            parts.append(tag("path", d=f"M{_n(x)} {bottom}v4", class_="axis"))
            parts.append(tag("text", label, x=_n(x), y=bottom + 19, text_anchor="middle"))
        parts.append(tag("text", x_name, x=(self.left + WIDTH - RIGHT) // 2, y=HEIGHT - 6, text_anchor="middle"))
        return parts

    def band(self, band: Band) -> Markup:
        x = np.concatenate([band.x, band.x[::-1]])
        y = np.concatenate([band.high, band.low[::-1]])
        shape = _path(self.x(x), self.y(y)) + "Z"
        return tag("path", d=shape, class_=f"band c{look(band.group).colour}", data_group=band.group)

    def curve(self, curve: Curve) -> Markup:
        """A group: the line, its markers and a title, which browsers show on hover."""
        xs, ys, style = self.x(curve.x), self.y(curve.y), look(curve.group)
        if curve.thin:
            line = tag("path", d=_path(xs, ys), class_=f"seed c{style.colour}")
            return tag("g", tag("title", curve.label), line, data_group=curve.group, class_="seeds")
        line = tag(
            "path",
            d=_path(xs, ys),
            class_=f"line c{style.colour}",
            stroke_dasharray=style.dash or "none",
            data_label=curve.label,
        )
        marks = [_marker(style.marker, xs[i], ys[i], f"mark c{style.colour}") for i in _marked(ys, curve.points)]
        return tag("g", tag("title", curve.label), line, *marks, data_group=curve.group)


def _marked(ys: np.ndarray, every: bool) -> list[int]:
    """Where markers go: first, last and a few between; on each point that stands alone between gaps, too."""
    known = np.flatnonzero(np.isfinite(ys))
    if every or len(known) <= MARKED:
        return known.tolist()
    spread = known[np.linspace(0, len(known) - 1, MARKED).round().astype(int)].tolist()
    padded = np.concatenate([[np.nan], ys, [np.nan]])
    alone = [int(i) for i in known if np.isnan(padded[i]) and np.isnan(padded[i + 2])]
    return sorted({*spread, *alone})


def _path(xs: np.ndarray, ys: np.ndarray) -> str:
    """Straight pieces; a gap at every NaN."""
    out, pen_down = [], False
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        if not math.isfinite(y):
            pen_down = False
            continue
        out.append(f"{'L' if pen_down else 'M'}{_n(x)} {_n(y)}")
        pen_down = True
    return "".join(out)


_SHAPES = {
    "circle": "m-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0z",
    "square": "m-3.2-3.2h6.4v6.4h-6.4z",
    "triangle": "m0-4.2l4 7.4h-8z",
    "diamond": "m0-4.6l4 4.6l-4 4.6l-4-4.6z",
    "cross": "m-3.4-3.4l6.8 6.8m0-6.8l-6.8 6.8",
    "plus": "m-4.2 0h8.4m-4.2-4.2v8.4",
    "down": "m0 4.2l4-7.4h-8z",
    "bar": "m0-5v10",
    "star": "m-4.2 0h8.4m-6.4-3.6l4.4 7.2m0-7.2l-4.4 7.2",
}


def _marker(shape: str, x: float, y: float, class_: str) -> Markup:
    return tag("path", d=f"M{_n(x)} {_n(y)}{_SHAPES[shape]}", class_=class_)


def _n(value: float) -> str:
    """Two decimals, as short as they go; never '-0'."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _described(curve: Curve, x_name: str) -> str:
    known: Sequence[int] = np.flatnonzero(np.isfinite(curve.y)).tolist()
    first, last = known[0], known[-1]
    values = curve.y[known]
    if len(known) == 1:
        return f"{curve.label}: {number(values[0])} at {x_name} {curve.x[first]:.0f}."
    return (
        f"{curve.label}: {number(values[0])} at {x_name} {curve.x[first]:.0f}, {number(values[-1])} at {x_name} "
        f"{curve.x[last]:.0f}; from {number(values.min())} to {number(values.max())}."
    )
