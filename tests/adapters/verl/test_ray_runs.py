"""Whole runs through Ray: what breaks while it trains, and what a checkpoint carries over. About a minute each.

Skipped where verl is not installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import load_script

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

HERE = Path(__file__).parent
RECIPE = HERE.parents[2] / "recipes" / "verl"
acceptance = load_script(RECIPE / "acceptance.py")
SETTINGS = "actor_rollout_ref.model.override_config.tracefp4"
SMALL = [
    "data.train_batch_size=4",
    "trainer.v1.separate_async.parameter_sync_step=2",  # mini-batches of a step
    "data.max_response_length=40",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
]
LIMIT_SECONDS = 420
DIFF, SHARE, LAG = acceptance.DIFF, acceptance.SHARE, acceptance.LAG


@dataclass
class Run:
    code: int
    text: str
    steps: dict[int, dict[str, float]]


def run(folder: Path, *overrides: str, mode: str = "tracefp4_sync") -> Run:
    """One job to its end; everything it started ends with it."""
    command = [str(RECIPE / "run_cpu.sh"), str(folder), *SMALL, f"trainer.v1.trainer_mode={mode}", *overrides]
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE)])),
        "VERL_USE_EXTERNAL_MODULES": "tracefp4.adapters.verl.plugin,ray_faults",
    }
    folder.mkdir(parents=True, exist_ok=True)
    log, metrics = folder / "log.txt", folder / "metrics.jsonl"
    with log.open("w") as out:
        job = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            code = job.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {LIMIT_SECONDS} s:\n{log.read_text()[-3000:]}") from None
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    text = re.sub(r"\x1b\[[0-9;]*m|\([^()]* pid=\d+\)\s?", "", log.read_text())
    return Run(code, text, {line["step"]: line["data"] for line in lines if DIFF in line["data"]})


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Four steps in one go, with a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, "trainer.total_training_steps=4", "trainer.save_freq=2")


def resume(folder: Path, saved: Path, *overrides: str, mode: str = "tracefp4_sync") -> Run:
    return run(
        folder,
        "trainer.total_training_steps=4",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={saved / 'checkpoints' / 'global_step_2'}",
        *overrides,
        mode=mode,
    )


def test_two_steps_and_two_more_are_four(four_steps: tuple[Path, Run], tmp_path: Path) -> None:
    saved, whole = four_steps
    assert whole.code == 0, whole.text[-3000:]
    assert sorted(whole.steps) == [1, 2, 3, 4]
    resumed = resume(tmp_path, saved)
    assert resumed.code == 0, resumed.text[-3000:]
    assert "policy version 2 goes on under method trace" in resumed.text
    assert sorted(resumed.steps) == [3, 4]
    for step in (3, 4):
        before, after = whole.steps[step], resumed.steps[step]
        assert after["training/off_policy/trajectory_staleness/max"] == 0  # rolled out under the version before
        assert after[SHARE] == 1
        assert "code_mismatch/after/key/layer3" in after
        # The same prompts, weights and seeds; only which requests shared an engine step may differ.
        assert after["prompt_length/mean"] == before["prompt_length/mean"]
        assert after["critic/score/mean"] == pytest.approx(before["critic/score/mean"], abs=0.13)
        assert after[DIFF] == pytest.approx(before[DIFF], rel=0.5)


def test_a_checkpoint_is_not_continued_under_another_recipe(four_steps: tuple[Path, Run], tmp_path: Path) -> None:
    saved, _ = four_steps
    resumed = resume(tmp_path, saved, f"{SETTINGS}.method=qat")
    assert resumed.code != 0
    assert re.search(r"trained by method trace under recipe \w+, and .*tracefp4 now says method qat", resumed.text)
    assert resumed.steps == {}


def shape(mode: str) -> list[str]:
    """What an asynchronous mode needs beside SMALL on one trainer rank."""
    keys = acceptance.shape_overrides(f"{mode}:1")
    return [key for key in keys if "trainer_mode" not in key and "micro_batch" not in key]


def test_an_asynchronous_run_goes_on_with_the_responses_it_had(tmp_path: Path) -> None:
    """Finished ones come back with verl's queue, their records are in the same store; the others start anew."""
    mode, saved = "tracefp4_colocate_async", tmp_path / "saved"
    keys = [f"{SETTINGS}.guidance.url={tmp_path / 'guidance'}", *shape("colocate_async")]
    first = run(saved, "trainer.total_training_steps=2", "trainer.save_freq=2", *keys, mode=mode)
    assert first.code == 0, first.text[-3000:]
    resumed = resume(tmp_path / "resumed", saved, *keys, mode=mode)
    assert resumed.code == 0, resumed.text[-3000:]
    assert sorted(resumed.steps) == [3, 4]
    assert resumed.steps[3][LAG] >= 1  # of before
    assert all(step[SHARE] == 1 for step in resumed.steps.values())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run in separate_async leaves whose trainer was killed in step 4, with a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("killed")
    keys = ["trainer.total_training_steps=4", "trainer.save_freq=2", *shape("separate_async")]
    first = run(folder, *keys, mode="fault_trainer_separate")
    assert first.code != 0
    assert sorted(first.steps) == [1, 2, 3], first.text[-3000:]
    assert all(step[SHARE] >= acceptance.GUIDED_AT_LEAST for step in first.steps.values())
    return folder


