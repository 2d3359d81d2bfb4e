"""Run folders and their files."""

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tracefp4.report import (
    RunFolderError,
    RunLogger,
    create_run_dir,
    ensure_dir,
    read_jsonl,
    write_json_atomic,
)
from tracefp4.report.logger import check_own


def test_lines_are_sorted_and_repeat_exactly(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with RunLogger(tmp_path / name, tensorboard=False) as logger:
            logger.log(0, {"b": 0.1, "a": 1, "t": torch.tensor(0.5), "n": np.float64(0.25)}, {"step_s": len(name)})
            logger.log(3, {"b": 1e-7}, {})
    text = (tmp_path / "a" / "metrics.jsonl").read_text()
    assert text == '{"a": 1, "b": 0.1, "n": 0.25, "step": 0, "t": 0.5}\n{"b": 1e-07, "step": 3}\n'
    assert text == (tmp_path / "b" / "metrics.jsonl").read_text()
    assert read_jsonl(tmp_path / "a" / "timing.jsonl") == [{"step": 0, "step_s": 1}, {"step": 3}]


def test_a_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    logger = RunLogger(tmp_path, tensorboard=False)
    logger.log(0, {"a": 1.0})
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"a": 1.0, "step": 0}]
    logger.close()
    logger.close()


def test_nonfinite_figures_are_null_counted_and_warned_about_once(tmp_path: Path) -> None:
    with RunLogger(tmp_path, tensorboard=False) as logger:
        with pytest.warns(RuntimeWarning, match="the metric loss is nan and is logged as null"):
            logger.log(0, {"loss": math.nan, "x": 1.0})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logger.log(1, {"loss": math.inf})
        assert logger.nonfinite == 2
    assert read_jsonl(tmp_path / "metrics.jsonl") == [
        {"loss": None, "step": 0, "x": 1.0},
        {"loss": None, "step": 1},
    ]


def test_misuse_is_refused(tmp_path: Path) -> None:
    with RunLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {"a": 1.0})
        with pytest.raises(ValueError, match="step 1 was logged after step 1: steps must increase"):
            logger.log(1, {"a": 1.0})
        with pytest.raises(ValueError, match="'step' is the line's own key"):
            logger.log(2, {"step": 1.0})
        with pytest.raises(TypeError, match="the metric a must be a number, got '1'"):
            logger.log(3, {"a": "1"})  # type: ignore[dict-item]


def test_tensorboard_holds_the_same_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLogger(tmp_path) as logger:
        logger.log(0, {"reward/mean": 0.25}, {"step_s": 2.0})
        logger.log(1, {"reward/mean": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward/mean", "timing/step_s"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.25), (1, 0.5)]


@pytest.mark.parametrize("first", [0, 1])
def test_event_files_show_no_step_twice_where_a_run_goes_back(first: int, tmp_path: Path) -> None:
    """Also to the start, where a process died before its first state; what it wrote of later steps is forgotten."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLogger(tmp_path) as logger:
        for step in range(4):
            logger.log(step, {"a": float(step)}, {"b": 0.0})
    if not first:
        for name in ("metrics.jsonl", "timing.jsonl"):
            (tmp_path / name).unlink()
    with RunLogger(tmp_path, first_step=first) as logger:
        for step in range(first, 3):
            logger.log(step, {"a": 10.0 + step}, {"b": 0.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = [(step, float(step)) for step in range(first)] + [(step, 10.0 + step) for step in range(first, 3)]
    assert [(event.step, event.value) for event in events.Scalars("a")] == expected


def test_two_runs_never_share_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with RunLogger(tmp_path, tensorboard=False) as logger:
        logger.log(0, {"a": 1.0})
    with pytest.raises(RunFolderError, match="is of another run: choose another folder with --out"):
        RunLogger(tmp_path, tensorboard=False)


def test_run_dir_is_new_or_refused(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path / "deep" / "run")
    assert run.is_dir()
    create_run_dir(run)  # still empty
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "tensorboard").mkdir()
    (run / "checkpoint").mkdir()
    with pytest.raises(RunFolderError) as caught:
        create_run_dir(run)
    assert str(caught.value) == (
        f"the run folder {run} is not empty, it holds a run: go on with it by --resume, choose another with --out, or "
        "pass --overwrite to replace it"
    )
    create_run_dir(run, overwrite=True)
    assert list(run.iterdir()) == []


def test_overwrite_spares_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="holds no tracefp4 run, so --overwrite leaves it alone"):
        create_run_dir(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_what_may_be_gone_on_with(tmp_path: Path) -> None:
    run = tmp_path / "run"
    check_own(run)
    run.mkdir()
    check_own(run)
    (run / "config.json").write_text("{}")  # killed before its first step
    check_own(run)
    for name in ("metrics.jsonl", "report.html"):  # what is written into a run's folder later may be there too
        (run / name).write_text("{}\n")
        check_own(run)


@pytest.mark.parametrize(
    ("names", "lacks", "holds", "remedy"),
    [
        (["thesis.tex"], "metrics.jsonl", "thesis.tex", "the folder of a run"),
        (["config.json", "model.safetensors"], "metrics.jsonl", "model.safetensors", "the folder of a run"),
        (["metrics.jsonl", "thesis.tex"], "run.json", "thesis.tex", "the folder of a run"),
        (["metrics.jsonl"], "run.json", "metrics.jsonl", "the folder of a run"),
        (["seed0/metrics.jsonl", "seed1/metrics.jsonl"], "metrics.jsonl", "seed0", "one of the runs in it, such as "),
    ],
)
def test_what_is_no_run_is_not_gone_on_with(
    tmp_path: Path, names: list[str], lacks: str, holds: str, remedy: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(RunFolderError) as caught:
        check_own(tmp_path)
    if remedy.endswith("as "):
        remedy += str(tmp_path / "seed0")
    assert str(caught.value) == (
        f"{tmp_path} is no run to go on with, it lacks {lacks} and holds {holds}: give {remedy} as --out, or a new "
        "folder without --resume"
    )


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunFolderError, match="cannot be made: a file is in its place"):
            ensure_dir(path)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root may write")
def test_unwritable_folder() -> None:
    for path in ("/proc", "/proc/run"):
        with pytest.raises(RunFolderError, match=r"^the folder /proc.* cannot be written \(.+\)$"):
            create_run_dir(path) if path != "/proc" else ensure_dir(path)


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "final.json"
    write_json_atomic(path, {"b": (1, 2), "a": math.nan, "p": Path("x"), "t": torch.tensor(1.5)})
    assert path.read_text().startswith('{\n  "a": null,')
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2], "p": "x", "t": 1.5}
    with pytest.raises(TypeError, match="object has no JSON form"):
        write_json_atomic(path, {"a": object()})
    assert json.loads(path.read_text())["t"] == 1.5
    assert [entry.name for entry in tmp_path.iterdir()] == ["final.json"]
