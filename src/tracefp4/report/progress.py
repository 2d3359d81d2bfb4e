"""Progress of a loop: a bar on a terminal, one plain line every few steps anywhere else.

with progress(total=50, label="trace, seed 0") as bar:
    for _ in range(50):
        bar.step(reward=0.41)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0
"""A log file of slow steps shows that the run lives."""


class Bar(Protocol):
    """What `progress` yields."""

    def step(self, **figures: float) -> None:
        """One step is done; `figures` are shown beside it."""

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""


@contextmanager
def progress(
    total: int, label: str, *, done: int = 0, every: int = 10, file: TextIO | None = None, unit: str = "step"
) -> Iterator[Bar]:
    """A bar on `file` (standard error unless told) if that is a terminal, else lines with the time left.

    done: steps of the total that an earlier process took. A line is written every `every` steps and at the end, and
    wherever `LINE_SECONDS` have passed since the last one. unit: what a step is called in such a line.
    """
    file = file or sys.stderr
    if not file.isatty():
        yield _Lines(total, label, every, file, unit, done)
        return
    with Progress(*bar_columns(), console=Console(file=file), transient=True) as display:
        yield _RichBar(display, total, label, done)


def bar_columns() -> list[TextColumn | BarColumn | MofNCompleteColumn | TimeRemainingColumn]:
    """The columns of every bar of this package; a task carries a `figures` text."""
    return [
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("[dim]{task.fields[figures]}"),
    ]


class _Lines:
    def __init__(self, total: int, label: str, every: int, file: TextIO, unit: str = "step", done: int = 0) -> None:
        self.total, self.label, self.every, self.file, self.unit = total, label, max(1, every), file, unit
        self.done = self.first = done
        self.began = self.last = time.monotonic()

    def step(self, **figures: float) -> None:
        self.done += 1
        now = time.monotonic()
        if self.done % self.every == 0 or self.done == self.total or now - self.last >= LINE_SECONDS:
            self.last = now
            text = f"{self.label}: {self.unit} {self.done}/{self.total}  {format_figures(figures)}".rstrip()
            self.say(text + self._time_left(now))

    def _time_left(self, now: float) -> str:
        """'  12 min left' by the mean of this process's steps; nothing below a minute."""
        seconds = (now - self.began) / (self.done - self.first) * (self.total - self.done)
        if seconds < 60:
            return ""
        return f"  {seconds / 3600:.1f} h left" if seconds >= 5400 else f"  {seconds / 60:.0f} min left"

    def say(self, text: str) -> None:
        with suppress(OSError):  # a log on a full disk is no reason to end a run
            print(text, file=self.file, flush=True)


class _RichBar:
    def __init__(self, display: Progress, total: int, label: str, done: int = 0) -> None:
        self.display = display
        self.task = display.add_task(label, total=total, completed=done, figures="")

    def step(self, **figures: float) -> None:
        self.display.update(self.task, advance=1, figures=format_figures(figures))

    def say(self, text: str) -> None:
        self.display.console.print(text, markup=False, highlight=False, soft_wrap=True)


def format_figures(figures: dict[str, float]) -> str:
    """'reward 0.41  kl 0.00012': three significant digits each."""
    return "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
