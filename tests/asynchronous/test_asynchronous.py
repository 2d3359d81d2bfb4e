"""Rollout and trainer as two processes on a real, tiny policy."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tracefp4 import saves
from tracefp4.asynchronous.training import run_asynchronous
from tracefp4.errors import TracefpError
from tracefp4.files import StorageError, size_of
from tracefp4.loop import RunConfig, check_start, preflight, run, run_training


def config(method: str = "trace-all", **sections: dict[str, Any]) -> RunConfig:
    base: dict[str, dict[str, Any]] = {
        "method": {"name": method},
        "sampling": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 56},
        "rollout": {"max_num_seqs": 16, "max_model_len": 96},
        "train": {"updates_per_rollout": 2, "micro_batch_size": 8},
        "run": {"steps": 4, "tensorboard": False, "asynchronous": True, "state_every": 2, "threads": 1},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return RunConfig.model_validate(base)


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def watch_sizes(run_dir: Path, *names: str) -> Callable[[], list[int]]:
    """Looks at folders of a run from now on; the answer ends it, and gives the most bytes that each held."""
    most, over = dict.fromkeys(names, 0), threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for name in names:
                with suppress(OSError):  # removed while it is counted
                    most[name] = max(most[name], size_of(run_dir / name))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    def answer() -> list[int]:
        over.set()
        thread.join()
        return list(most.values())

    return answer


def test_a_run_with_lag_learns_from_guided_rows(tmp_path: Path) -> None:
    settings = config(run={"eval_prompts": 8, "max_lag": 2})
    most = watch_sizes(tmp_path, "weights", "guidance")
    summary = run_asynchronous(settings, tmp_path)
    weights, guidance = most()
    parts = preflight(settings)
    assert 0 < weights <= parts.sizes.published(settings.run)
    assert 0 < guidance <= parts.guidance_bytes()
    assert summary["steps"] == 4
    assert 0 <= summary["eval/pass_rate_start"] <= 1
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["policy/lag_max"] <= 2 for line in lines)
    assert max(line["policy/lag_max"] for line in lines) > 0
    assert all(line["guidance/guided_share"] == 1.0 for line in lines)
    assert all(line["async/dropped_groups"] == 0 for line in lines)
    assert (tmp_path / "checkpoint/config.json").is_file()
    assert not (tmp_path / "weights").exists()
    assert not (tmp_path / "guidance").exists()


def test_without_lag_it_is_the_synchronous_run(tmp_path: Path) -> None:
    """On-policy, the two loops hand the same responses to the same trainer: every shared figure is equal."""
    plain = {"run": {"max_lag": 0, "steps": 3, "probe_every": 0}, "train": {"dtype": "float32"}}
    plain["rollout"] = {"dtype": "float32"}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run_asynchronous(config("fp32", **plain), tmp_path / "a")
    run_training(config("fp32", **{**plain, "run": {**plain["run"], "asynchronous": False}}), tmp_path / "b")
    for ours, theirs in zip(metrics_of(tmp_path / "a"), metrics_of(tmp_path / "b"), strict=True):
        shared = set(ours) & set(theirs)
        assert {"reward/mean", "train/loss", "train/entropy", "policy/lag"} <= shared
        for name in shared:
            # Batches of another composition sum in another order.
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=2e-5), name


def test_rows_older_than_allowed_fall_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_asynchronous(config(run={"max_lag": 3}, train={"max_version_diff": 0}), tmp_path)
    assert capsys.readouterr().err.count("warning: run.max_lag 3 exceeds train.max_version_diff 0: rows older") == 1
    lines = metrics_of(tmp_path)
    stale = [line["guidance/fallback/stale"] for line in lines]
    lags = [line["policy/lag_max"] for line in lines]
    assert any(s > 0 for s in stale)
    assert all((s > 0) == (lag > 0) for s, lag in zip(stale, lags, strict=True))


def kill_when(steps: int, run_dir: Path, name: str, signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Waits until so many steps are logged, then signals this process's child of that name, or itself ("main")."""

    def act() -> None:
        metrics = run_dir / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < steps:
            time.sleep(0.05)
        if name == "main":
            os.kill(os.getpid(), signum)
            return
        (child,) = [c for c in multiprocessing.active_children() if c.name == f"tracefp4-{name}"]
        assert child.pid is not None
        os.kill(child.pid, signum)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread.join


