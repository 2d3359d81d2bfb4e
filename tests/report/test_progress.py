"""Progress is lines without a terminal and a bar with one."""

import io
import time

import pytest

from tracefp4.report import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_plain_line_every_few_steps() -> None:
    out = io.StringIO()
    with progress(5, "trace, seed 0", every=2, file=out) as bar:
        for step in range(5):
            bar.step(reward=step / 8)
    assert out.getvalue() == (
        "trace, seed 0: step 2/5  reward 0.125\n"
        "trace, seed 0: step 4/5  reward 0.375\n"
        "trace, seed 0: step 5/5  reward 0.5\n"
    )


def test_a_bar_on_a_terminal() -> None:
    out = Terminal()
    with progress(2, "qat", file=out) as bar:
        bar.step()
        bar.step(reward=0.5)
    assert "qat" in out.getvalue()
    assert "\n" not in out.getvalue().strip("\n\r").split("qat")[0]


def test_a_sentence_between_the_lines() -> None:
    out = io.StringIO()
    with progress(1, "qat", file=out) as bar:
        bar.say("warning: mismatch: [task] is 3 times too hard")
        bar.step()
    assert out.getvalue() == "warning: mismatch: [task] is 3 times too hard\nqat: step 1/1\n"


def test_a_sentence_above_the_bar_stays_one_line() -> None:
    out = Terminal()
    text = "warning: no_advantage: " + "make the problems of [task] easier " * 10
    with progress(2, "qat", file=out) as bar:
        bar.step()
        bar.say(text)
        bar.step()
    assert text in out.getvalue()  # whole: neither folded, nor read as markup, nor overwritten by the bar
    assert out.getvalue().split(text)[1].startswith("\n")


def test_slow_steps_are_shown_with_the_time_left_and_a_resumed_run_counts_from_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with progress(total=200, label="trace", done=100, file=out) as bar:
        for _ in range(3):
            clock[0] += 40.0
            bar.step(reward=0.5)
    assert out.getvalue().splitlines() == [
        "trace: step 101/200  reward 0.5  66 min left",
        "trace: step 102/200  reward 0.5  65 min left",
        "trace: step 103/200  reward 0.5  65 min left",
    ]
