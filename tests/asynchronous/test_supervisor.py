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
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

import fake_workers
from fake_workers import FakeRun
from processes import alive
from tracefp4.asynchronous.channel import Channel
from tracefp4.asynchronous.messages import Stop
from tracefp4.asynchronous.process import Child, Patience
from tracefp4.asynchronous.supervisor import ChildError, Supervisor
from tracefp4.errors import TracefpError


@pytest.fixture(scope="module", autouse=True)
def children_that_have_imported_torch() -> Iterator[None]:
    """Children start from a process that has done so once: in moments, where a spawned one takes seconds."""
    path = os.pathsep.join([str(Path(fake_workers.__file__).parent), *sys.path])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        multiprocessing.set_forkserver_preload(["fake_workers"])
        forkserver.ensure_running()
        yield


def supervisor(run: FakeRun, **settings: Any) -> tuple[Supervisor, list[str]]:
    said: list[str] = []
    options = {
        "groups_per_step": 2,
        "max_version_diff": 2,
        "notify": said.append,
        "start_method": "forkserver",
        **settings,
    }
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


def test_a_dead_rollout_is_noticed_though_another_process_holds_its_channel(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), kill_rollout_at=(3,), heir=True)
    boss, said = supervisor(run)
    boss.run()
    check_steps(run)
    assert said == ["the rollout process was killed by signal 9; a new one takes over its unfinished groups"]


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


LIMIT = 4.0
"""Seconds: long enough for children that do next to nothing, on a busy machine too; one that is too slow is replaced
as well, and no test below counts on its not being."""


@pytest.mark.parametrize(
    ("where", "who", "key"),
    [
        ("rollout", "rollout", "hang"),
        ("rollout start", "rollout", "start"),
        ("evaluation", "rollout", "hang"),
        ("trainer", "trainer", "hang"),
        ("trainer start", "trainer", "start"),
    ],
)
def test_a_process_that_hangs_is_replaced(where: str, who: str, key: str, tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), hang=where)
    limits = {"start": Patience(LIMIT, 0), "hang": Patience(0, LIMIT)}  # 0: never
    boss, said = supervisor(run, patience=limits[key], max_restarts=20)
    assert boss.run() == {"steps": 6}
    assert said[0].startswith(f"the {who} process showed no progress for 4 s (run.{key}_seconds) and was ended; ")
    steps = lines(run, "trainer")
    assert {s["version"] for s in steps} == set(range(6))
    assert all(0 <= lag <= 2 for s in steps for lag in s["lags"])
    told = [sentence for s in steps for sentence in s["replaced"]]
    assert told[0] == said[0]
    assert steps[-1]["totals"][f"async/replaced_{who}s"] >= 1


def test_processes_that_hang_one_after_another_end_the_run(tmp_path: Path) -> None:
    boss, said = supervisor(
        FakeRun(str(tmp_path), hang="trainer start always"), patience=Patience(1, 1), max_restarts=1
    )
    with pytest.raises(ChildError, match=r"^the trainer process showed no progress for 1 s \(run.start_seconds\) and"):
        boss.run()
    assert len(said) == 1
    assert boss.processes == {}


def test_a_trainer_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), hang="trainer always")
    boss, said = supervisor(run, patience=Patience(0, LIMIT))

    def interrupt() -> None:
        while len(lines(run, "trainer")) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        boss.run()
    thread.join()
    assert said == [
        "the trainer process showed no progress for 4 s (run.hang_seconds) while it was to stop, and was ended"
    ]


def test_what_was_replaced_is_told_again_where_the_files_are_cut_back(tmp_path: Path) -> None:
    """The step that was told of the rollout's death is done again by the next trainer, from the state before."""
    run = FakeRun(str(tmp_path), steps=7, kill_rollout_at=(9,), kill_trainer_at=(3,), step_seconds=0.5)
    boss, said = supervisor(run)
    boss.run()
    steps = lines(run, "trainer")
    again = max(i for i, s in enumerate(steps) if s["version"] == 2)
    told = [sentence for s in steps[again:] for sentence in s["replaced"]]
    cut_off = [sentence for s in steps[:again] if s["version"] >= 2 for sentence in s["replaced"]]
    assert told == said[-len(told) :]
    assert told[-1].startswith("the trainer process was killed")
    assert set(cut_off) <= set(told)  # the rollout's, unless this machine took half a second to notice it
    assert {sentence for s in steps for sentence in s["replaced"]} == set(said)


def test_counts_go_on_over_deaths_and_over_a_resume(tmp_path: Path) -> None:
    run = FakeRun(str(tmp_path), steps=4, stale_groups=(1, 3), skipped_groups=(2,), kill_trainer_at=(3,))
    boss, _ = supervisor(run, on_stale="drop")
    boss.run()
    counted = {
        "async/dropped_groups": 2.0,
        "async/skipped_prompts": 1.0,
        "async/wasted_tokens": 20.0,
        "async/replaced_rollouts": 0.0,
        "async/replaced_trainers": 1.0,
        "guidance/dropped/full": 2.0,
    }
    assert lines(run, "trainer")[-1]["totals"] == counted
    more = FakeRun(str(tmp_path), steps=6)
    supervisor(more, on_stale="drop")[0].run()
    resumed = lines(more, "trainer")[-2:]
    assert [s["version"] for s in resumed] == [4, 5]
    assert [s["totals"] for s in resumed] == [counted, counted]
    assert lines(more, "rollout")[-1]["first"] == 2 * 4 + 3


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
    """Within an update or a step, where no message is read; on Linux also while nothing runs in it at all."""
    code = f"import fake_workers; fake_workers.supervise_busy_children({str(tmp_path)!r})"
    path = os.pathsep.join([str(Path(fake_workers.__file__).parent), *sys.path])
    boss = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    busy = tmp_path / f"{name}.jsonl"
    while not busy.exists() or not busy.read_text().endswith("\n"):
        assert boss.poll() is None
        time.sleep(0.05)
    pid = lines(FakeRun(str(tmp_path)), name)[0]["pid"]
    assert alive(pid)
    if sys.platform == "linux" and name == "trainer":
        os.kill(pid, signal.SIGSTOP)
    boss.kill()
    boss.wait()
    deadline = time.monotonic() + 200
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_cuts_no_message_short() -> None:
    """Else the trainer would take the request to stop for the rest of its groups, and wait for more."""
    here, there = multiprocessing.Pipe()
    sender = Child("trainer", multiprocessing.current_process(), Channel(here))
    got: list[Any] = []

    def read_late() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        got.extend(Channel(there).receive() for _ in range(2))

    reader = threading.Thread(target=read_late)
    reader.start()
    sender.tell(bytes(32 << 20))
    with pytest.raises(KeyboardInterrupt):
        time.sleep(60)
    sender.tell(Stop())
    reader.join()
    assert got == [bytes(32 << 20), Stop()]


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
    out, err = boss.communicate(timeout=400)
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
    assert all(pid is not None and not alive(pid) for pid in pids)
