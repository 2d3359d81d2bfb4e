"""Runs whose evaluation differs from their rollout: quantized after training, or lagging behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tracefp4.config import resolved
from tracefp4.errors import TracefpError
from tracefp4.evaluate import EvalRequest, evaluate
from tracefp4.formats import get_format
from tracefp4.loop import RunConfig, TrainingRun, run_training
from tracefp4.loop.api import check_resumable
from tracefp4.loop.posttraining import calibrate, expert_weights, hscale_expert_weights, quantize_calibrated
from tracefp4.recipe import quantize_expert_weights

SMALL: dict[str, dict[str, object]] = {
    "task": {"min_terms": 3, "max_terms": 3, "max_digits": 1, "free_letters": 0},
    "sampling": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 32},
    "rollout": {"max_num_seqs": 16, "max_model_len": 64},
    "train": {"updates_per_rollout": 1, "micro_batch_size": 8},
    "run": {"steps": 4, "tensorboard": False, "eval_prompts": 2, "threads": 1},
}


def small(method: str, **sections: dict[str, object]) -> RunConfig:
    merged = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {*SMALL, *sections}}
    return RunConfig.model_validate({**merged, "method": {"name": method}})


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# -- quantized after training ---------------------------------------------------------------------------------------


def test_ptq_trains_like_bf16_and_evaluates_in_fp4(tmp_path: Path) -> None:
    runs = {}
    for method in ("bf16", "ptq:nvfp4"):
        (tmp_path / method).mkdir()
        run_training(small(method, run={"steps": 1}), tmp_path / method)
        runs[method] = metrics_of(tmp_path / method)
    assert runs["bf16"] == runs["ptq:nvfp4"]
    run = TrainingRun(small("ptq:4over6"))
    engine = run._evaluator()
    assert engine is not run.engine
    assert engine.recipe.weights == engine.recipe.activations == "nvfp4-4over6"
    assert not run.engine.recipe.quantized
    assert engine.version == run.trainer.version
    plain = TrainingRun(small("qat"))
    assert plain._evaluator() is plain.engine


def test_hscale_weights_reach_the_engine_and_lower_the_output_error() -> None:
    run = TrainingRun(small("ptq:hscale"))
    model = run.trainer.model
    engine = run._evaluator()
    moments = calibrate(run.parts, model)
    assert set(moments) == {(i, part) for i in range(4) for part in ("gate_up", "down")}
    for part in ("gate_up", "down"):
        w, h = expert_weights(model, 2, part).float(), moments[2, part]
        ours = hscale_expert_weights(expert_weights(model, 2, part), h, "nvfp4", True)
        plain = quantize_expert_weights(expert_weights(model, 2, part), "nvfp4", True)
        assert torch.equal(ours.encode_scale, plain.encode_scale)
        held = getattr(engine.model._layers[2], part).blocks
        assert torch.equal(held.codes, ours.codes)
        assert torch.equal(held.scales, ours.scales)
        error = [((w - get_format("nvfp4").dequantize(b)).square() * h[:, None]).sum() for b in (ours, plain)]
        assert error[0] < 0.9 * error[1]
    engine.update_weights(run.trainer.named_weights(), 1)
    reset = getattr(engine.model._layers[2], "down").blocks  # noqa: B009
    assert torch.equal(reset.codes, plain.codes), "the next update quantizes by the recipe again"
    quantize_calibrated(engine, run.parts, model)
    assert torch.equal(getattr(engine.model._layers[2], "down").blocks.codes, ours.codes)  # noqa: B009


def test_ptq_forms_are_evaluated_side_by_side(tmp_path: Path) -> None:
    config = small("bf16")
    forms = ("bf16", "ptq:nvfp4", "ptq:4over6", "ptq:hscale", "naive@mxfp4-w4a8")
    facts: dict[str, Any] = evaluate(config, tmp_path / "e", EvalRequest(problems=2, samples=1, forms=forms))
    assert set(facts["forms"]) == set(forms)
    assert facts["forms"]["ptq:nvfp4"]["recipe_hash"] == facts["forms"]["ptq:hscale"]["recipe_hash"]
    hashes = [facts["forms"][name]["recipe_hash"] for name in forms if name != "ptq:hscale"]
    assert len(set(hashes)) == 4
    assert all(facts["forms"][name]["tokens_per_second"] > 0 for name in forms)


# -- staleness ------------------------------------------------------------------------------------------------------


def test_rollouts_lag_by_a_fixed_number_of_steps() -> None:
    lag = 2
    config = small("trace-all", run={"lag": lag, "steps": lag + 2, "eval_prompts": 1})
    run = TrainingRun(config)
    first = {name: w.clone() for name, w in run.trainer.named_weights()}
    for step in range(lag + 2):
        metrics, _ = run.step(step)
        assert metrics["policy/lag"] == metrics["policy/lag_max"] == min(step, lag)
        assert run.trainer.version == step + 1
        assert run.engine.version == max(0, step + 1 - lag)
        if metrics["train/no_advantage_share"] < 1:
            assert metrics["guidance/guided_share"] == 1
    moved = any(not torch.equal(w, first[name]) for name, w in run.trainer.named_weights())
    assert moved
    evaluator = run._evaluator()
    assert evaluator.version == run.trainer.version
    assert run.evaluate("now") is not None
    assert run.engine.version == 2, "an evaluation leaves the rollout's weights alone"


class Stop(Exception):
    pass


def test_a_lagging_run_resumes_byte_for_byte(tmp_path: Path) -> None:
    config = small("qat", run={"lag": 1, "steps": 3, "state_every": 2, "eval_prompts": 0})
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    run_training(config, tmp_path / "whole")

    def stop(index: int, _: dict[str, float]) -> None:
        if index == 1:
            raise Stop

    with pytest.raises(Stop):
        run_training(config, tmp_path / "broken", stop)
    run_training(config, tmp_path / "broken", resume=True)
    whole, broken = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "broken"))
    assert whole == broken


@pytest.mark.parametrize(
    ("method", "lag", "refused"), [("trace-all", 1, True), ("trace-all", 0, False), ("qat", 1, False)]
)
def test_a_run_from_before_bands_does_not_go_on_with_one(method: str, lag: int, refused: bool, tmp_path: Path) -> None:
    now = small(method, run={"lag": lag})
    before = resolved(now)
    del before["method"]["band"]
    (tmp_path / "config.json").write_text(json.dumps(before))
    (tmp_path / "final.json").write_text(json.dumps({"steps": 4}))
    if refused:
        with pytest.raises(TracefpError, match=r"method\.band = 'none', the recipe now says 0\.06"):
            check_resumable(now, tmp_path)
        now = now.model_copy(update={"method": now.method.model_copy(update={"band": "none"})})
    check_resumable(now, tmp_path)


def test_a_band_that_is_said_is_the_mode_s_own(tmp_path: Path) -> None:
    """A run under the default goes on where the default is written out, and not under another band."""
    config = small("trace-all", run={"lag": 1})
    (tmp_path / "config.json").write_text(json.dumps(resolved(config)))
    (tmp_path / "final.json").write_text(json.dumps({"steps": 4}))
    said = {
        band: config.model_copy(update={"method": config.method.model_copy(update={"band": band})})
        for band in (0.06, 0.1)
    }
    check_resumable(said[0.06], tmp_path)
    with pytest.raises(TracefpError, match=r"method\.band = 0\.06, the recipe now says 0\.1"):
        check_resumable(said[0.1], tmp_path)


def test_lag_zero_is_the_plain_run(tmp_path: Path) -> None:
    run = TrainingRun(small("bf16"))
    assert run.past.lag == 0
    assert run.state()[0].keys() == run.trainer.state()[0].keys()


# -- methods with parts of their own in the loop --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "metric"),
    [("quads", "compensation/error_left"), ("score_centering", "score_centering/head_mass_rollout")],
)
def test_metrics_of_rollout_and_loss_are_logged(method: str, metric: str, tmp_path: Path) -> None:
    run_training(small(method, run={"steps": 2, "eval_prompts": 0}), tmp_path)
    logged = [line[metric] for line in metrics_of(tmp_path) if metric in line]
    assert logged
    assert all(0 < value <= 1.000001 for value in logged)
