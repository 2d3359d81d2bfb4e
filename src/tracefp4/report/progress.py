"""Progress of a loop: a bar on a terminal, one plain line every few steps anywhere else.

with progress(total=50, label="trace, seed 0") as bar:
    for _ in range(50):
        bar.step(reward=0.41)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar(Protocol):
    """What `progress` yields."""

    def step(self, **figures: float) -> None:
        """One step is done; `figures` are shown beside it."""

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""


@contextmanager
def progress(
    total: int, label: str, *, every: int = 10, file: TextIO | None = None, unit: str = "step"
) -> Iterator[Bar]:
    """A bar on `file` (standard error unless told) if that is a terminal, else a line every `every` steps.

    unit: what a step is called in such a line.
    """
    file = file or sys.stderr
    if not file.isatty():
        yield _Lines(total, label, every, file, unit)
        return
    with Progress(*bar_columns(), console=Console(file=file), transient=True) as display:
        yield _RichBar(display, total, label)


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
    def __init__(self, total: int, label: str, every: int, file: TextIO, unit: str = "step") -> None:
        self.total, self.label, self.every, self.file, self.unit = total, label, max(1, every), file, unit
        self.done = 0

    def step(self, **figures: float) -> None:
        self.done += 1
        if self.done % self.every == 0 or self.done == self.total:
            text = f"{self.label}: {self.unit} {self.done}/{self.total}  {format_figures(figures)}".rstrip()
            self.say(text)

    def say(self, text: str) -> None:
        with suppress(OSError):  # a log on a full disk is no reason to end a run
            print(text, file=self.file, flush=True)


class _RichBar:
    def __init__(self, display: Progress, total: int, label: str) -> None:
        self.display = display
        self.task = display.add_task(label, total=total, figures="")

    def step(self, **figures: float) -> None:
        self.display.update(self.task, advance=1, figures=format_figures(figures))

    def say(self, text: str) -> None:
        self.display.console.print(text, markup=False, highlight=False, soft_wrap=True)


def format_figures(figures: dict[str, float]) -> str:
    """'reward 0.41  kl 0.00012': three significant digits each."""
    return "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
