"""What tasks that make up their own problems share: the range of draws, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Prompt

MAX_STEP = 2**31
"""Steps of a training stream; ``step`` lies below."""


def check_draw(step: int, n: int, most: int | None = None) -> None:
    """Raises TracefpError unless 0 <= step < MAX_STEP and 1 <= n <= most, the problems of a step (None: any number)."""
    if not 0 <= step < MAX_STEP:
        raise TracefpError(f"step must lie in [0, {MAX_STEP}), got {step}")
    if n < 1 or (most is not None and n > most):
        raise TracefpError(f"n must be at least 1, got {n}" if most is None else f"n must lie in [1, {most}], got {n}")


def check_enough(prompts: Sequence[Prompt], n: int, remedy: str) -> None:
    """Raises TracefpError where fewer than ``n`` problems were found. remedy: what to raise or widen."""
    if len(prompts) < n:
        raise TracefpError(
            f"this task config gives only {len(prompts)} distinct training problems, {n} were asked for; {remedy}"
        )


def check_ordered(config: Any, *what: str) -> None:
    """Raises ValueError, for a validator, where ``min_x`` of a config lies above its ``max_x``."""
    for name in what:
        low, high = getattr(config, f"min_{name}"), getattr(config, f"max_{name}")
        if low > high:
            raise ValueError(f"min_{name} = {low} is above max_{name} = {high}")


def first_of_pool(pool: Sequence[Prompt], n: int) -> list[Prompt]:
    """The first ``n`` of a pool of held-out problems. Raises TracefpError where it does not hold so many, or n < 1."""
    if not 1 <= n <= len(pool):
        raise TracefpError(f"n must lie in [1, {len(pool)}], the held-out pool; got {n}")
    return list(pool[:n])
