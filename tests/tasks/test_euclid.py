"""Greatest common divisors by subtraction."""

import math

import pytest

from tracefp4.errors import TracefpError
from tracefp4.tasks import build_tokenizer, make_task
from tracefp4.tasks.euclid import EuclidConfig, subtractions

CONFIG = EuclidConfig(max_value=199, min_steps=4, max_steps=12)


def test_subtractions_are_counted() -> None:
    assert subtractions(1071, 462) == 11
    assert subtractions(5, 5) == 0
    assert subtractions(7, 1) == 6


def test_solutions_are_right_and_careless_ones_wrong() -> None:
    task = make_task(CONFIG)
    for prompt in task.train_prompts(0, 64):
        text = task.solution(prompt)
        assert task.score(prompt, text) == 1.0
        steps = text.split(";")[:-1]
        assert CONFIG.min_steps <= len(steps) == prompt.metadata["steps"] <= CONFIG.max_steps
        for step in steps:
            large, rest = step[1:].split("-")
            small, difference = rest.split("=")
            assert int(large) - int(small) == int(difference)
        assert text.endswith(f"#{math.gcd(*prompt.metadata['numbers'])}")
        flawed = task.flawed_solution(prompt)
        assert task.score(prompt, flawed) == 0.0
        assert len(flawed.split(";")) - 1 <= CONFIG.max_steps
        build_tokenizer()(prompt.text + text + flawed)  # its characters are all known


def test_splits_are_apart_and_repeat() -> None:
    task, again = make_task(CONFIG), make_task(CONFIG.model_copy(update={"seed": 1}))
    held_out = {prompt.text for prompt in task.test_prompts(64)}
    assert held_out == {prompt.text for prompt in again.test_prompts(64)}
    first = [prompt.text for prompt in task.train_prompts(5, 64)]
    assert first == [prompt.text for prompt in task.train_prompts(5, 64)]
    assert first != [prompt.text for prompt in again.train_prompts(5, 64)]
    assert not held_out & set(first)


@pytest.mark.parametrize("response", ["", "21", "#", "#22", "#twenty-one", "21#"])
def test_other_answers_score_nothing(response: str) -> None:
    task = make_task(CONFIG)
    prompt = task.train_prompts(0, 1)[0]
    assert task.score(prompt, response.replace("22", str(int(prompt.answer) + 1))) == 0.0


def test_too_few_problems() -> None:
    with pytest.raises(TracefpError, match=r"gives only \d+ distinct training problems, 500 were asked for"):
        make_task(EuclidConfig(max_value=12, min_steps=2, max_steps=3)).train_prompts(0, 500)
    with pytest.raises(ValueError, match="min_steps = 9 is above max_steps = 8"):
        EuclidConfig(min_steps=9, max_steps=8)
