"""A mixture of reasoning-gym's procedural families; problems and scores are the library's own."""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from random import Random
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tracefp4.config import did_you_mean
from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Prompt, TaskConfig
from tracefp4.tasks.extract import INSTRUCTIONS, AnswerFormat, extract_answer
from tracefp4.tasks.generated import MAX_STEP, check_draw
from tracefp4.tasks.pool import stable_hash

# Item i of a family is drawn from the seed + i, so a split is an interval of the seed line, as in running_sums: the
# held-out pool lies near 0, and step s of task seed t in its own window above 2**64 that no other step touches.
TEST_SEED = 20_260_000
STEP_WINDOW = 2**20
MAX_TRAIN_PROMPTS = 2**16
# Families whose generator is numpy's take 32 bits. Their windows are drawn by a hash, and may meet another step's;
# they still keep clear of the held-out pool.
NARROW_SEEDS = frozenset({"pool_matrix"})
MAX_ANSWER_LENGTH = 4096

# Some of the library's scorers hand the answer to a computer algebra system, which would work on 9**9**9 for ever.
_ENDLESS = re.compile(r"(\*\*|\^)\s*\(?\s*[-+]?\d{4,}|(\*\*|\^)[^-+*/]*(\*\*|\^)|\d{4,}\)*\s*!|factorial", re.I)


class ReasoningGymConfig(TaskConfig):
    """families: of the library's registry. weights: relative frequency, 1 where a family is not named.
    options: settings of the library's own config, family by family. answer_format: what the policy is asked for and
    where its answer is looked for. instruction: the sentence that asks for it, by default the format's own.
    partial_credit: keep the library's score between 0 and 1; else full marks are 1 and all else 0. test_size: of the
    held-out pool.
    """

    name: Literal["reasoning_gym"] = "reasoning_gym"
    families: list[str] = Field(default=["chain_sum"], min_length=1)
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    options: dict[str, dict[str, Any]] = Field(default={})
    answer_format: AnswerFormat = "auto"
    instruction: str | None = None
    partial_credit: bool = False
    test_size: int = Field(default=256, ge=1, le=2**16)

    @model_validator(mode="after")
    def _families_are_named_once(self) -> Self:
        for name in self.families:
            if self.families.count(name) > 1:
                raise ValueError(f"families names {name} twice; give it a weight instead")
        for key in ("weights", "options"):
            for name in getattr(self, key):
                if name not in self.families:
                    raise ValueError(f"{key}.{name} is set, but {name} is not among the families")
        return self


