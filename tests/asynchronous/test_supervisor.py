"""The protocol of an asynchronous run, with processes that have no model: staleness, deaths, shutdown."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fake_workers
from fake_workers import FakeRun
from tracefp4.asynchronous.channel import Channel
from tracefp4.asynchronous.messages import Stop
from tracefp4.asynchronous.supervisor import ChildError, Supervisor, _Child
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
    """A zombie that nobody has waited for yet is gone too."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except FileNotFoundError:
        return Path("/proc").exists()


def has_spawned(parent: int) -> bool:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if above == parent and "spawn_main" in (entry / "cmdline").read_text():
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


def test_a_rollout_that_hangs_in_an_evaluation_is_replaced(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), hang_evaluation=True)
    boss, said = supervisor(run, hang_seconds=3.0)
    boss.run()
    check_steps(run)
    assert "said nothing" in said[0]


def test_a_skipped_prompt_is_not_skipped_again_by_the_next_rollout(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), steps=5, skipped_groups=(5, 6, 7), kill_rollout_at=(7,))
    boss, _ = supervisor(run)
    boss.run()
    assert [s["version"] for s in lines(run, "trainer")] == list(range(5))
    assert [i for s in lines(run, "trainer") for i in s["groups"] if i in (5, 6, 7)] == []
    assert lines(run, "rollout")[1]["first"] == 8
    assert boss._buffer.skipped == 3


@pytest.mark.parametrize("name", ["trainer", "rollout"])
def test_a_busy_child_ends_with_its_supervisor(name: str, tmp_path: Path) -> None:
    """Within an update or a step, where no message is read."""
    code = f"import fake_workers; fake_workers.supervise_busy_children({str(tmp_path)!r})"
    path = os.pathsep.join([str(Path(fake_workers.__file__).parent), *sys.path])
    boss = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    busy = tmp_path / f"{name}.jsonl"
    while not busy.exists() or not busy.read_text().endswith("\n"):
        assert boss.poll() is None
        time.sleep(0.05)
    pid = lines(FakeRun(str(tmp_path)), name)[0]["pid"]
    assert not gone(pid)
    boss.kill()
    boss.wait()
    deadline = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_cuts_no_message_short() -> None:
    """Else the trainer would take the request to stop for the rest of its groups, and wait for more."""
    here, there = multiprocessing.Pipe()
    sender = _Child("trainer", multiprocessing.current_process(), Channel(here), 0.0)
    got: list[Any] = []

    def read_late() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        got.extend(Channel(there).receive() for _ in range(2))

    reader = threading.Thread(target=read_late)
    reader.start()
    with pytest.raises(KeyboardInterrupt):
        Supervisor._tell(sender, bytes(32 << 20))
    Supervisor._tell(sender, Stop())
    reader.join()
    assert got == [bytes(32 << 20), Stop()]
    sender.sender.shutdown()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for a child that is starting")
def test_ctrl_c_of_a_terminal_is_not_seen_by_a_child_that_starts(tmp_path: Path) -> None:
    code = f"import fake_workers; fake_workers.supervise_until_ctrl_c({str(tmp_path)!r})"
    path = os.pathsep.join([str(Path(fake_workers.__file__).parent), *sys.path])
    boss = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not has_spawned(boss.pid):
        assert boss.poll() is None
        time.sleep(0.01)
    os.killpg(boss.pid, signal.SIGINT)
    out, err = boss.communicate(timeout=200)
    assert out == "stopped\n"
    assert "KeyboardInterrupt" not in err


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
