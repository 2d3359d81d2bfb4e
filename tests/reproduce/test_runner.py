"""Runs side by side: order, deadlines, failures, signals, and going on after each of them."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from made_up_runs import RUN
from tracefp4.compare import CompareError
from tracefp4.config import ConfigError
from tracefp4.files import StorageError
from tracefp4.reproduce import runner
from tracefp4.reproduce.places import Places
from tracefp4.reproduce.plan import Plan, make_plan, open_plan, read_plan, scores_of, stored_request
from tracefp4.reproduce.results import gather
from tracefp4.reproduce.reuse import adopt
from tracefp4.reproduce.runner import (
    INVOCATION_NOW,
    INVOCATIONS,
    Limits,
    expected_seconds,
    run_key,
    run_plan,
    start_state,
    steps_done,
)
from tracefp4.reproduce.search import open_search
from tracefp4.signals import Stopped

MakeUp = Callable[..., Plan]
DIVERGED = "print('error: the run diverged in step 7: the policy loss is not finite; no state'); raise SystemExit(1)"
REFUSED = "print('error: train.lr must be positive'); raise SystemExit(2)"
CRASHED = "print('Traceback'); raise SystemExit(1)"
LATE = "print('error: final.json cannot be written (No space left on device)'); raise SystemExit(2)"
DISK_FULL = RUN.replace('(run / "final.json")', f'if not done:\n    {LATE}\n(run / "final.json")')
"""Ends after its last step, the first time."""
NO_ANSWERS = RUN.replace("for form in forms", f"{LATE.replace('final', 'eval')}\nfor form in forms")
SOME_ANSWERS = RUN.replace('(evaluation / "timing.jsonl")', f'{LATE}\n(evaluation / "timing.jsonl")')


def run(
    plan: Plan, jobs: int = 3, seconds: float | None = None, whole: bool = False, places: Path | None = None
) -> tuple[list[str], object]:
    lines: list[str] = []
    deadline = None if seconds is None else time.monotonic() + seconds
    outcome = run_plan(plan, Limits(jobs, deadline, whole, places), lines.append)
    return lines, outcome


def test_all_runs_seed_by_seed(made_up: MakeUp) -> None:
    plan = made_up()
    assert [spec.name for spec in plan.specs[:4]] == [
        "dynamics/bf16, seed 0",
        "dynamics/qat, seed 0",
        "dynamics/trace, seed 0",
        "dynamics/bf16, seed 1",
    ]
    lines, outcome = run(plan)
    assert plan.complete
    assert outcome.in_time  # type: ignore[attr-defined]
    assert "dynamics/trace, seed 1: done, 2.00 s a step" in lines
    spec = plan.specs[1]
    assert (
        json.loads((spec.eval_dir / "scores.json").read_text())["forms"]["fp4"] == [[1.0, 1.0]] * 8 + [[0.0, 0.0]] * 2
    )
    again, _ = run(plan)
    assert again == []  # nothing is started twice
    facts = [json.loads(line) for line in (plan.out / INVOCATIONS).read_text().splitlines()]
    assert [fact["jobs"] for fact in facts] == [3, 3]


def test_runs_are_spread_over_the_gpus(made_up: MakeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["4", "6"])
    told = f"import os; print('on', os.environ.get('CUDA_VISIBLE_DEVICES'))\n{RUN}"
    modes = ("bf16", "qat", "trace")
    plan = made_up(sources=dict.fromkeys(modes, told), modes=modes, seeds=(0,))
    run(replace(plan, device="cuda"))
    assert [(spec.folder / "seed0.log").read_text().split()[1] for spec in plan.specs] == ["4", "6", "4"]
    plan = made_up(sources=dict.fromkeys(modes, told), modes=modes, seeds=(0,), folder="cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run(plan)
    assert "on None" in (plan.specs[0].folder / "seed0.log").read_text()


def run_beside(plan: Plan, places: Path) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []
    thread = threading.Thread(target=lambda: run_plan(plan, Limits(2, None, False, places), lines.append))
    thread.start()
    return thread, lines


def test_commands_share_places(made_up: MakeUp, tmp_path: Path) -> None:
    folder = tmp_path / "places"
    others = Places(2, folder)
    first, second = others.take(), others.take()
    assert first is not None
    assert second is not None
    assert others.take() is None
    assert Places(2, folder).take() is None
    plan = made_up(modes=("bf16",), seeds=(0,))
    thread, lines = run_beside(plan, folder)
    time.sleep(0.5)
    assert lines == [f"waits for a place in {folder}: other commands hold all 2"]
    others.release(second)
    thread.join(60)
    assert plan.complete
    assert (third := Places(2, folder).take()) is not None  # given back at the end
    assert third.index == second.index
    others.release(first)


def test_a_run_that_another_command_has_under_way_is_waited_for(made_up: MakeUp, tmp_path: Path) -> None:
    folder = tmp_path / "places"
    plan = made_up(modes=("bf16", "qat"), seeds=(0,))
    hold = Places(2, folder).hold(run_key(plan.specs[0]))
    assert hold is not None
    thread, lines = run_beside(plan, folder)
    while not plan.specs[1].done or not any(line.startswith("waits for") for line in lines):
        time.sleep(0.05)
    assert "waits for dynamics/bf16, seed 0, which another command has under way" in lines
    assert not (plan.specs[0].run_dir).exists()
    twin = made_up(modes=("bf16",), seeds=(0,), folder="twin")
    run(twin)
    hold.release()
    thread.join(60)
    assert plan.complete
    assert "dynamics/bf16, seed 0: the same run as twin/dynamics/bf16/seed0, taken over" in lines


def test_a_warm_start_that_another_command_makes_is_waited_for(made_up: MakeUp, tmp_path: Path) -> None:
    folder = tmp_path / "places"
    plan = made_up(modes=("bf16",), seeds=(0,))
    (start,) = plan.starts
    made = (start / "warmstart.json").read_text()
    (start / "warmstart.json").unlink()
    hold = Places(2, folder).hold(start.name)
    assert hold is not None
    thread, lines = run_beside(plan, folder)
    time.sleep(0.5)
    assert lines == [f"waits for the warm start {start.name}, which another command makes"]
    (start / "warmstart.json").write_text(made)
    hold.release()
    thread.join(60)
    assert plan.complete


def test_a_process_holds_its_place_when_its_command_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    places = Places(1, folder)
    place = places.take()
    assert place is not None
    orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=place.descriptors)
    places.release(place)  # as the end of the command would
    assert Places(1, folder).take() is None
    orphan.communicate(b"\n")
    assert Places(1, folder).take() is not None


def test_a_folder_without_locks_is_refused_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    places = Places(2, tmp_path / "p")
    for ask in (places.take, lambda: places.hold("a run")):
        with pytest.raises(StorageError, match=r"cannot be locked .*choose another folder for --places"):
            ask()


def test_a_place_is_on_the_gpu_with_the_fewest(tmp_path: Path) -> None:
    places = Places(5, tmp_path / "p", ["4", "6"])
    taken = [places.take() for _ in range(5)]
    assert [p.gpu for p in taken if p is not None] == ["4", "6", "4", "6", "4"]
    for p in (taken[1], taken[3]):
        assert p is not None
        places.release(p)
    beside = Places(5, tmp_path / "p", ["4", "6"])
    assert [p.gpu for p in (beside.take(), beside.take()) if p is not None] == ["6", "6"]
    assert beside.take() is None
    alone = Places(1, None, ["7"]).take()
    assert alone is not None
    assert alone.gpu is None


def test_a_deadline_stops_and_the_next_call_goes_on(made_up: MakeUp) -> None:
    # 10 s of steps, and a few for the start of a process on a busy machine.
    plan = made_up(steps=40, pause=0.25, modes=("bf16", "trace"), seeds=(0,))
    lines, outcome = run(plan, seconds=5.0)
    assert not outcome.in_time  # type: ignore[attr-defined]
    first = steps_done(plan.specs[0])
    assert 3 <= first < 40
    assert f"dynamics/bf16, seed 0: stopped after {first} of 40 steps" in lines
    assert any("dynamics/bf16, seed 0: 2.00 s a step, " in line for line in lines)
    assert list((plan.specs[0].run_dir / "states").iterdir())
    lines, outcome = run(made_up(steps=40, modes=("bf16", "trace"), seeds=(0,)))
    assert outcome.in_time  # type: ignore[attr-defined]
    assert f"dynamics/bf16, seed 0: going on after step {first}" in lines
    assert steps_done(plan.specs[0]) == 40
    log = (plan.specs[0].folder / "seed0.log").read_text().splitlines()
    assert log == ["bf16 0 from 0", f"bf16 0 from {first}"]


def test_the_time_of_a_killed_invocation_counts(made_up: MakeUp) -> None:
    plan = made_up(modes=("bf16",), seeds=(0,))
    (plan.out / INVOCATION_NOW).write_text('{"seconds": 77.0, "jobs": 5, "device": "cpu"}')
    run(plan)
    facts = [json.loads(line) for line in (plan.out / INVOCATIONS).read_text().splitlines()]
    assert facts[0] == {"seconds": 77.0, "jobs": 5, "device": "cpu"}
    assert 0 < facts[1]["seconds"] < 60
    assert not (plan.out / INVOCATION_NOW).exists()


def test_whole_starts_only_what_ends_in_time(made_up: MakeUp) -> None:
    plan = made_up(modes=("bf16",), seeds=(0, 1))
    _, outcome = run(plan, jobs=1, seconds=20, whole=True)  # 20 steps of 2 s: the second would take 40 s
    assert plan.specs[0].done
    assert not plan.specs[1].run_dir.exists()
    assert not outcome.in_time  # type: ignore[attr-defined]
    assert expected_seconds(plan.specs[1], plan) == 40.0


def test_a_run_that_diverges_is_a_result(made_up: MakeUp) -> None:
    plan = made_up(sources={"qat": DIVERGED}, seeds=(0,))
    _, outcome = run(plan)
    assert plan.complete
    assert outcome.failed == {}  # type: ignore[attr-defined]
    assert json.loads(plan.specs[1].failure.read_text()) == {
        "step": 7,
        "reason": "the run diverged in step 7: the policy loss is not finite; no state",
    }


def test_a_crash_ends_one_run_and_is_tried_again(made_up: MakeUp) -> None:
    plan = made_up(sources={"qat": CRASHED}, seeds=(0,))
    lines, outcome = run(plan)
    assert list(outcome.failed) == ["dynamics/qat, seed 0"]  # type: ignore[attr-defined]
    assert "  Traceback" in lines
    assert [spec.done for spec in plan.specs] == [True, False, True]
    run(made_up(seeds=(0,)))
    assert plan.complete


@pytest.mark.parametrize("source", [REFUSED, CRASHED])
def test_an_evaluation_whose_policy_failed_is_left_out(made_up: MakeUp, source: str) -> None:
    plan = made_up(sources={"bf16": source}, experiment="ptq", modes=("bf16", "ptq:nvfp4", "qat"), seeds=(0,))
    lines, outcome = run(plan, jobs=2)
    assert list(outcome.failed) == ["ptq/bf16, seed 0"]  # type: ignore[attr-defined]
    assert outcome.in_time  # type: ignore[attr-defined]
    assert not any(line.startswith("ptq/ptq:nvfp4") for line in lines)
    assert [spec.done for spec in plan.specs] == [False, False, True]


def test_a_warm_start_that_fails_holds_back_its_own_runs(
    made_up: MakeUp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = made_up(experiment="layers", modes=("bf16",), seeds=(0,))
    broken, made = plan.specs[0].start, plan.specs[1].start
    (broken / "warmstart.json").unlink()
    log = broken.with_name(f"{broken.name}.log")
    log.write_text("step   150  loss 1.2  held-out pass rate 0.125 (n = 512)  30 characters  9 s\n")
    assert start_state(broken, plan.starts[broken]) == "step 150 of at most 20, pass rate 0.125, band 0 to 1"
    assert start_state(tmp_path / "nowhere", plan.starts[made]) == "not made yet, band 0 to 1"
    source = "print('error: pass rate 0.125 after 20 steps is outside [0.2, 0.4]'); raise SystemExit(2)"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{source}"\n')
    program.chmod(0o755)
    monkeypatch.setattr("tracefp4.reproduce.runner.WARMSTART", [str(program)])
    lines, outcome = run(plan)
    assert [spec.done for spec in plan.specs] == [False, True, True]
    why = "error: pass rate 0.125 after 20 steps is outside [0.2, 0.4]"
    assert outcome.failed == {broken.name: f"the warm start failed with exit code 2: {why}"}  # type: ignore[attr-defined]
    assert not any("layers-6/bf16" in line for line in lines)


def test_a_refused_row_is_left_out_and_the_rest_goes_on(made_up: MakeUp) -> None:
    plan = made_up(sources={"qat": REFUSED}, seeds=(0, 1))
    lines, outcome = run(plan, jobs=1)
    why = "was refused: error: train.lr must be positive"
    assert outcome.failed == {"dynamics/qat, seed 0": why}  # type: ignore[attr-defined]
    assert f"dynamics/qat, seed 0: {why}" in lines
    assert [spec.done for spec in plan.specs] == [spec.arm.name != "qat" for spec in plan.specs]


def test_an_error_after_the_first_step_is_the_runs_own_and_it_is_tried_again(made_up: MakeUp) -> None:
    plan = made_up(sources={"qat": DISK_FULL}, seeds=(0, 1))
    lines, outcome = run(plan, jobs=1)
    why = "failed after 20 of 20 steps: error: final.json cannot be written (No space left on device); its log is "
    assert outcome.failed == {  # type: ignore[attr-defined]
        f"dynamics/qat, seed {seed}": f"{why}{plan.specs[1].folder / f'seed{seed}.log'}" for seed in (0, 1)
    }
    assert outcome.refused == []  # type: ignore[attr-defined]
    assert any(line.startswith(f"dynamics/qat, seed 1: {why}") for line in lines)
    assert [spec.done for spec in plan.specs] == [spec.arm.name != "qat" for spec in plan.specs]
    lines, outcome = run(plan, jobs=1)
    assert "dynamics/qat, seed 0: going on after step 20" in lines
    assert outcome.failed == {}  # type: ignore[attr-defined]
    assert plan.complete


def test_no_command_ends_because_all_of_its_runs_failed_late(made_up: MakeUp) -> None:
    plan = made_up(sources={"bf16": DISK_FULL}, modes=("bf16",), seeds=(0,))
    _, outcome = run(plan)
    assert list(outcome.failed) == ["dynamics/bf16, seed 0"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", [NO_ANSWERS, SOME_ANSWERS])
def test_an_error_in_an_evaluation_is_the_runs_own_once_it_is_trained(made_up: MakeUp, source: str) -> None:
    plan = made_up(sources={"qat": source}, modes=("bf16", "qat"), seeds=(0, 1))
    _, outcome = run(plan, jobs=1)
    assert outcome.refused == []  # type: ignore[attr-defined]
    assert len(outcome.failed) == 2, "each seed is tried"  # type: ignore[attr-defined]
    assert all("failed in its evaluation: error: " in why for why in outcome.failed.values())  # type: ignore[attr-defined]
    assert plan.specs[1].trained
    assert not plan.specs[1].done


@pytest.mark.parametrize(("source", "refused"), [(REFUSED, 1), (SOME_ANSWERS, 0)])
def test_a_row_that_only_evaluates_is_refused_before_its_first_answer(
    made_up: MakeUp, source: str, refused: int
) -> None:
    only = "import sys\nif 'nvfp4' in sys.argv[2]:\n" + textwrap.indent(source, "    ") + "\nelse:\n"
    source = only + textwrap.indent(RUN, "    ")
    plan = made_up(sources={"bf16": source}, experiment="ptq", modes=("bf16", "ptq:nvfp4"), seeds=(0,))
    _, outcome = run(plan)
    assert len(outcome.failed) == 1  # type: ignore[attr-defined]
    assert len(outcome.refused) == refused  # type: ignore[attr-defined]


def test_settings_that_all_rows_refuse_end_all(made_up: MakeUp) -> None:
    plan = made_up(sources=dict.fromkeys(("bf16", "qat", "trace"), REFUSED), seeds=(0,))
    with pytest.raises(CompareError, match=r"dynamics/bf16, seed 0: was refused: error: train\.lr must be positive"):
        run(plan, jobs=1)


def test_a_refused_row_costs_no_row_that_time_has_stopped(made_up: MakeUp) -> None:
    plan = made_up(sources={"qat": REFUSED}, steps=400, pause=0.1, modes=("bf16", "qat"), seeds=(0,))
    _, outcome = run(plan, seconds=4.0)  # bf16 is under way: its tables are written
    assert list(outcome.failed) == ["dynamics/qat, seed 0"]  # type: ignore[attr-defined]
    assert not outcome.in_time  # type: ignore[attr-defined]
    assert not plan.specs[0].trained


@pytest.mark.parametrize(
    "said", ["torch.AcceleratorError: CUDA error: out of memory", "RuntimeError: Triton Error [CUDA]: out of memory"]
)
def test_memory_that_gives_out_below_torch_is_known_and_an_earlier_one_forgotten(made_up: MakeUp, said: str) -> None:
    again = f"print({said!r}); raise SystemExit(1)"
    plan = made_up(sources={"trace": again}, pause=0.05, seeds=(0,))
    lines, outcome = run(plan, jobs=3)
    assert sum("out of memory beside" in line for line in lines) >= 1
    assert list(outcome.failed) == ["dynamics/trace, seed 0"], "alone it fails for good"  # type: ignore[attr-defined]
    beside = made_up(sources={"trace": CRASHED}, pause=0.05, seeds=(0, 1))
    lines, _ = run(beside, jobs=3)
    assert not any("out of memory beside" in line for line in lines)


def test_out_of_memory_beside_others_fewer_run_at_once(made_up: MakeUp, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    once = (
        f"import pathlib; flag = pathlib.Path({str(flag)!r})\n"
        "if not flag.exists():\n"
        "    flag.touch(); print('torch.OutOfMemoryError: CUDA out of memory. Tried'); raise SystemExit(1)\n"
    )
    plan = made_up(sources={"qat": once + RUN}, pause=0.05, seeds=(0, 1))
    lines, outcome = run(plan, jobs=3)
    assert plan.complete
    assert outcome.failed == {}  # type: ignore[attr-defined]
    told = "out of memory beside 2 others; from here on at most 2 at once, it goes on later"
    assert any(line.endswith(told) and line.startswith("dynamics/qat") for line in lines)
    alone = "print('torch.OutOfMemoryError: CUDA out of memory. Tried'); raise SystemExit(1)"
    plan = made_up(sources={"qat": alone}, seeds=(0,), folder="alone")
    _, outcome = run(plan, jobs=1)
    assert list(outcome.failed) == ["dynamics/qat, seed 0"]  # type: ignore[attr-defined]


def test_ctrl_c_saves_all_states(made_up: MakeUp) -> None:
    plan = made_up(steps=200, pause=0.05, modes=("bf16", "trace"), seeds=(0,))

    def interrupt() -> None:
        while not all(steps_done(spec) >= 3 for spec in plan.specs):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Stopped):
        run(plan)
    assert all(list((spec.run_dir / "states").iterdir()) for spec in plan.specs)
    assert json.loads((plan.out / INVOCATIONS).read_text())["device"] == "cpu"


def test_a_policy_is_evaluated_once_it_is_trained(made_up: MakeUp) -> None:
    plan = made_up(modes=("bf16", "ptq:nvfp4"), seeds=(0,), experiment="ptq")
    assert [spec.trains for spec in plan.specs] == [True, False]
    assert plan.specs[1].policy_dir == plan.specs[0].run_dir
    lines, _ = run(plan)
    assert lines.index("ptq/bf16, seed 0: done, 2.00 s a step") < lines.index("ptq/ptq:nvfp4, seed 0: evaluating")
    assert plan.complete


TEN = ("evaluation.problems=10",)
"""As many as a made-up evaluation has."""


def test_runs_that_tables_and_commands_share_are_trained_once(made_up: MakeUp) -> None:
    plan = made_up(experiment="bits", modes=("bf16", "1.125 bits"), seeds=(0,), settings=TEN)
    assert [spec.name for spec in plan.specs] == ["bits/bf16, seed 0", "bits/1.125 bits, seed 0", "parts/bf16, seed 0"]
    lines, _ = run(plan)
    assert "parts/bf16, seed 0: the same run as out/bits/bf16/seed0, taken over" in lines
    assert plan.complete
    assert scores_of(plan.specs[2]) == scores_of(plan.specs[0])
    assert not (plan.specs[2].folder / "seed0.log").exists()
    assert json.loads(plan.specs[2].origin.read_text()) == {"run": "out/bits/bf16/seed0"}
    other = made_up(experiment="staleness", modes=("bf16", "trace-all"), seeds=(0,), folder="other", settings=TEN)
    run(other)
    taken = [spec.name for spec in other.specs if spec.origin.exists()]
    assert taken == ["lag-0/bf16, seed 0", "lag-0/trace-all, seed 0"]
    assert gather(other)["taken_over"] == dict.fromkeys(taken, ANY)
    again = made_up(experiment="staleness", modes=("bf16",), seeds=(0, 1), folder="more", steps=7)
    run(again)
    assert not any(spec.origin.exists() for spec in again.specs)


def test_a_run_without_the_scores_that_are_needed_is_evaluated_alone(made_up: MakeUp) -> None:
    plan = made_up(experiment="bits", modes=("bf16",), seeds=(0,))
    run(plan)
    scores = plan.specs[0].eval_dir / "scores.json"
    scores.write_text(scores.read_text().replace('"bf16"', '"bf61"'))
    other = made_up(experiment="staleness", modes=("bf16",), seeds=(0,), folder="other")
    assert adopt(other.specs[0]) == plan.specs[0].run_dir
    assert other.specs[0].trained
    assert not other.specs[0].evaluated
    assert not other.specs[0].needs_start


def test_the_command_of_a_run(made_up: MakeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(stored_request(read_plan(made_up().out)), made_up().out)
    monkeypatch.undo()
    spec = plan.specs[2]
    words = spec.command()
    assert words[1:5] == ["-m", "tracefp4", "chain", "--"]
    train, evaluation = words[5 : words.index("+")], words[words.index("+") + 1 :]
    assert train[:2] == ["train", str(plan.out / "recipes/dynamics.json")]
    assert {"method.name=trace", "run.steps=20", "train.tis_cap=5", "--resume", "--end-with-stdin"} <= set(train)
    assert evaluation[:2] == ["eval", str(spec.run_dir)]
    assert evaluation[evaluation.index("--forms") + 1] == "bf16,fp4"


def test_a_folder_keeps_to_its_settings(made_up: MakeUp) -> None:
    made_up()
    more = made_up(seeds=(0, 1, 2), modes=("bf16", "qat", "trace", "naive"))
    assert read_plan(more.out)["seeds"] == [0, 1, 2]
    for change, message in (
        ({"seeds": (0,)}, "has seed 1 too, which --seeds leaves out"),
        ({"seeds": (0, 1, 2), "modes": ("bf16",)}, "has naive in dynamics too, which --modes leaves out"),
        ({"seeds": (0, 1, 2), "steps": 7}, "has --steps 20, now it is 7"),
        ({"experiment": "main", "modes": ("bf16",)}, "has --experiment dynamics, now it is main"),
    ):
        with pytest.raises(Exception, match=message):
            made_up(**change)
    assert len(read_plan(more.out)["resumes"]) == 1


def test_overrides_change_the_recipe_of_all_rows(made_up: MakeUp) -> None:
    out = made_up().out
    request = stored_request(read_plan(out))
    for settings, same_start in ((("train.lr=1e-3",), True), (("task.free_letters=3",), False)):
        plan = make_plan(replace(request, settings=settings), out)
        assert (list(plan.starts) == list(make_plan(request, out).starts)) == same_start
        with pytest.raises(Exception, match=r"has other overrides \(none\): give the same"):
            open_plan(plan)
    plan = make_plan(replace(request, settings=("train.lr=3e-4",)), out.parent / "other")
    open_plan(plan)
    recipe = json.loads((plan.out / "recipes/dynamics.json").read_text())
    assert recipe["train"]["lr"] == 3e-4
    assert make_plan(stored_request(read_plan(plan.out)), plan.out) == plan


def test_a_folder_of_something_else_is_left_alone(made_up: MakeUp, tmp_path: Path) -> None:
    plan = made_up(seeds=(0,))
    other = replace(plan, out=tmp_path / "other")
    other.out.mkdir()
    (other.out / "run.lock").touch()  # the caller's own
    (other.out / "notes.txt").write_text("mine")
    for opening in (open_plan, open_search):
        with pytest.raises(
            ConfigError, match=r"other holds notes\.txt and no (plan|search)\.json, so it is of something"
        ):
            opening(other)
    assert sorted(path.name for path in other.out.iterdir()) == ["notes.txt", "run.lock"]


def test_a_damaged_plan_is_named(made_up: MakeUp) -> None:
    plan = made_up()
    (plan.out / "plan.json").write_text("{")
    with pytest.raises(Exception, match=r"plan.json cannot be read .* reproduce into another --out"):
        open_plan(plan)
