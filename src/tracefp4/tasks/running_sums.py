"""Chains of sums written out step by step; problems and scores come from reasoning-gym's ``chain_sum``.

Prompt ``14+27-5=``, response ``14+27=41;41-5=36;#36``. Only what follows the last ``#`` is scored.
"""

from __future__ import annotations

import re
from functools import lru_cache
from random import Random
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tracefp4.tasks.base import Prompt, TaskConfig
from tracefp4.tasks.generated import MAX_STEP, check_draw, check_enough, check_ordered, first_of_pool
from tracefp4.tasks.tokenizer import EOS_TOKEN, FREE_LETTERS

# chain_sum derives item i from Random(seed + i), so a split is an interval of the seed line. The test pool
# lies near 0; training step s of task seed t lies in its own window above 2**64 that no other step touches.
TEST_SEED = 20_260_000
TEST_POOL = 4096
STEP_WINDOW = 2**20
MAX_TRAIN_PROMPTS = 2**16
# Steps from here up are for the warm start: RL with the same task seed counts from 0 and never meets them.
WARMSTART_FIRST_STEP = 2**30

_TERM = re.compile(r"[+-]?\d+")


class RunningSumsConfig(TaskConfig):
    """How hard the sums are.

    Raises:
        pydantic.ValidationError: an unknown key, a value out of range, or ``min_*`` above ``max_*``.
    """

    name: Literal["running_sums"] = "running_sums"
    min_terms: int = Field(default=3, ge=2, le=96, description="fewest terms of an expression")
    max_terms: int = Field(default=5, ge=2, le=96, description="most terms of an expression")
    min_digits: int = Field(default=1, ge=1, le=6, description="fewest digits of a term")
    max_digits: int = Field(default=2, ge=1, le=6, description="most digits of a term")
    free_letters: int = Field(
        default=4,
        ge=0,
        le=8,
        description="how many letters the reference solution may pick from before each step; 0 writes none",
    )
    careless_letters: int = Field(
        default=0,
        ge=0,
        le=7,
        description="letters of their own that solutions with a slip pick from: carelessness is then a style, which RL "
        "can unlearn by its first letter; 0: they pick as the others",
    )

    @model_validator(mode="after")
    def _ranges_are_ordered(self) -> Self:
        check_ordered(self, "terms", "digits")
        if self.careless_letters and not self.free_letters:
            raise ValueError("careless_letters needs free_letters: a solution without letters shows no style")
        if self.free_letters + self.careless_letters > len(FREE_LETTERS):
            raise ValueError(f"free_letters and careless_letters are more than {len(FREE_LETTERS)} together")
        return self


