"""A run that is stopped and resumed writes the metrics of one that never was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tracefp4.errors import TracefpError
from tracefp4.loop import RunConfig, run_training

RECIPE = """
[method]
name = "trace-all"
[sampling]
prompts_per_step = 2
samples_per_prompt = 8
max_new_tokens = 48
[train]
updates_per_rollout = 2
micro_batch_size = 8
[run]
steps = 5
eval_prompts = 2
state_every = 2
threads = 1
tensorboard = false
sample_every = 2
sample_responses = 3
"""


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("reference")
    run_training(config(), run_dir)
    return run_dir


def config(**run: object) -> RunConfig:
    import tomllib

    data = tomllib.loads(RECIPE)
    data["run"] |= run
    return RunConfig.model_validate(data)


def stop_after(step: int):  # type: ignore[no-untyped-def]
    def on_step(index: int, _: dict[str, float]) -> None:
        if index == step:
            raise Stop

    return on_step


@pytest.mark.parametrize("step", [1, 2, 3])
def test_metrics_are_those_of_an_unbroken_run(step: int, reference: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run_training(config(), tmp_path, stop_after(step))
    summary = run_training(config(), tmp_path, resume=True)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / name).read_bytes() == (reference / name).read_bytes()
    steps = [json.loads(line)["step"] for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4]
    assert summary["eval/pass_rate_start"] is not None
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "checkpoint" / name).read_bytes() == (reference / "checkpoint" / name).read_bytes()


def test_samples_show_what_was_asked_answered_and_earned(reference: Path) -> None:
    lines = [json.loads(line) for line in (reference / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0] * 3 + [2] * 3 + [4] * 3
    for line in lines:
        assert line["prompt"]
        assert 0 < line["tokens"] <= 48
        assert line["reward"] in (0.0, 1.0)
        assert line["finish_reason"] in ("stop", "length")
    assert len({line["request_id"].rsplit("/", 1)[0] for line in lines[:3]}) == 2  # both groups are seen


def test_a_line_cut_short_by_the_kill_is_written_again(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run_training(config(), tmp_path, stop_after(2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"reward/mean": 0.')
    run_training(config(), tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_a_state_ahead_of_the_log_is_passed_over(
    name: str, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that lost power may keep the state and not the end of the log: the state before it goes on."""
    with pytest.raises(Stop):
        run_training(config(), tmp_path, stop_after(3))
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["step-00000002", "step-00000004"]
    log = tmp_path / name
    log.write_bytes(log.read_bytes()[:-9])
    run_training(config(), tmp_path, resume=True)
    assert f"step-00000004 is passed over: {log} lacks step 3" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()


def test_saves_that_failed_are_told_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tracefp4.saves.free_bytes", lambda path: 0)
    run_training(config(steps=2, state_every=1), tmp_path)
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"2 saves of {tmp_path} failed, it has no state, so no steps can be added to it: is the disk full?" in last


def test_a_run_can_be_lengthened(reference: Path, tmp_path: Path) -> None:
    run_training(config(steps=3), tmp_path)
    run_training(config(), tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()


def test_another_setting_is_refused(tmp_path: Path) -> None:
    run_training(config(steps=2), tmp_path)
    with pytest.raises(TracefpError, match=r"run.seed = 0, the recipe now says 1"):
        run_training(config(seed=1), tmp_path, resume=True)


def test_lost_metrics_are_refused(tmp_path: Path) -> None:
    run_training(config(steps=2), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(TracefpError, match="lacks step 0"):
        run_training(config(), tmp_path, resume=True)


def test_a_state_within_the_first_step_can_be_resumed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the evaluation after the first update, the state holds a step that no file does."""
    from tracefp4.loop import TrainingRun
    from tracefp4.signals import Stopped

    evaluate = TrainingRun.evaluate

    def stops(run: TrainingRun, tag: str) -> float | None:
        if tag == "step0":
            raise Stopped(signal.SIGTERM)
        return evaluate(run, tag)

    settings = config(eval_every=1, steps=3, state_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "evaluate", stops)
        with pytest.raises(Stopped):
            run_training(settings, tmp_path)
    with pytest.raises(Stop):
        run_training(settings, tmp_path, stop_after(1), resume=True)
    run_training(settings, tmp_path, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in samples] == [0, 0, 0, 2, 2, 2]


def test_killed_twice(reference: Path, tmp_path: Path) -> None:
    """SIGKILL of the real command at two moments, then --resume to the end."""
    recipe, out = tmp_path / "r.toml", tmp_path / "out"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "tracefp4", "train", str(recipe), "--out", str(out), "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for lines in (1, 3):
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        metrics = out / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
            assert child.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    assert metrics.read_bytes() == (reference / "metrics.jsonl").read_bytes()
    assert not list(out.glob("states/.step-*"))
    again = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)
    assert "complete already" in again.stdout
