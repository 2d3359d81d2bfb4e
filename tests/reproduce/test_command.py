"""`tracefp4 reproduce` as a user calls it, with real runs of the tiny profile."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tracefp4.cli import main
from tracefp4.reproduce.plan import Plan, Request, make_plan
from tracefp4.train.warmstart import run_warmstart

ROOT = Path(__file__).parents[2]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_stopped_command_goes_on_to_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing: a run that is stopped by a signal while it trains, gone on with, evaluated."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}")
    out = tmp_path / "out"
    words = ["dynamics", "--profile", "tiny", "--modes", "bf16", "--steps", "8", "--jobs", "2", "--out", str(out)]
    for start, rung in make_plan(Request("dynamics", None, ("bf16",), (), 8, True), out).starts.items():
        run_warmstart(rung.warmstart(), start)  # here: a process less
    metrics = out / "dynamics/bf16/seed0/metrics.jsonl"
    ended = threading.Event()

    def stop() -> None:
        while not ended.wait(0.02):
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= 3:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=stop, daemon=True).start()
    try:
        assert call(*words) == 128 + signal.SIGTERM
    finally:
        ended.set()
    assert not (out / "results.json").exists()
    assert list((metrics.parent / "states").iterdir())
    assert call(*words) == 0
    results = json.loads((out / "results.json").read_text())
    arm = results["tables"]["dynamics"]["arms"]["bf16"]
    assert arm["steps"] == [8]
    assert arm["scores"]["fp4"]["problems"] == 16
    assert results["complete"]
    resumes = json.loads((metrics.parent / "run.json").read_text())["resumes"]
    assert [resume["step"] > 0 for resume in resumes] == [True]


@pytest.fixture
def made(made_up: Callable[..., Plan], tmp_path: Path) -> tuple[str, ...]:
    """The options of a command whose runs are made up."""
    made_up(modes=("bf16", "trace"), seeds=(0,))
    return ("--profile", "tiny", "--modes", "bf16,trace", "--steps", "20", "--out", str(tmp_path / "out"))


def test_the_table_and_the_status(made: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("dynamics", *made, "--seeds", "0") == 0
    printed = capsys.readouterr()
    assert "Control stable: bf16 stays at 0.8 or above after its rise" in printed.out
    assert "dynamics (2 rows); seeds 0; 20 steps; 2 of 2 runs left" in printed.err
    assert call("status", str(tmp_path / "out")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("warm start tiny-2-")
    assert lines[0].endswith(": made, pass rate 0.312 (n = 64) after 20 steps, 2 s, band 0 to 1")
    assert lines[1:] == [
        "dynamics/bf16, seed 0   step 20/20, evaluated, 2.00 s a step",
        "dynamics/trace, seed 0  step 20/20, evaluated, 2.00 s a step",
        "2 of 2 runs done",
    ]


def test_the_table_of_another_machines_runs(
    made: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call("dynamics", *made, "--seeds", "0", "--max-minutes", "0")
    plan = tmp_path / "out/plan.json"
    plan.write_text(plan.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    capsys.readouterr()
    assert call("status", str(tmp_path / "out")) == 0
    assert call("table", str(tmp_path / "out")) == 0
    assert "Not yet a comparison" in capsys.readouterr().out
    assert call("dynamics", *made, "--seeds", "0") == 2
    assert "has --device cuda, now it is cpu" in capsys.readouterr().err


def test_time_that_is_up(made: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("dynamics", *made, "--max-minutes", "0") == 4
    printed = capsys.readouterr()
    assert "Not yet a comparison: bf16 has not finished." in printed.out
    again = f"tracefp4 reproduce dynamics --out {tmp_path / 'out'} --profile tiny --modes bf16,trace --steps 20"
    assert f"0 of 2 runs done; go on with: {again}" in printed.err
    assert call("pack", str(tmp_path / "out"), str(tmp_path / "pack")) == 0
    assert "in 1 parts, states of 0 runs" in capsys.readouterr().out
    assert call("unpack", str(tmp_path / "pack"), str(tmp_path / "new/out")) == 0
    assert "unpacked; go on with: tracefp4 reproduce dynamics" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("main --profile small", "--profile must be full or tiny, got 'small'"),
        ("main --modes trase", "there is no mode 'trase'; did you mean trace"),
        ("main --modes bf16 --device tpu", "--device must be auto, cpu or cuda, got 'tpu'"),
        ("main --modes bf16 --seeds x", "--seeds must be whole numbers joined by commas"),
        (
            "layers --modes bf16 --recipe sums-small",
            "reproduce layers climbs the ladder itself: --recipe is one of ladder-6",
        ),
        ("main --modes bf16 --recipe nowhere", "--recipe nowhere is no rung of the ladder"),
        ("main --modes bf16 --recipe nowhere --profile tiny", "--recipe nowhere is no rung of the ladder"),
        ("main run.steps=3 --modes bf16", "the override 'run.steps=3' contradicts --steps, which sets run.steps"),
        ("main train.tis_cap=2 --modes bf16", "contradicts the table decoupled, whose rows set train.tis_cap"),
        (
            "main train.lrr=1 --modes bf16",
            "unknown key train.lrr in the override 'train.lrr=1'; did you mean",
        ),
        (
            "main train.dtype=float32 --modes bf16 --profile tiny",
            "rollout.dtype bfloat16 and train.dtype float32 differ",
        ),
        (
            "search sums-small --vary train.lr=1e-5 --vary train.lr=2e-5",
            "two --vary set train.lr: give all of its values",
        ),
        ("status .", ". holds no reproduction: give a folder that reproduce wrote, which has a plan.json"),
        ("unpack . out", ". is no pack: pack.json cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_shared_are_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, a_file = tmp_path / "out", tmp_path / "file"
    a_file.touch()
    for places, why in ((out, "must be a folder of its own"), ("", "must be a folder of its own"), (a_file, "a file")):
        words = ["main", "--profile", "tiny", "--modes", "bf16", "--out", str(out), "--places", str(places)]
        assert call(*words) == 2
        assert why in capsys.readouterr().err
    assert not out.exists()


def test_how_to_go_on_names_jobs_and_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = tmp_path / "places"
    words = ["main", "--profile", "tiny", "--modes", "bf16", "--out", str(tmp_path / "out"), "--max-minutes", "0"]
    assert call(*words, "--jobs", "3", "--places", str(places)) == 4
    assert f"--jobs 3 --places {places}" in capsys.readouterr().err


def test_commands_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, texts in (
        (["methods", "+", "methods"], 0, 2),
        (["methods", "+", "train", "nowhere.toml", "--out", "x", "+", "methods"], 2, 1),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["chain", "--", *words])
        assert caught.value.code == code
        assert capsys.readouterr().out.count("FP32 rollout and trainer: the control") == texts


def test_a_folder_of_finished_tables_is_told_from_one_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.md").write_text("# main\n")
    assert call("table", str(tmp_path)) == 2
    assert "holds finished tables and no runs: read its results.md" in capsys.readouterr().err