class RunningSums:
    """The task ``running_sums``; see ``tracefp4.tasks.base.Task`` for the contract of each method."""

    def __init__(self, config: RunningSumsConfig) -> None:
        self.config = config
        self._difficulty = config.model_copy(update={"seed": 0, "free_letters": 0, "careless_letters": 0})
        self._scorer = _dataset(self._difficulty, TEST_SEED, TEST_POOL)

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        """``n`` problems with distinct expressions, none in the test pool; deterministic in (seed, step).

        Raises:
            TracefpError: ``step`` or ``n`` is out of range, or the config admits too few distinct expressions.
        """
        check_draw(step, n, MAX_TRAIN_PROMPTS)
        first_seed = 2**64 + self.config.seed * MAX_STEP * STEP_WINDOW + step * STEP_WINDOW
        # The stride bounds the search: a config with few expressions fails fast instead of spinning.
        candidates = min(STEP_WINDOW, 64 * n + 1024)
        held_out = _test_expressions(self._difficulty)
        prompts = _distinct(self._difficulty, f"train-{step}", first_seed, candidates, n, held_out)
        check_enough(prompts, n, "raise task.max_terms or task.max_digits")
        return prompts

    def test_prompts(self, n: int) -> list[Prompt]:
        """The first ``n`` of the held-out pool (at most 4096 problems), independent of the seed.

        Raises:
            TracefpError: ``n`` is below 1 or above the pool's size.
        """
        return first_of_pool(_test_pool(self._difficulty), n)

    def score(self, prompt: Prompt, response_text: str) -> float:
        """1.0 iff reasoning-gym gives full marks to what follows the last ``#``, else 0.0.

        Text after the end-of-sequence token is ignored. Reasoning-gym tolerates a sign, leading zeros and
        trailing decimals: ``#036`` and ``#+36`` both answer 36.
        """
        written = response_text.split(EOS_TOKEN, 1)[0]
        _, marker, answer = written.rpartition("#")
        if not marker:
            return 0.0
        full = self._scorer.score_answer(answer, entry={"answer": prompt.answer}) == 1.0
        return 1.0 if full else 0.0

    def solution(self, prompt: Prompt) -> str:
        """The running sums of the expression, then ``#`` and the answer; no end-of-sequence token.

        With ``free_letters`` > 0 each step opens with a letter drawn from the first so many of a to h. The
        letter means nothing: it is entropy that a policy can learn but never learn away.
        """
        return self._written(prompt, slip_at=None, slip=0)

    def flawed_solution(self, prompt: Prompt) -> str:
        """As ``solution``, but one step is off by 1, 2 or 10 and the rest follows from it: the answer is wrong.

        Its letters are those of ``careless_letters``, where there are some.
        """
        chance = Random("slip" + prompt.text)
        slip_at = chance.randrange(1, len(_TERM.findall(prompt.text)))
        return self._written(prompt, slip_at, chance.choice((-10, -2, -1, 1, 2, 10)))

    def _written(self, prompt: Prompt, slip_at: int | None, slip: int) -> str:
        terms = _TERM.findall(prompt.text)
        free, careless = self.config.free_letters, self.config.careless_letters
        alphabet = FREE_LETTERS[:free] if slip_at is None or not careless else FREE_LETTERS[free : free + careless]
        letters = Random(prompt.text)  # seeded by the text, so that the function stays pure
        total, steps = int(terms[0]), []
        for index, term in enumerate(terms[1:], start=1):
            after = total + int(term) + (slip if index == slip_at else 0)
            letter = letters.choice(alphabet) if alphabet else ""
            steps.append(f"{letter}{total}{term}={after};")
            total = after
        return "".join(steps) + f"#{total}"


# Shared by all tasks of one difficulty: seeds and free letters do not touch the problems, so callers pass 0.
@lru_cache(maxsize=8)
def _test_pool(config: RunningSumsConfig) -> tuple[Prompt, ...]:
    return tuple(_distinct(config, "test", TEST_SEED, 4 * TEST_POOL, TEST_POOL, frozenset()))


@lru_cache(maxsize=8)
def _test_expressions(config: RunningSumsConfig) -> frozenset[str]:
    return frozenset(prompt.text for prompt in _test_pool(config))


def _distinct(
    config: RunningSumsConfig, prefix: str, first_seed: int, candidates: int, n: int, excluded: frozenset[str]
) -> list[Prompt]:
    """Up to ``n`` prompts out of ``candidates`` items in a row, skipping repeats and ``excluded``."""
    dataset = _dataset(config, first_seed, candidates)
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for index in range(candidates):
        if len(prompts) == n:
            break
        item = dataset[index]
        text = item["metadata"]["expression"].replace(" ", "") + "="
        if text in seen or text in excluded:
            continue
        seen.add(text)
        prompts.append(Prompt(f"{prefix}-{len(prompts)}", text, item["answer"], item["metadata"]))
    return prompts


def _dataset(config: RunningSumsConfig, seed: int, size: int) -> Any:
    # Imported here: reasoning-gym takes over a second, and a command line's help should not wait.
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    return ChainSumDataset(
        ChainSumConfig(
            min_terms=config.min_terms,
            max_terms=config.max_terms,
            min_digits=config.min_digits,
            max_digits=config.max_digits,
            seed=seed,
            size=size,
        )
    )
