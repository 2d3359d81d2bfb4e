"""What a task is: prompts, a verifier, and what else a task may offer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from tracefp4.config import StrictModel
from tracefp4.errors import TracefpError

Message = dict[str, str]
"""One chat message: ``{"role": "user", "content": "..."}``."""


@dataclass(frozen=True)
class Prompt:
    """One problem, e.g. ``Prompt("train-7-0", "14+27-5=", "36", {"num_terms": 3})``.

    Fields:
        id: unique within the task and its seed; names the split it came from.
        text: what the policy is conditioned on where there is no chat template: already in the task's own format.
        answer: the reference answer the verifier compares with.
        metadata: what the generator or the data set said of the problem, plain JSON values.
        messages: the same problem as chat messages; used in place of ``text`` where the tokenizer has a chat template.
    """

    id: str
    text: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] | None = None


@runtime_checkable
class Task(Protocol):
    """A source of verifiable problems; every method is a pure function of the config and its arguments.

    A task may also be a ``BatchScorer``, a ``ToolTask``, a ``CountingTask`` or a ``SolvedTask``.
    """

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        """``n`` problems with distinct texts for one RL step, none of them in the test set.

        Raises:
            TracefpError: ``step`` or ``n`` is out of range, or the config admits too few distinct problems.
        """
        ...

    def test_prompts(self, n: int) -> list[Prompt]:
        """The first ``n`` held-out problems, the same for every seed so that seeds can be compared.

        Raises:
            TracefpError: ``n`` exceeds the held-out pool.
        """
        ...

    def score(self, prompt: Prompt, response_text: str) -> float:
        """Reward of a response, 1.0 for a fully correct one. What the policy wrote never makes it raise."""
        ...


@runtime_checkable
class BatchScorer(Protocol):
    """A task that scores many responses at once, because a check is slow (a program run, a user's function)."""

    def score_batch(self, prompts: Sequence[Prompt], response_texts: Sequence[str]) -> list[float]:
        """One reward a response, in order. Raises TracefpError where the check itself is broken."""
        ...


@runtime_checkable
class ToolTask(Protocol):
    """A task whose environment answers: multi-turn."""

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> str | None:
        """What the environment says to the policy's last turn (``turns[-1]``); None where the exchange is over."""
        ...


@runtime_checkable
class CountingTask(Protocol):
    """A task with figures of its own for each step, such as how many checks ran out of time."""

    def metrics(self) -> dict[str, float]:
        """The counts since the last call."""
        ...


@runtime_checkable
class SolvedTask(Protocol):
    """A task that can write a solution out, which the warm start learns from."""

    def solution(self, prompt: Prompt) -> str:
        """A reference response that scores 1.0, without the end-of-sequence token."""
        ...


def score_all(task: Task, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
    """Rewards of ``texts``, one a prompt, in order.

    Raises:
        TracefpError: a reward is no finite number, or the batch scorer gave another count.
    """
    if isinstance(task, BatchScorer):
        rewards = task.score_batch(prompts, texts)
        if len(rewards) != len(texts):
            raise TracefpError(f"the task scored {len(rewards)} of {len(texts)} responses; it must score every one")
    else:
        rewards = [task.score(p, text) for p, text in zip(prompts, texts, strict=True)]
    for prompt, reward in zip(prompts, rewards, strict=True):
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise TracefpError(f"the reward of problem {prompt.id} is {reward!r}; it must be a finite number")
    return [float(r) for r in rewards]


class TaskConfig(StrictModel):
    """What every task's config has; each task's own is derived from it, beside its class.

    A derived config sets ``name`` to ``Literal["the_task"]``: a recipe's ``[task]`` section is told apart by it.
    """

    name: str
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the training stream only")
