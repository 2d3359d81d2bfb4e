"""Small programs in the sandbox."""

from collections.abc import Iterator
from typing import Any

import pytest

from tracefp4.errors import TracefpError
from tracefp4.tasks import build_text_tokenizer, make_task
from tracefp4.tasks.programs import ProgramsConfig
from tracefp4.tasks.sandbox import sandbox_support

ISOLATION = "full" if sandbox_support().full else "weak"
CONFIG = ProgramsConfig(min_steps=2, max_steps=4, isolation=ISOLATION)


@pytest.fixture
def task() -> Iterator[Any]:
    task = make_task(CONFIG)
    yield task
    task.close()


def test_solutions_are_right_and_careless_ones_wrong(task: Any) -> None:
    prompts = task.train_prompts(0, 4)
    good, bad = [task.solution(p) for p in prompts], [task.flawed_solution(p) for p in prompts]
    assert task.score_batch([*prompts, *prompts], [*good, *bad]) == [1.0] * 4 + [0.0] * 4
    for prompt, text in zip(prompts, good, strict=True):
        build_text_tokenizer()(prompt.text + text)
        assert CONFIG.min_steps <= text.count("\n") - 1 <= CONFIG.max_steps


def test_what_is_no_python_is_not_run(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task.check, "score_batch", lambda *_: pytest.fail("it ran"))
    prompt = task.train_prompts(0, 1)[0]
    assert task.score_batch([prompt] * 3, ["for x in", "a=\x00", "(" * 5000]) == [0.0] * 3


def test_a_program_that_prints_something_else(task: Any) -> None:
    prompt = task.train_prompts(0, 1)[0]
    assert task.score(prompt, "print(1)") == 0.0
    assert set(task.metrics()) == {"check/timeouts", "check/errors", "check/limits"}


def test_splits_are_apart_and_repeat(task: Any) -> None:
    held_out = {prompt.text for prompt in task.test_prompts(64)}
    first = [prompt.text for prompt in task.train_prompts(5, 64)]
    assert first == [prompt.text for prompt in task.train_prompts(5, 64)]
    assert len(set(first)) == 64
    assert not held_out & set(first)
    with pytest.raises(TracefpError, match="the held-out pool; got 5000"):
        task.test_prompts(5000)