@pytest.mark.parametrize("name", ["rollout", "trainer"])
def test_a_killed_process_is_replaced_and_the_run_ends_whole(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer dies before its first state: it starts anew, and its event files show no step twice."""
    joined = kill_when(2, tmp_path, name)
    run_asynchronous(config(run={"steps": 5, "state_every": 0, "tensorboard": True}), tmp_path)
    joined()
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(5))
    sentence = f"the {name} process was killed by signal 9"
    assert sentence in capsys.readouterr().err
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["message"].startswith(sentence) for e in events if e["name"] == "replaced"] == [True]
    assert metrics_of(tmp_path)[-1][f"async/replaced_{name}s"] == 1
    scalars = EventAccumulator(str(tmp_path / "tensorboard"))
    scalars.Reload()
    assert [s.step for s in scalars.Scalars("reward/mean")] == list(range(5))
    assert all(line["policy/lag_max"] <= 3 for line in metrics_of(tmp_path))


def test_ctrl_c_saves_a_state_and_resume_goes_on(tmp_path: Path) -> None:
    joined = kill_when(2, tmp_path, "main", signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_asynchronous(config(run={"steps": 500, "state_every": 400}), tmp_path)
    joined()
    done = len(metrics_of(tmp_path))
    assert done >= 2
    assert list((tmp_path / "states").glob("step-*"))
    run_asynchronous(config(run={"steps": done + 2, "state_every": 400}), tmp_path, resume=True)
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(done + 2))


def test_space_for_what_the_processes_pass_each_other_is_asked_for_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, run_dir = config(), tmp_path / "out"
    parts = preflight(settings)
    saved = parts.sizes.of_run(settings.run)
    between = parts.sizes.published(settings.run) + parts.guidance_bytes()
    monkeypatch.setattr(saves, "free_bytes", lambda _: saved + between - 1)
    sentence = r"out needs up to \d+ MiB .* \d+ MiB weights and \d+ MiB guidance on their way between its processes"
    with pytest.raises(StorageError, match=sentence):
        check_start([(settings, run_dir)])
    monkeypatch.setattr(saves, "free_bytes", lambda _: saved + between)
    check_start([(settings, run_dir)])
    check_start([(config(run={"asynchronous": False}), run_dir)])
    monkeypatch.setattr(saves, "free_bytes", lambda _: saved)
    check_start([(config(run={"asynchronous": False}), run_dir)])


def test_space_for_records_on_another_disk_is_asked_for_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(guidance={"url": str(tmp_path / "far")}, run={"asynchronous": False})
    monkeypatch.setattr(run, "same_disk", lambda a, b: False)
    need = preflight(settings).guidance_bytes()
    monkeypatch.setattr(saves, "free_bytes", lambda path: need - 1 if path == tmp_path / "far" else 1 << 40)
    with pytest.raises(StorageError, match=r"^guidance.url .*far needs up to \d+ MiB and its disk has \d+ MiB free: "):
        check_start([(settings, tmp_path / "out")])
    small = config(guidance={"url": str(tmp_path / "far"), "keep_gb": 1e-6}, run={"asynchronous": False})
    check_start([(small, tmp_path / "out")])
    check_start([(config(guidance={"url": "memory://far"}, run={"asynchronous": False}), tmp_path / "out")])


def test_a_broken_reward_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, response):\n    raise ValueError('no such table')\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(12)))
    task = {"name": "dataset", "path": str(rows), "check": {"kind": "python", "function": f"{reward}:score"}}
    (tmp_path / "run").mkdir()
    with pytest.raises(TracefpError, match="no such table"):
        run_asynchronous(config(task=task), tmp_path / "run")
