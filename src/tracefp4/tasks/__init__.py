"""Verifiable tasks: prompts, verifiers, and the tokenizer they share."""

from __future__ import annotations

from collections.abc import Callable

from tracefp4.config import did_you_mean
from tracefp4.errors import TracefpError
from tracefp4.tasks.base import BatchScorer, Prompt, SolvedTask, Task, TaskConfig, ToolTask, score_all
from tracefp4.tasks.running_sums import RunningSums
from tracefp4.tasks.tokenizer import build_tokenizer

__all__ = [
    "TASKS",
    "BatchScorer",
    "Prompt",
    "SolvedTask",
    "Task",
    "TaskConfig",
    "ToolTask",
    "build_tokenizer",
    "make_task",
    "score_all",
]

TASKS: dict[str, Callable[[TaskConfig], Task]] = {"running_sums": RunningSums}


def make_task(config: TaskConfig) -> Task:
    """The task that ``config.name`` names.

    Raises:
        TracefpError: no task has that name; the message holds the nearest one that exists.
    """
    if config.name not in TASKS:
        raise TracefpError(f"unknown task {config.name!r}{did_you_mean(config.name, list(TASKS))}")
    return TASKS[config.name](config)
