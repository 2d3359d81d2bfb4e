"""Whole runs from a dense checkpoint directory: metrics, resume, and the checkpoint that is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny import tiny_checkpoint
from tracefp4.loop import Parts, RunConfig, TrainingRun, run_training
from tracefp4.tasks import Prompt
from tracefp4.types import Trajectory


class Stop(Exception):
    pass


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model never answers rightly; it is rewarded for even last tokens instead, so that it is trained."""

    def score(self: Parts, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], _: None) -> list[float]:
        return [float(t.response_ids[-1] % 2 == 0) for t in trajectories]

    monkeypatch.setattr(Parts, "score", score)
    return tiny_checkpoint(tmp_path / "model", max_shard_size="60KB")


def config(checkpoint: Path, method: str = "trace-all") -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(checkpoint)},
            "method": {"name": method},
            "sampling": {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 12},
            "train": {"updates_per_rollout": 2, "micro_batch_tokens": 128, "lr": 1e-3},
            "run": {"steps": 3, "state_every": 1, "tensorboard": False},
        }
    )


@pytest.mark.parametrize("method", ["fp32", "naive", "qat", "trace"])
def test_a_run_trains_and_logs(method: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run_training(config(checkpoint, method), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["train/grad_norm"] > 0
        assert line["train/micro_batches"] > 1
        assert 0 < line["train/padding_share"] < 1
        assert not any(name.startswith("router/") for name in line)
        if method == "fp32":
            assert line["mismatch/logprob_abs_diff_max"] <= 1e-5
        if method == "trace":
            assert line["guidance/guided_share"] == 1
            assert line["code_mismatch/after"] < line["code_mismatch/before"]


def test_a_resumed_run_writes_what_an_unbroken_one_writes(checkpoint: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for directory in (whole, broken):
        directory.mkdir()
    run_training(config(checkpoint), whole)

    def stop(index: int, _: dict[str, float]) -> None:
        if index == 1:
            raise Stop

    with pytest.raises(Stop):
        run_training(config(checkpoint), broken, stop)
    run_training(config(checkpoint), broken, resume=True)
    for name in ("metrics.jsonl", "checkpoint/model.safetensors", "checkpoint/config.json"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_trained_checkpoint_loads_in_plain_transformers(checkpoint: Path, tmp_path: Path) -> None:
    """The policy's own logits, unquantized, are those of the saved directory; and a run can start from it."""
    run = TrainingRun(config(checkpoint, "bf16"))
    run.step(0)
    run.save(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, attn_implementation="sdpa")
    ids = torch.tensor([[3, 9, 4, 17, 20, 8]])
    with torch.no_grad():
        want = run.trainer.model(ids, use_cache=False).logits
        assert torch.equal(plain(ids, use_cache=False).logits, want)
        start = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        assert not torch.equal(start(ids, use_cache=False).logits, want)
    again = TrainingRun(config(tmp_path / "out", "bf16"))
    for (name, w), (_, v) in zip(again.trainer.named_weights(), run.trainer.named_weights(), strict=True):
        assert torch.equal(w, v), name
