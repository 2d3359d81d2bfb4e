"""Reading run folders for a report: what is tolerated, and one sentence for what is not."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from report.runfolders import write_comparison, write_run
from tracefp4.errors import TracefpError
from tracefp4.report.runs import find_runs, group_runs, load_run, load_runs, printable


def test_runs_are_found_below_and_once(tmp_path: Path) -> None:
    root = write_comparison(tmp_path / "cmp")
    (root / "trace" / "seed0" / "states").mkdir()
    (root / "trace" / "seed0" / "states" / "metrics.jsonl").write_text("not a run")
    expected = [root / m / f"seed{s}" for m in ("bf16", "qat", "trace") for s in (0, 1)]
    assert find_runs([root]) == expected
    assert find_runs([root / "trace", root, root / "trace" / "seed0"]) == expected
    runs = load_runs([root])
    assert [run.name for run in runs] == [f"cmp/{m}/seed{s}" for m in ("bf16", "qat", "trace") for s in (0, 1)]
    assert [(run.method, run.seed, run.steps_done, run.steps_planned) for run in runs[-2:]] == [
        ("trace", 0, 6, 6),
        ("trace", 1, 3, 6),
    ]


def test_one_run_is_named_after_its_folder(tmp_path: Path) -> None:
    run = load_runs([write_run(tmp_path / "mine")])[0]
    assert run.name == "mine"
    assert run.pass_rates() == (0.3, 0.6, 100)
    assert run.series["timing/rollout_seconds"].values[-1] == 2.5


def test_a_cut_last_line_is_left_out_with_a_notice(tmp_path: Path) -> None:
    metrics = write_run(tmp_path / "mine") / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40])
    run = load_runs([tmp_path])[0]
    assert run.steps_done == 5
    assert run.notices == [f"{run.name}: metrics.jsonl ends in the middle of line 6, which is left out"]


def test_null_is_a_gap_and_a_missing_figure_is_not(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        folder = write_run(tmp_path / "mine", change={2: {"train/grad_norm": float("nan")}, 4: {"rare": 1.0}})
    run = load_run(folder)
    assert run.series["train/grad_norm"].nulls.tolist() == [2]
    assert len(run.series["train/grad_norm"].finite.steps) == 5
    assert run.series["rare"].steps.tolist() == [4]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"reward/mean": 0.1, "st', "is no JSON object ("),
        ("", "is no JSON object ("),
        ("[1, 2]", "is no JSON object with a whole number as step"),
        ('{"reward/mean": 0.1}', "is no JSON object with a whole number as step"),
        ('{"reward/mean": 0.1, "step": true}', "is no JSON object with a whole number as step"),
        ('{"reward/mean": 0.1, "step": 0}', "is of step 0, but follows step 0: steps must rise"),
        ('{"reward/mean": "high", "step": 1}', "reward/mean is str, not a number"),
        ("\udcff", "is no JSON object ("),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    metrics = write_run(tmp_path / "mine", steps=3) / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    lines[1] = line
    metrics.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))
    with pytest.raises(TracefpError) as caught:
        load_runs([tmp_path])
    assert str(caught.value).startswith(f"{metrics.resolve()} line 2")
    assert says in str(caught.value)


def test_huge_numbers_are_nulls(tmp_path: Path) -> None:
    metrics = write_run(tmp_path / "mine", steps=1) / "metrics.jsonl"
    metrics.write_text('{"a": 1e999, "b": NaN, "c": 1' + "0" * 400 + ', "step": 0}\n')
    run = load_run(metrics.parent)
    assert [np.isnan(run.series[key].values[0]) for key in "abc"] == [True] * 3


def test_no_run_and_no_step(tmp_path: Path) -> None:
    with pytest.raises(TracefpError, match=r"no run found in .*: neither it nor a folder below it holds metrics.jsonl"):
        load_runs([tmp_path])
    with pytest.raises(TracefpError, match="is no folder"):
        load_runs([tmp_path / "nowhere"])
    folder = write_run(tmp_path / "fresh", steps=0, planned=5)
    with pytest.raises(TracefpError, match=r"fresh/metrics.jsonl holds no step yet"):
        load_runs([folder])
    write_run(tmp_path / "mine")
    [run] = load_runs([tmp_path])
    assert run.notices == [f"{tmp_path.name}/fresh has logged no step yet and is left out"]


def test_a_folder_without_config_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine")
    for name in ("config.json", "final.json", "run.json", "timing.jsonl"):
        (folder / name).unlink()
    run = load_run(folder)
    assert (run.method, run.seed, run.steps_planned, run.pass_rates()) == ("unknown", None, None, (None, None, None))
    assert run.notices == ["mine: no config.json, so its settings and planned steps are unknown"]


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine")
    (folder / "config.json").write_text("{")
    with pytest.raises(TracefpError, match=r"mine/config.json is not valid JSON"):
        load_run(folder)


def test_groups(tmp_path: Path) -> None:
    write_comparison(tmp_path / "cmp")
    assert [(g.label, [r.seed for r in g.runs]) for g in group_runs(load_runs([tmp_path]))] == [
        ("bf16", [0, 1]),
        ("qat", [0, 1]),
        ("trace", [0, 1]),
    ]
    write_run(tmp_path / "high" / "seed0", config={"train": {"lr": 1.0}})
    write_run(tmp_path / "again" / "seed0", steps=6)
    labels = [group.label for group in group_runs(load_runs([tmp_path]))]
    base = tmp_path.name
    assert labels == [
        f"trace ({base}/again/seed0)",
        f"trace ({base}/cmp/trace)",
        "bf16",
        "qat",
        f"trace ({base}/high/seed0)",
    ]


def test_printable() -> None:
    assert printable("a\x1b[0m\n\udcff<b>") == "a\\x1b[0m\\x0a\\xdcff<b>"
    json.dumps(printable("\udcff")).encode("utf-8")
