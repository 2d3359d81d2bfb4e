"""Verifiable tasks: prompts, verifiers, and the tokenizers they need; docs/tasks.md describes each."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from tracefp4.config import default_name, did_you_mean
from tracefp4.errors import TracefpError
from tracefp4.tasks.base import BatchScorer, CountingTask, Prompt, SolvedTask, Task, TaskConfig, ToolTask, score_all
from tracefp4.tasks.calculator import Calculator, CalculatorConfig
from tracefp4.tasks.dataset import DatasetConfig, DatasetTask
from tracefp4.tasks.encode import PromptEncoder
from tracefp4.tasks.euclid import Euclid, EuclidConfig
from tracefp4.tasks.exchange import Exchanges
from tracefp4.tasks.programs import Programs, ProgramsConfig
from tracefp4.tasks.reasoning import ReasoningGym, ReasoningGymConfig
from tracefp4.tasks.running_sums import RunningSums, RunningSumsConfig
from tracefp4.tasks.text_search import TextSearch, TextSearchConfig
from tracefp4.tasks.tokenizer import build_text_tokenizer, build_tokenizer

__all__ = [
    "TASKS",
    "AnyTaskConfig",
    "BatchScorer",
    "CountingTask",
    "Exchanges",
    "Prompt",
    "PromptEncoder",
    "SolvedTask",
    "Task",
    "TaskConfig",
    "ToolTask",
    "build_text_tokenizer",
    "build_tokenizer",
    "make_task",
    "score_all",
]

AnyTaskConfig = Annotated[
    RunningSumsConfig
    | DatasetConfig
    | ReasoningGymConfig
    | CalculatorConfig
    | TextSearchConfig
    | EuclidConfig
    | ProgramsConfig,
    Field(discriminator="name"),
    default_name("running_sums"),
]
"""A recipe's ``[task]``: its ``name`` says whose keys it has."""

TASKS: dict[str, Any] = {
    "running_sums": RunningSums,
    "dataset": DatasetTask,
    "reasoning_gym": ReasoningGym,
    "calculator": Calculator,
    "text_search": TextSearch,
    "euclid": Euclid,
    "programs": Programs,
}


def make_task(config: TaskConfig) -> Task:
    """The task that ``config.name`` names.

    Raises:
        TracefpError: no task has that name; the message holds the nearest one that exists. Or the task's files or
            settings cannot be used.
    """
    if config.name not in TASKS:
        raise TracefpError(f"unknown task {config.name!r}{did_you_mean(config.name, list(TASKS))}")
    task: Task = TASKS[config.name](config)
    return task
