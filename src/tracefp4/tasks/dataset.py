"""Problems from a file of one's own, or one that others already train on; see docs/tasks.md for the formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks import CheckConfig, make_check
from tracefp4.tasks.pool import EpochPool
from tracefp4.tasks.records import FileConfig, Problems, all_numbers, load_problems


class DatasetConfig(FileConfig):
    """check: how a response is compared with its reference; left out, "math" where every answer is a number or the
    file is written as GSM8K or MATH are, else "exact"."""

    name: Literal["dataset"] = "dataset"
    check: CheckConfig | None = None

    @property
    def needs_answer(self) -> bool:
        """False where the check judges by a function, by tests or by one pattern for all problems."""
        kind = self.check.kind if self.check else "exact"
        return not (kind in ("python", "program") or (kind == "regex" and self.check and self.check.pattern))


class DatasetTask:
    """The task ``dataset``; see ``tracefp4.tasks.base`` for the contract of each method.

    description: one sentence for the run's record: what was read, what was left out, which check was chosen.
    """

    def __init__(self, config: DatasetConfig) -> None:
        problems = load_problems(config)
        self.config = config
        self.pool = EpochPool(problems.train, problems.test, config.seed, f"task.path {config.path}")
        self.check_config = config.check or CheckConfig(kind=_default_kind(problems))
        self.check = make_check(self.check_config)
        self.check.validate([*self.pool.train, *self.pool.test])
        self.description = (
            f"{config.path}: {len(problems.train)} training and {len(problems.test)} held-out problems "
            f"({problems.repeated} repeated and {problems.leaked} held-out prompts left out of the rows), "
            f"{problems.layout}; check {self.check_config.kind}{'' if config.check else ', chosen by the answers'}"
        )

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        """The ``n`` problems of a step; see ``EpochPool`` for the order of the passes."""
        return self.pool.take(step, n)

    def test_prompts(self, n: int) -> list[Prompt]:
        """The first ``n`` held-out problems, in the order of a hash of their prompts."""
        return self.pool.held_out(n, "set task.test_path, or a larger task.test_share or task.test_size")

    def score(self, prompt: Prompt, response_text: str) -> float:
        return self.score_batch([prompt], [response_text])[0]

    def score_batch(self, prompts: Sequence[Prompt], response_texts: Sequence[str]) -> list[float]:
        """One reward a response, by the configured check."""
        return self.check.score_batch(prompts, response_texts)

    def metrics(self) -> dict[str, float]:
        """What the check ran into since the last call, e.g. ``check/timeouts``."""
        return self.check.metrics()

    def close(self) -> None:
        """Ends the check's workers."""
        self.check.close()


def _default_kind(problems: Problems) -> Literal["math", "exact"]:
    written_out = problems.layout.form != "plain"
    return "math" if written_out or all_numbers([*problems.train, *problems.test]) else "exact"
