"""Greatest common divisors by repeated subtraction, written out; problems and scores come from reasoning-gym's ``gcd``.

Prompt ``462;1071=``, response ``c1071-462=609;a609-462=147;...;d42-21=21;#21``: the smaller number is taken from the
larger until both are equal. A letter before each step is free. Only what follows the last ``#`` is scored.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tracefp4.tasks.base import Prompt, TaskConfig
from tracefp4.tasks.generated import MAX_STEP, check_draw, check_enough, check_ordered, first_of_pool
from tracefp4.tasks.tokenizer import EOS_TOKEN, FREE_LETTERS

# Seeds as in running_sums: the test pool near 0, step s of task seed t in its own window above 2**64.
TEST_SEED = 20_260_000
TEST_POOL = 1024
STEP_WINDOW = 2**20
MAX_TRAIN_PROMPTS = 2**14


class EuclidConfig(TaskConfig):
    """How large the numbers are, and how many subtractions a solution has."""

    name: Literal["euclid"] = "euclid"
    max_value: int = Field(default=999, ge=9, le=10**6, description="largest number")
    min_steps: int = Field(default=6, ge=1, le=256, description="fewest subtractions of a solution")
    max_steps: int = Field(default=16, ge=1, le=256, description="most subtractions of a solution")
    free_letters: int = Field(default=4, ge=0, le=8, description="letters that a step may open with; 0 writes none")

    @model_validator(mode="after")
    def _range_is_ordered(self) -> Self:
        check_ordered(self, "steps")
        return self


class Euclid:
    """The task ``euclid``; see ``tracefp4.tasks.base`` for the contracts Task and SolvedTask."""

    def __init__(self, config: EuclidConfig) -> None:
        self.config = config
        self._difficulty = config.model_copy(update={"seed": 0, "free_letters": 0})
        self._scorer = _dataset(self._difficulty, TEST_SEED, 1)

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        """``n`` distinct problems, none of them held out; deterministic in (seed, step).

        Raises:
            TracefpError: ``step`` or ``n`` is out of range, or the config admits too few problems.
        """
        check_draw(step, n, MAX_TRAIN_PROMPTS)
        first = 2**64 + (self.config.seed * MAX_STEP + step) * STEP_WINDOW
        held_out = frozenset(prompt.text for prompt in _test_pool(self._difficulty))
        prompts = _distinct(self._difficulty, f"train-{step}", first, n, held_out)
        check_enough(prompts, n, "raise task.max_value or widen task.min_steps to task.max_steps")
        return prompts

    def test_prompts(self, n: int) -> list[Prompt]:
        """The first ``n`` of the held-out pool (at most 1024 problems), independent of the seed.

        Raises:
            TracefpError: ``n`` is below 1 or above the pool's size.
        """
        return first_of_pool(_test_pool(self._difficulty), n)

    def score(self, prompt: Prompt, response_text: str) -> float:
        """1.0 iff the library gives full marks to what follows the last ``#``, else 0.0."""
        _, marker, answer = response_text.split(EOS_TOKEN, 1)[0].rpartition("#")
        return float(bool(marker) and self._scorer.score_answer(answer, entry={"answer": prompt.answer}) == 1.0)

    def solution(self, prompt: Prompt) -> str:
        """The subtractions, then ``#`` and the divisor; no end-of-sequence token."""
        written = self._written(prompt)
        assert written is not None  # as many steps as its metadata say
        return written

    def flawed_solution(self, prompt: Prompt) -> str:
        """As ``solution``, but one difference is off and the rest follows from it: the answer is wrong."""
        chance = Random("slip" + prompt.text)
        for _ in range(64):
            slip_at, slip = chance.randrange(prompt.metadata["steps"]), chance.choice((-10, -2, -1, 1, 2, 10))
            text = self._written(prompt, slip_at, slip)
            if text is not None and self.score(prompt, text) == 0.0:
                return text
        return self.solution(prompt).rpartition("#")[0] + f"#{int(prompt.answer) + 1}"

    def _written(self, prompt: Prompt, slip_at: int = -1, slip: int = 0) -> str | None:
        """None where a slip leads to a longer solution than any right one."""
        alphabet, letters = FREE_LETTERS[: self.config.free_letters], Random(prompt.text)
        a, b = prompt.metadata["numbers"]
        steps: list[str] = []
        while a != b:
            if len(steps) == self.config.max_steps:
                return None
            large, small = max(a, b), min(a, b)
            rest = large - small if len(steps) != slip_at else max(1, large - small + slip)
            steps.append(f"{letters.choice(alphabet) if alphabet else ''}{large}-{small}={rest};")
            a, b = small, rest
        return "".join(steps) + f"#{a}"


def subtractions(a: int, b: int) -> int:
    """How often the smaller of two numbers is taken from the larger until they are equal."""
    count = 0
    while b:
        count, a, b = count + a // b, b, a % b
    return count - 1


@lru_cache(maxsize=8)
def _test_pool(config: EuclidConfig) -> tuple[Prompt, ...]:
    pool = _distinct(config, "test", TEST_SEED, TEST_POOL, frozenset())
    # A config with few problems keeps most of them for training.
    return tuple(pool if len(pool) == TEST_POOL else pool[: len(pool) // 8])


def _distinct(config: EuclidConfig, prefix: str, first_seed: int, n: int, excluded: frozenset[str]) -> list[Prompt]:
    """Up to ``n`` problems of a fitting length, skipping repeats and ``excluded``."""
    candidates = min(STEP_WINDOW, 16 * n + 2048)  # a config with few problems fails fast instead of spinning
    dataset = _dataset(config, first_seed, candidates)
    prompts: list[Prompt] = []
    seen = set(excluded)
    for index in range(candidates):
        if len(prompts) == n:
            break
        item = dataset[index]
        a, b = item["metadata"]["numbers"]
        text, steps = f"{a};{b}=", subtractions(max(a, b), min(a, b))
        if text in seen or not config.min_steps <= steps <= config.max_steps:
            continue
        seen.add(text)
        prompts.append(Prompt(f"{prefix}-{len(prompts)}", text, item["answer"], {"numbers": [a, b], "steps": steps}))
    return prompts


def _dataset(config: EuclidConfig, seed: int, size: int) -> Any:
    # Imported here: reasoning-gym takes over a second, and a command line's help should not wait.
    from reasoning_gym.arithmetic.gcd import GCDConfig, GCDDataset

    return GCDDataset(GCDConfig(min_value=2, max_value=config.max_value, seed=seed, size=size))
