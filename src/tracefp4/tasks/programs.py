"""Small programs from a list of instructions, scored by running them in the sandbox.

Prompt ``add 3; multiply by 2; modulo 50`` and a line feed; response::

    for x in map(int,input().split()):
     d=x+3
     a=d*2
     b=a%50
     print(b)

A program reads numbers and prints a line for each; it is right where every line is. Names of variables are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal, Self

from pydantic import Field, model_validator

from tracefp4.tasks.base import Prompt, TaskConfig
from tracefp4.tasks.checks import CheckConfig, make_check
from tracefp4.tasks.generated import check_draw, check_enough, check_ordered, first_of_pool
from tracefp4.tasks.tokenizer import FREE_LETTERS

TEST_POOL = 1024
INPUTS = 5

# Word, operator, smallest and largest operand. Values stay small: no product follows without a bound on it.
_OPERATIONS = (
    ("add", "+", 2, 99),
    ("subtract", "-", 2, 99),
    ("multiply by", "*", 2, 9),
    ("divide by", "//", 2, 9),
    ("modulo", "%", 11, 99),
)


class ProgramsConfig(TaskConfig):
    """min_steps, max_steps: instructions of a program. isolation: of the sandbox, see docs/checks.md; timeout: seconds
    of a program."""

    name: Literal["programs"] = "programs"
    min_steps: int = Field(default=5, ge=1, le=32)
    max_steps: int = Field(default=10, ge=1, le=32)
    isolation: Literal["full", "weak"] = "full"
    timeout: float = Field(default=5.0, gt=0, le=60)

    @model_validator(mode="after")
    def _range_is_ordered(self) -> Self:
        check_ordered(self, "steps")
        return self


class Programs:
    """The task ``programs``; see ``tracefp4.tasks.base`` for the contracts Task, BatchScorer and SolvedTask.

    Raises:
        TracefpError: this machine cannot isolate programs and ``isolation`` is not ``weak``.
    """

    def __init__(self, config: ProgramsConfig) -> None:
        self.config = config
        self.check = make_check(CheckConfig(kind="program", isolation=config.isolation, timeout=config.timeout))
        self._test = self._distinct("test", "held out", TEST_POOL, frozenset())
        if len(self._test) < TEST_POOL:  # few programs: most of them for training
            self._test = self._test[: len(self._test) // 8]
        self._held_out = frozenset(prompt.text for prompt in self._test)

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        """``n`` distinct problems, none of them held out; deterministic in (seed, step).

        Raises:
            TracefpError: ``step`` or ``n`` is out of range, or the config admits too few problems.
        """
        check_draw(step, n)
        prompts = self._distinct(f"train-{step}", f"train {self.config.seed} {step}", n, self._held_out)
        check_enough(prompts, n, "raise task.max_steps")
        return prompts

    def test_prompts(self, n: int) -> list[Prompt]:
        """The first ``n`` of the held-out pool (at most 1024 problems), independent of the seed.

        Raises:
            TracefpError: ``n`` is below 1 or above the pool's size.
        """
        return first_of_pool(self._test, n)

    def score(self, prompt: Prompt, response_text: str) -> float:
        return self.score_batch([prompt], [response_text])[0]

    def score_batch(self, prompts: Sequence[Prompt], response_texts: Sequence[str]) -> list[float]:
        """1.0 where the program prints the right numbers; one that is no Python is not run."""
        scores = [0.0] * len(prompts)
        run = [i for i, text in enumerate(response_texts) if _compiles(text)]
        found = self.check.score_batch([prompts[i] for i in run], [response_texts[i] for i in run]) if run else []
        for i, value in zip(run, found, strict=True):
            scores[i] = value
        return scores

    def metrics(self) -> dict[str, float]:
        """What the sandbox ran into since the last call, e.g. ``check/timeouts``."""
        return self.check.metrics()

    def close(self) -> None:
        """Ends the sandbox's workers."""
        self.check.close()

    def solution(self, prompt: Prompt) -> str:
        """The program; no end-of-sequence token."""
        return self._written(prompt.metadata["steps"], Random(prompt.text))

    def flawed_solution(self, prompt: Prompt) -> str:
        """As ``solution``, but one instruction is misread, so that the program prints other numbers."""
        chance = Random("slip" + prompt.text)
        right = prompt.metadata["steps"]
        for _ in range(64):
            steps = [list(step) for step in right]
            place = chance.randrange(len(steps))
            if chance.random() < 0.5:
                steps[place][0] = chance.choice(_OPERATIONS)[1]
            else:
                steps[place][1] = max(1, steps[place][1] + chance.choice((-10, -1, 1, 10)))
            if _run(steps, prompt.metadata["inputs"]) != _run(right, prompt.metadata["inputs"]):
                break
        return self._written(steps, Random(prompt.text))

    def _written(self, steps: Sequence[Sequence[str | int]], letters: Random) -> str:
        lines, before = ["for x in map(int,input().split()):"], "x"
        for operator, operand in steps:
            name = letters.choice(FREE_LETTERS)
            lines.append(f" {name}={before}{operator}{operand}")
            before = name
        return "\n".join([*lines, f" print({before})"])

    def _distinct(self, prefix: str, stream: str, n: int, excluded: frozenset[str]) -> list[Prompt]:
        chance, seen = Random(f"programs {stream}"), set(excluded)
        prompts: list[Prompt] = []
        for _ in range(16 * n + 1024):
            if len(prompts) == n:
                break
            words: list[str] = []
            steps: list[list[str | int]] = []
            for _ in range(chance.randint(self.config.min_steps, self.config.max_steps)):
                word, operator, low, high = chance.choice(_OPERATIONS)
                operand = chance.randint(low, high)
                words.append(f"{word} {operand}")
                steps.append([operator, operand])
            text = "; ".join(words) + "\n"
            if text in seen:
                continue
            seen.add(text)
            inputs = [chance.randint(0, 999) for _ in range(INPUTS)]
            lines = "\n".join(map(str, _run(steps, inputs)))
            case = {"input": " ".join(map(str, inputs)) + "\n", "output": lines + "\n"}
            facts = {"steps": steps, "inputs": inputs, "tests": [case]}
            prompts.append(Prompt(f"{prefix}-{len(prompts)}", text, lines, facts))
        return prompts


def _run(steps: Sequence[Sequence[str | int]], inputs: Sequence[int]) -> list[int]:
    """What the program of these instructions prints."""
    out = []
    for value in inputs:
        for operator, operand in steps:
            n = int(operand)
            match operator:
                case "+":
                    value += n
                case "-":
                    value -= n
                case "*":
                    value *= n
                case "//":
                    value //= n
                case _:
                    value %= n
        out.append(value)
    return out


def _compiles(text: str) -> bool:
    """Whether it is Python: most programs of a policy that errs are not, and a process each would be wasted."""
    import warnings

    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "response", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True
