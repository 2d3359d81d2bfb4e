"""A task of several turns in a real training step: replies reach the sequence, rows stay, the last turn is scored."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tracefp4.loop import RunConfig, TrainingRun
from tracefp4.tasks import Prompt
from tracefp4.tasks.running_sums import RunningSums, RunningSumsConfig
from tracefp4.types import RolloutBatch


class Nagging(RunningSums):
    """Running sums whose environment answers the first two turns with another problem."""

    def __init__(self) -> None:
        super().__init__(RunningSumsConfig(max_terms=3))
        self.heard: list[tuple[str, ...]] = []
        self.scored: list[str] = []

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> str | None:
        self.heard.append(tuple(turns))
        return "1+2+3=" if len(turns) < 3 else None

    def score(self, prompt: Prompt, response_text: str) -> float:
        self.scored.append(response_text)
        return super().score(Prompt(prompt.id, "1+2+3=", "6"), response_text)


def config(method: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "method": {"name": method},
            "sampling": {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 150},
            "rollout": {"max_model_len": 192},
            "train": {"updates_per_rollout": 1},
            "run": {"steps": 1, "tensorboard": False, "eval_prompts": 4},
        }
    )


@pytest.mark.parametrize("method", ["bf16", "trace-all"])
def test_a_step_of_three_turns(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Nagging()
    run = TrainingRun(config(method), task)
    batches: list[RolloutBatch] = []
    update = run.trainer.update
    monkeypatch.setattr(run.trainer, "update", lambda batch: batches.append(batch) or update(batch))
    metrics, _ = run.step(0)
    assert all(math.isfinite(v) for v in metrics.values())
    finished = [t for t in batches[0].trajectories if t.finish_reason == "stop"]
    assert len(finished) >= 6
    whole = {turns for turns in task.heard if len(turns) == 3}
    for t in finished:
        # decoded with the environment's words in between, which were never sampled
        text = run.parts.text(t)
        assert text.count("1+2+3=") >= 2
        assert any(text == "1+2+3=".join(turns) for turns in whole)
        assert (~t.sampled_mask).sum() == 12
    assert set(task.scored) <= {turns[-1] for turns in whole}
    if method == "trace-all":
        assert metrics["guidance/guided_share"] == 1.0
        assert metrics["mismatch/logprob_abs_diff_mean"] < 0.01
    assert run.evaluate("x") is not None
    assert len(run.store) == 0
