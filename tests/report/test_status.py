"""Where runs stand, from their folders alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracefp4.cli import main
from tracefp4.files import folder_lock, lock_held
from tracefp4.report import RunLogger, write_json_atomic
from tracefp4.report.runs import ReportError
from tracefp4.report.status import status_table, statuses, warning_lines


def folder(root: Path, name: str, steps: int, planned: int = 20) -> Path:
    run = root / name
    run.mkdir(parents=True)
    config = {"method": {"name": "trace"}, "run": {"seed": 3, "steps": planned}}
    write_json_atomic(run / "config.json", config)
    with RunLogger(run, tensorboard=False) as logger:
        for step in range(steps):
            metrics = {"reward/mean": step / 10, "mismatch/logprob_abs_diff_mean": 0.002, "guidance/guided_share": 1.0}
            timing = {"rollout_seconds": 2.0, "train_seconds": 1.0, "weight_sync_seconds": 0.5}
            logger.log(step, metrics, timing)
    return run


def test_a_running_run_says_how_long_it_takes(tmp_path: Path) -> None:
    run = folder(tmp_path, "a", steps=12)
    (run / "events.jsonl").write_text('{"step": 4, "name": "mismatch", "message": "it drifts"}\n{"step": 5, "na')
    with folder_lock(run):
        (row,) = statuses([run])
    assert (row.state, row.steps, row.planned, row.method, row.seed) == ("running", 12, 20, "trace", 3)
    assert row.step_seconds == 3.5
    assert row.left_seconds == 8 * 3.5
    assert row.reward == pytest.approx(sum(range(2, 12)) / 100)
    assert (row.guided, row.warnings, row.last_warning) == (1.0, 1, "step 4, mismatch: it drifts")
    assert row.idle_seconds is not None
    assert row.idle_seconds < 60


def test_failed_saves_are_seen(tmp_path: Path) -> None:
    run = folder(tmp_path, "a", steps=2)
    line = {"step": 2, "rollout_seconds": 2.0, "failed_saves": 3.0}
    with (run / "timing.jsonl").open("a") as timing, (run / "metrics.jsonl").open("a") as metrics:
        timing.write(json.dumps(line) + "\n")
        metrics.write(json.dumps({"step": 2, "reward/mean": 0.1}) + "\n")
    assert statuses([run])[0].last_warning == "3 saves failed, it has no state: is the disk full?"
    (run / "states" / "step-00000001").mkdir(parents=True)
    assert statuses([run])[0].last_warning == "3 saves failed, its newest state is of step 1: is the disk full?"
    write_json_atomic(run / "final.json", {"steps": 3})
    assert statuses([run])[0].last_warning is None


def test_states_of_runs_that_no_process_holds(tmp_path: Path) -> None:
    folder(tmp_path, "killed", steps=2)
    done, stopped = folder(tmp_path, "done", steps=20), folder(tmp_path, "stopped", steps=5)
    write_json_atomic(done / "final.json", {"steps": 20, "eval/pass_rate_start": 0.25, "eval/pass_rate_end": 0.5})
    write_json_atomic(stopped / "final.json", {"steps": 5, "stopped_by": {"name": "nonfinite", "step": 4}})
    (done / "checkpoint").mkdir()
    (done / "checkpoint" / "config.json").write_text("{}")
    rows = {row.run.rsplit("/", 1)[1]: row for row in statuses([tmp_path])}
    assert {name: row.state for name, row in rows.items()} == {
        "killed": "not running",
        "done": "done",
        "stopped": "stopped by watch.nonfinite",
    }
    assert (rows["done"].pass_rate_start, rows["done"].pass_rate_end) == (0.25, 0.5)
    assert rows["killed"].left_seconds is None
    assert status_table(list(rows.values())).row_count == 3


def test_a_run_in_its_first_step_is_seen(tmp_path: Path) -> None:
    run = folder(tmp_path, "new", steps=0)
    (run / "metrics.jsonl").unlink(missing_ok=True)
    with folder_lock(run):
        (row,) = statuses([tmp_path])
    assert (row.state, row.steps, row.planned, row.step_seconds) == ("running", 0, 20, None)


def test_looking_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    assert not lock_held(tmp_path)
    with folder_lock(tmp_path):
        assert lock_held(tmp_path)
    assert not lock_held(tmp_path)


def test_a_run_that_ended_before_its_first_step_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    ended = (
        f"{run} is empty, as a run leaves it that ends before its first step: the command that began it begins it anew"
    )
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit) as stop:
            main(["status", str(run), *options])
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"error: {ended}\n"
    with (
        folder_lock(run),
        pytest.raises(ReportError, match="run has no step to tell of yet: a process holds it"),
    ):
        statuses([run])
    (run / "run.lock").touch()  # of a process that was killed before it wrote anything
    with pytest.raises(ReportError, match="is empty, as a run leaves it"):
        statuses([run])


def test_a_folder_without_runs_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ReportError, match=r"^no run found in .*: neither it nor a folder below it holds metrics.jsonl"):
        statuses([tmp_path])
    with pytest.raises(ReportError, match="is no folder"):
        statuses([tmp_path / "none"])


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path, "a", steps=3)
    with pytest.raises(SystemExit) as stop:
        main(["status", str(tmp_path)])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "not running" in shown
    assert "3/20" in shown
    with pytest.raises(SystemExit):
        main(["status", str(tmp_path), "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row["steps"] == 3


def test_runs_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("bf16", "trace"):
        folder(tmp_path, f"{method}/seed0", steps=1)
    folder(tmp_path, "trace/seed1", steps=1)
    monkeypatch.chdir(tmp_path)
    shown = [row.run for row in statuses(["bf16/seed0", "trace/seed0", "trace/seed1"])]
    assert shown == ["bf16/seed0", "trace/seed0", "seed1"]
    assert [row.run for row in statuses(["trace"])] == ["trace/seed0", "trace/seed1"]


def test_what_many_runs_warn_of_is_one_line(tmp_path: Path) -> None:
    for name, step, message in (("a", 3, "no space"), ("b", 7, "no space"), ("c", 5, "read-only")):
        run = folder(tmp_path, name, steps=8)
        (run / "events.jsonl").write_text(json.dumps({"step": step, "name": "disk", "message": message}) + "\n")
    root = tmp_path.as_posix()
    said = warning_lines(statuses([tmp_path]))
    assert said == [f"{root}/a and 1 more: disk: no space", f"{root}/c: step 5, disk: read-only"]


@pytest.mark.parametrize("content", [b"\0" * 40, b"garbage"])
def test_a_log_without_a_whole_line_is_of_no_step(tmp_path: Path, content: bytes) -> None:
    run = folder(tmp_path, "a", steps=2)
    (run / "metrics.jsonl").write_bytes(content)
    (row,) = statuses([run])
    assert row.steps == 0
    assert row.reward is None
