"""The figures as PNG files, and every logged value as one long table."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from tracefp4.files import write_atomic
from tracefp4.report.figures import Figure, FigureSection
from tracefp4.report.logger import ensure_dir
from tracefp4.report.runs import Group, ReportError
from tracefp4.report.style import look
from tracefp4.report.svg import figure_axes

CSV_COLUMNS = ("run", "method", "seed", "step", "metric", "value")


def check_target(path: Path, kinds: tuple[str, ...] = ()) -> None:
    """Raises ReportError where ``path`` is there and no file that could be replaced. kinds: endings of names that may
    be; a recipe or metrics named by mistake stays."""
    if kinds and path.is_file() and path.suffix.lower() not in kinds:
        raise ReportError(f"{path} is there and no {kinds[0]} file: it is left alone, choose another name")
    if path.is_dir():
        raise ReportError(f"{path} is a folder: give the name of a file to write")
    if path.exists() and not path.is_file():  # a rename would put the page in the place of a device or a pipe
        raise ReportError(f"{path} is no regular file: give the name of a file to write")


def write_export(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """A reader sees the old file or the whole new one. Makes missing folders. Raises TracefpError if it cannot."""
    check_target(path)
    ensure_dir(path.parent)
    write_atomic(path, write)


def write_csv(path: Path, groups: Sequence[Group]) -> None:
    """A row a value: run, method, seed, step, metric, value (empty where it was null); every step, nothing left out.

    The pass rates of final.json stand as eval/pass_rate_start, at step 0, and eval/pass_rate_end, after the last step.
    """

    def write(file: IO[bytes]) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        table = csv.writer(text, lineterminator="\n")
        table.writerow(CSV_COLUMNS)
        for run in (run for group in groups for run in group.runs):
            about = (run.name, run.method, "" if run.seed is None else run.seed)
            for metric, series in run.series.items():
                for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                    table.writerow((*about, step, metric, "" if math.isnan(value) else repr(value)))
            start, end, _ = run.pass_rates()
            for key, step, rate in (("start", 0, start), ("end", run.steps_done, end)):
                if rate is not None:
                    table.writerow((*about, step, f"eval/pass_rate_{key}", repr(rate)))
        text.flush()
        text.detach()  # the file is its owner's to close

    write_export(path, write)


def write_pngs(folder: Path, sections: Sequence[FigureSection], groups: Sequence[Group]) -> list[Path]:
    """One PNG a figure, named after its metric; the same bytes for the same runs and matplotlib."""
    ensure_dir(folder)
    written = []
    for figure in (figure for section in sections for figure in section.figures):
        path = folder / f"{figure.plot.key}.png"
        picture = _draw(figure, groups)
        write_export(path, lambda file, content=picture: file.write(content))  # type: ignore[misc]
        written.append(path)
    return written


def _draw(figure: Figure, groups: Sequence[Group]) -> bytes:
    # Imported on use, and without pyplot, which would look for a display.
    from matplotlib import style as styles
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    # $ in a run's name is not the start of a formula; the user's own matplotlibrc does not apply.
    with styles.context(["default", {"text.parse_math": False}]):
        canvas = Canvas(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
        for band in figure.bands:
            axes.fill_between(band.x, band.low, band.high, color=look(band.group).matplotlib["color"], alpha=0.15, lw=0)
        for curve in sorted(figure.curves, key=lambda c: not c.thin):
            style = look(curve.group).matplotlib
            if curve.thin:
                axes.plot(curve.x, curve.y, color=style["color"], lw=0.6, alpha=0.3 if figure.window else 0.5)
                continue
            every = max(1, len(curve.x) // 8)
            axes.plot(curve.x, curve.y, lw=1.8, ms=5, mfc="white", markevery=every, label=curve.label, **style)  # type: ignore[arg-type]
        _, vertical = figure_axes(figure)
        axes.set_yscale("log" if vertical.log else "linear")
        axes.minorticks_off()
        axes.set_yticks(vertical.ticks, labels=vertical.labels)
        axes.set(ylim=(vertical.low, vertical.high), title=figure.plot.title, ylabel=figure.plot.unit)
        axes.set_xlabel(figure.plot.x)
        axes.grid(alpha=0.3, lw=0.6)
        if len(axes.get_legend_handles_labels()[0]) > 4:
            canvas.legend(fontsize="small", loc="outside right upper")
        else:
            axes.legend(fontsize="small")
        if figure.notes:
            canvas.supxlabel(textwrap.fill(" ".join(figure.notes), 110), fontsize=7)
        out = io.BytesIO()
        canvas.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()
