"""What a task is: prompts, a verifier, and a written-out solution for the warm start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator


@dataclass(frozen=True)
class Prompt:
    """One problem, e.g. ``Prompt("train-7-0", "14+27-5=", "36", {"num_terms": 3})``.

    Fields:
        id: unique within the task and its seed; names the split it came from.
        text: exactly what the policy is conditioned on, already in the task's own format.
        answer: the reference answer the verifier compares with.
        metadata: what the generator said of the problem, plain JSON values.
    """

    id: str
    text: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """A source of verifiable problems; every method is a pure function of the config and its arguments."""

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
        """1.0 for a fully correct response, else 0.0; never raises, whatever the policy wrote."""
        ...

    def solution(self, prompt: Prompt) -> str:
        """A reference response that scores 1.0, without the end-of-sequence token."""
        ...


class TaskConfig(BaseModel):
    """Which task, how hard, and the seed of its training stream.

    Raises:
        pydantic.ValidationError: an unknown key, a value out of range, or ``min_*`` above ``max_*``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "running_sums"
    min_terms: int = Field(default=3, ge=2, le=12, description="fewest terms of an expression")
    max_terms: int = Field(default=5, ge=2, le=12, description="most terms of an expression")
    min_digits: int = Field(default=1, ge=1, le=6, description="fewest digits of a term")
    max_digits: int = Field(default=2, ge=1, le=6, description="most digits of a term")
    free_letters: int = Field(
        default=4,
        ge=0,
        le=8,
        description="how many letters the reference solution may pick from before each step; 0 writes none",
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the training stream only")

    @model_validator(mode="after")
    def _ranges_are_ordered(self) -> Self:
        for what in ("terms", "digits"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low > high:
                raise ValueError(f"min_{what} = {low} is above max_{what} = {high}")
        return self