@pytest.mark.parametrize("max_version_diff", [3, 0])
def test_a_killed_trainer_goes_on_with_the_responses_it_had(
    killed: Path, tmp_path: Path, max_version_diff: int
) -> None:
    """Step 3 is done again; of the responses that came back, those too old are not guided and are counted.

    The store also holds records of the step 3 that was lost, which no response names.
    """
    folder = shutil.copytree(killed, tmp_path / "again")
    resumed = run(
        folder,
        "trainer.total_training_steps=4",
        "trainer.resume_mode=auto",
        f"+{SETTINGS}.guidance.max_version_diff={max_version_diff}",
        *shape("separate_async"),
        mode="tracefp4_separate_async",
    )
    assert resumed.code == 0, resumed.text[-3000:]
    assert "policy version 2 goes on under method trace" in resumed.text
    assert sorted(resumed.steps) == [3, 4]
    assert 1 <= resumed.steps[3][LAG] <= 3  # of before
    for step in resumed.steps.values():
        fallen = sum(step[name] for name in step if name.startswith("guidance/fallback/"))
        assert fallen == pytest.approx(step["guidance/rows"] - step["guidance/guided_rows"])
        if max_version_diff == 3:
            assert step[SHARE] >= acceptance.GUIDED_AT_LEAST
    if max_version_diff == 0:
        assert resumed.steps[3][SHARE] < 1


@pytest.mark.parametrize("mode", ["fault_replica", "fault_replica_async"])
def test_a_dead_replica_ends_the_run_by_name(mode: str, tmp_path: Path) -> None:
    """The asynchronous mode replaces failed groups one by one, and must not do so for ever."""
    broken = run(tmp_path, "trainer.total_training_steps=3", "data.gen_batch_size=1", mode=mode)
    assert broken.code != 0
    assert "TracefpError: 1 of 1 rollout servers of rollout.name=tracefp4 died" in broken.text
    assert sorted(broken.steps) == [1]


def test_a_dead_trainer_worker_ends_the_run(tmp_path: Path) -> None:
    broken = run(tmp_path, "trainer.total_training_steps=3", mode="fault_worker")
    assert broken.code != 0
    assert re.search(r"ActorDiedError|actor died unexpectedly", broken.text)
    assert sorted(broken.steps) == [1]


def test_a_lost_store_is_counted_and_then_ends_the_run(tmp_path: Path) -> None:
    """Step 2 has no record and says so; step 3 is the second lost one in a row, and the limit."""
    broken = run(
        tmp_path, "trainer.total_training_steps=6", f"+{SETTINGS}.guidance.lost_after_steps=2", mode="fault_store"
    )
    assert broken.code != 0
    assert re.search(r"GuidanceError: guidance is lost: 0 of \d+ rows were guided at policy version 2", broken.text)
    assert sorted(broken.steps) == [1, 2]
    assert broken.steps[1][SHARE] == 1
    assert broken.steps[2][SHARE] < 0.5
    assert broken.steps[2]["guidance/fallback/missing"] > 0


def test_an_unknown_key_ends_the_run_before_anything_is_started(tmp_path: Path) -> None:
    broken = run(tmp_path, f"+{SETTINGS}.guidance.max_version_dif=3")
    assert broken.code != 0
    assert "did you mean guidance.max_version_diff?" in broken.text
    assert "hook applied" not in broken.text


def test_the_methods_own_loss_is_one_key(tmp_path: Path) -> None:
    done = run(tmp_path, f"{SETTINGS}.method=qarl", "trainer.total_training_steps=1")
    assert done.code == 0, done.text[-3000:]
    assert "policy_loss.loss_mode=tracefp4_tbpo, loss_agg_mode=seq-mean-token-mean" in done.text
    assert 0 <= done.steps[1]["tbpo/dropped_share"] <= 1
