"""The protocol of an asynchronous run, with processes that have no model: staleness, deaths, shutdown."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import fake_workers
from fake_workers import FakeRun
from tracefp4.asynchronous.supervisor import ChildError, Supervisor
from tracefp4.errors import TracefpError


def supervisor(run: FakeRun, **settings: Any) -> tuple[Supervisor, list[str]]:
    said: list[str] = []
    options = {"groups_per_step": 2, "max_version_diff": 2, "notify": said.append, **settings}
    return Supervisor(fake_workers.rollout, fake_workers.trainer, run, **options), said


def lines(run: FakeRun, who: str) -> list[dict[str, Any]]:
    path = Path(run.folder) / f"{who}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_steps(run: FakeRun, max_version_diff: int = 2) -> None:
    steps = lines(run, "trainer")
    assert [s["version"] for s in steps] == list(range(run.steps))
    assert all(0 <= lag <= max_version_diff for s in steps for lag in s["lags"])
    used = [i for s in steps for i in s["groups"]]
    assert len(used) == len(set(used)) == 2 * run.steps


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_run_takes_every_step_within_the_bound(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), steps=8, slow_groups=(1, 6), step_seconds=0.01)
    boss, said = supervisor(run)
    assert boss.run() == {"steps": 8}
    check_steps(run)
    assert said == []
    assert boss.processes == {}


def test_published_weights_do_not_pile_up(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), steps=12, step_seconds=0.05)
    supervisor(run)[0].run()
    assert len(list(tmp_path.glob("v*.safetensors"))) <= 4


def test_without_lag_every_step_is_on_policy(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), steps=5)
    supervisor(run, max_version_diff=0)[0].run()
    check_steps(run, 0)
    assert [s["groups"] for s in lines(run, "trainer")] == [[2 * i, 2 * i + 1] for i in range(5)]


def test_a_killed_rollout_is_replaced_and_its_groups_are_made_again(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), steps=8, kill_rollout_at=(3, 9))
    boss, said = supervisor(run)
    boss.run()
    check_steps(run)
    starts = lines(run, "rollout")
    assert [s["incarnation"] for s in starts] == [1, 2, 3]
    assert 3 in starts[1]["redo"]
    assert 9 in starts[2]["redo"]
    assert sum("rollout process was killed by signal 9" in text for text in said) == 2


def test_a_killed_trainer_goes_on_from_its_state_with_a_new_rollout(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), steps=7, kill_trainer_at=(3, 4))
    boss, said = supervisor(run)
    assert boss.run() == {"steps": 7}
    versions = [s["version"] for s in lines(run, "trainer")]
    assert versions == [0, 1, 2, 3, 2, 3, 4, 4, 5, 6]  # states at 2 and 4
    assert [s["version"] for s in lines(run, "rollout")] == [0, 2, 4]
    assert sum("trainer process was killed by signal 9" in text for text in said) == 2


def test_a_child_that_keeps_dying_ends_the_run(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), kill_trainer_at=(1,))
    boss, _ = supervisor(run, max_restarts=0)
    with pytest.raises(ChildError, match="trainer process was killed by signal 9; 1 processes in a row"):
        boss.run()


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ("train.lr is too much", TracefpError, "^train.lr is too much$"),
        ("Traceback ...\nValueError: boom\n", ChildError, "trainer process failed: ValueError: boom"),
    ],
)
def test_an_error_of_its_own_ends_the_run_at_once(
    text: str, kind: type[Exception], sentence: str, tmp_path: Path
) -> None:
    boss, said = supervisor(FakeRun(str(tmp_path), fail_trainer=text))
    with pytest.raises(kind, match=sentence):
        boss.run()
    assert len(lines(FakeRun(str(tmp_path)), "trainer")) == 1
    assert boss.processes == {}
    assert said == ([] if kind is TracefpError else [text])


def test_a_rollout_that_hangs_is_replaced(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), hang_rollout=True)
    boss, said = supervisor(run, hang_seconds=0.5)
    boss.run()
    check_steps(run)
    assert "said nothing" in said[0]


def test_ctrl_c_lets_the_trainer_finish_and_leaves_no_process(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), steps=10_000, step_seconds=0.05)
    boss, _ = supervisor(run)
    pids: list[int | None] = []

    def interrupt() -> None:
        while len(lines(run, "trainer")) < 3:
            time.sleep(0.02)
        pids.extend(boss.processes.values())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        boss.run()
    thread.join()
    assert "stopped" in lines(run, "trainer")[-1]
    assert len(pids) == 2
    assert all(pid is not None and gone(pid) for pid in pids)
