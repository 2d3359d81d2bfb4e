"""States on disk: whole or absent, the newest whole one is found, settings that matter must agree."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tracefp4.errors import TracefpError
from tracefp4.files import StorageError
from tracefp4.train import checkpoint
from tracefp4.train.checkpoint import check_config, load_latest, save_state


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"master.w": torch.full((3, 2), value), "generator": torch.arange(5, dtype=torch.uint8)}


def test_round_trip_keeps_the_newest(tmp_path: Path) -> None:
    states = tmp_path / "states"
    for step in (10, 20, 30):
        save_state(states, step, tensors(step), {"counters": {"version": step}}, keep=2)
    assert sorted(p.name for p in states.iterdir()) == ["step-00000020", "step-00000030"]
    loaded = load_latest(states)
    assert loaded is not None
    got, facts = loaded
    assert got["master.w"].equal(torch.full((3, 2), 30.0))
    assert got["generator"].dtype == torch.uint8
    assert (facts["step"], facts["counters"]) == (30, {"version": 30})


def test_no_state(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "none") is None


@pytest.mark.parametrize("damage", ["flip", "cut", "no facts", "no tensors", "broken facts"])
def test_a_damaged_state_is_passed_over(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save_state(tmp_path, step, tensors(step), {}, keep=2)
    newest = tmp_path / "step-00000002"
    data = bytearray((newest / checkpoint.TENSORS).read_bytes())
    if damage == "flip":
        data[-3] ^= 1
        (newest / checkpoint.TENSORS).write_bytes(data)
    elif damage == "cut":
        (newest / checkpoint.TENSORS).write_bytes(data[:-4])
    elif damage == "broken facts":
        (newest / checkpoint.FACTS).write_text("{")
    else:
        (newest / (checkpoint.FACTS if damage == "no facts" else checkpoint.TENSORS)).unlink()
    loaded = load_latest(tmp_path)
    assert capsys.readouterr().err.startswith(f"warning: {newest} is damaged and passed over: ")
    assert loaded is not None
    assert loaded[1]["step"] == 1


def test_a_write_that_fails_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, 1, tensors(1), {}, keep=1)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(TracefpError, match=r"step-00000002 cannot be written \(No space left on device\)"):
        save_state(tmp_path, 2, tensors(2), {}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded[1]["step"] == 1


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".step-abc").mkdir()
    save_state(tmp_path, 1, tensors(1), {}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_check_config() -> None:
    a = {"train": {"lr": 1e-4}, "run": {"steps": 5, "seed": 0}}
    check_config(a, {"train": {"lr": 1e-4}, "run": {"steps": 9, "seed": 0}}, frozenset({"run.steps"}))
    with pytest.raises(TracefpError, match=r"train.lr = 0.0001, the recipe now says 0.001: set it back"):
        check_config(a, {"train": {"lr": 1e-3}, "run": {"steps": 5, "seed": 0}}, frozenset({"run.steps"}))


def test_a_run_that_went_back_drops_the_states_ahead_of_it(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save_state(tmp_path, step, tensors(step), {}, keep=3)
    save_state(tmp_path, 3, tensors(3), {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_state_that_does_not_pass_gives_way_to_an_older_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4, 6):
        save_state(tmp_path, step, tensors(step), {}, keep=3)

    def check(most: int) -> Callable[[dict[str, Any]], None]:
        def passes(facts: dict[str, Any]) -> None:
            if facts["step"] > most:
                raise StorageError(f"the log ends before step {facts['step']}")

        return passes

    loaded = load_latest(tmp_path, (), check(3))
    assert loaded is not None
    assert loaded[1]["step"] == 2
    assert "step-00000006 is passed over: the log ends before step 6" in capsys.readouterr().err
    with pytest.raises(StorageError, match="the log ends before step 6"):
        load_latest(tmp_path, (), check(0))