class ReasoningGym:
    """The task ``reasoning_gym``; see ``tracefp4.tasks.base.Task`` for the contract of each method."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        self.config = config
        self._weights = [config.weights.get(name, 1.0) for name in config.families]
        self._scorers = {name: self._family(name, TEST_SEED, 1) for name in config.families}
        for name in config.families:
            self._check(name)
        self._test = lru_cache(maxsize=1)(self._make_test)
        self.description = f"reasoning-gym families {', '.join(config.families)}, answers as {config.answer_format}"

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        """``n`` problems with distinct texts, none in the held-out pool; deterministic in (seed, step).

        Raises:
            TracefpError: ``step`` or ``n`` is out of range, or a family has too few distinct problems.
        """
        check_draw(step, n, MAX_TRAIN_PROMPTS)
        window = (self.config.seed * MAX_STEP + step) * STEP_WINDOW
        mixture = Random(f"mixture {self.config.seed} {step}")
        return self._distinct(f"train-{step}", window, mixture, n, frozenset(p.text for p in self._test()))

    def test_prompts(self, n: int) -> list[Prompt]:
        """The first ``n`` of the held-out pool, independent of the seed.

        Raises:
            TracefpError: ``n`` is below 1 or above the pool's size.
        """
        pool = self._test()
        if not 1 <= n <= len(pool):
            raise TracefpError(f"there are {len(pool)} held-out problems, {n} were asked for: raise task.test_size")
        return list(pool[:n])

    def score(self, prompt: Prompt, response_text: str) -> float:
        """The library's score of the extracted answer; without ``partial_credit`` 1.0 for full marks, else 0.0.

        0.0 without asking the library: no answer, one of more than 4096 characters, and one that would keep a
        computer algebra system busy (towers of powers, factorials), unless it is the reference itself.
        """
        answer = extract_answer(response_text, self.config.answer_format, lines="\n" in prompt.answer)
        if answer is None or len(answer) > MAX_ANSWER_LENGTH:
            return 0.0
        if _ENDLESS.search(answer) and answer != prompt.answer:
            return 0.0
        entry = {"question": prompt.text, "answer": prompt.metadata["reference"], "metadata": prompt.metadata["item"]}
        try:
            with warnings.catch_warnings(action="ignore"):  # what the policy wrote is no news
                score = float(self._scorers[prompt.metadata["family"]].score_answer(answer, entry))
        except Exception:
            # Some scorers raise on text they cannot parse; that they accept a right answer was checked at the start.
            return 0.0
        return score if self.config.partial_credit else float(score >= 1.0)

    def _make_test(self) -> tuple[Prompt, ...]:
        n = self.config.test_size
        return tuple(self._distinct("test", None, Random("mixture of the held-out pool"), n, frozenset()))

    def _distinct(
        self, prefix: str, window: int | None, mixture: Random, n: int, excluded: frozenset[str]
    ) -> list[Prompt]:
        """``n`` problems with distinct texts; window: where a step's seeds start, None for the held-out pool."""
        budget = 64 * n + 1024  # fails fast where a family has few problems
        sources: dict[str, Any] = {}
        drawn = dict.fromkeys(self.config.families, 0)
        prompts: list[Prompt] = []
        seen = set(excluded)
        for family in mixture.choices(self.config.families, self._weights, k=n):
            if family not in sources:
                sources[family] = self._family(family, _first_seed(family, window), budget)
            while True:
                if drawn[family] == budget:
                    raise TracefpError(
                        f"the family {family} has too few distinct problems under these settings: change "
                        f"task.options.{family}, lower task.weights.{family}, or ask for fewer"
                    )
                item = _item(family, sources[family], drawn[family])
                drawn[family] += 1
                text = self._asked(item["question"])
                if text not in seen:
                    break
            seen.add(text)
            prompts.append(_prompt(f"{prefix}-{len(prompts)}", text, family, item))
        return prompts

    def _asked(self, question: str) -> str:
        chosen = self.config.instruction
        instruction = INSTRUCTIONS[self.config.answer_format] if chosen is None else chosen
        return f"{question.rstrip()}\n{instruction}" if instruction else question

    def _family(self, name: str, seed: int, size: int) -> Any:
        return _dataset(name, self.config.options.get(name, {}), seed, size)

    def _check(self, name: str) -> None:
        """A family whose scorer refuses its own answer, or that cannot repeat a problem, would spoil a run."""
        first, again = _item(name, self._scorers[name], 0), _item(name, self._family(name, TEST_SEED, 1), 0)
        if first["question"] != again["question"]:
            raise TracefpError(f"the family {name} gives other problems each time, so that no run could be resumed")
        # A few families have many right answers and name none.
        if first["answer"] is not None and self._scorers[name].score_answer(first["answer"], first) < 1.0:
            raise TracefpError(f"the family {name} does not give full marks to its own reference answer")


def _item(family: str, dataset: Any, index: int) -> dict[str, Any]:
    try:
        item: dict[str, Any] = dataset[index]
    except Exception as error:  # the library's generators fail in ways of their own where options do not fit together
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TracefpError(
            f"the family {family} cannot make a problem; change task.options.{family}: {reason}"
        ) from error
    return item


def _prompt(prompt_id: str, text: str, family: str, item: dict[str, Any]) -> Prompt:
    reference = item["answer"]
    metadata = {"family": family, "reference": reference, "item": item["metadata"]}
    return Prompt(prompt_id, text, "" if reference is None else str(reference), metadata)


def _first_seed(family: str, window: int | None) -> int:
    if window is None:
        return TEST_SEED
    if family in NARROW_SEEDS:
        return 2**25 + stable_hash(f"window {window}") % (2**32 - 2**26)
    return 2**64 + window


def _dataset(name: str, options: dict[str, Any], seed: int, size: int) -> Any:
    # Imported here: reasoning-gym takes over a second, and a command line's help should not wait.
    from reasoning_gym.factory import DATASETS, create_dataset

    if name == "composite":
        raise TracefpError("the family composite is itself a mixture: list its parts in task.families instead")
    if name not in DATASETS:
        raise TracefpError(f"task.families: unknown family {name!r}{did_you_mean(name, sorted(DATASETS))}")
    fields = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
    for key in options:
        if key not in fields:
            prefix = f"task.options.{name}."
            raise TracefpError(f"unknown key {prefix}{key}{did_you_mean(key, fields, prefix)}")
    try:
        return create_dataset(name, **options, seed=seed, size=size)
    except (AssertionError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split()) or "the library refuses these values"
        raise TracefpError(f"task.options.{name} cannot be used: {reason}") from None
