"""Exact figures of the summary on made-up metrics, and the tables made from it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tracefp4.report import markdown_table, rich_table, summarize
from tracefp4.report.summary import SummaryError, last_quarter, over_steps, spread
from tracefp4.report.table import caption, table_rows

FACTS = {
    "command": "tracefp4 compare recipes/x.toml",
    "commit": None,
    "hardware": {"cpu": "Some CPU", "cores": 2, "gpu": None},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "jobs": 2,
    "threads_per_run": 1,
}


def write_run(
    out: Path, mode: str, seed: int, lines: list[dict[str, Any]], final: dict[str, Any] | None = None
) -> None:
    folder = out / mode / f"seed{seed}"
    folder.mkdir(parents=True)
    text = "".join(json.dumps({**line, "step": step}) + "\n" for step, line in enumerate(lines))
    (folder / "metrics.jsonl").write_text(text)
    if final is not None:
        (folder / "final.json").write_text(json.dumps(final))


def steps(means: list[float], maxima: list[float], rewards: list[float]) -> list[dict[str, Any]]:
    names = ("mismatch/logprob_abs_diff_mean", "mismatch/logprob_abs_diff_max", "reward/mean")
    return [dict(zip(names, values, strict=True)) for values in zip(means, maxima, rewards, strict=True)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """bf16 and trace, two seeds, five steps: the last quarter is the last two."""
    write_run(tmp_path, "bf16", 0, steps([1, 1, 1, 1, 6], [2, 9, 2, 2, 2], [0, 0, 0, 0.5, 1]))
    write_run(tmp_path, "bf16", 1, steps([4] * 5, [8] * 5, [1] * 5))
    for seed, scale in ((0, 2), (1, 1)):
        lines = steps([2 * scale] * 5, [18] * 5, [0, 0, 0, 0.25, 0.5])
        for line in lines[1::2]:  # only some steps carry the sampled figures
            line |= {"code_mismatch/before": 0.25 * scale, "code_mismatch/after": 0.125}
        for line in lines:
            line["guidance/bytes_per_token"] = 100 + seed
        write_run(
            tmp_path,
            "trace",
            seed,
            lines,
            {"eval/pass_rate_start": 0.25, "eval/pass_rate_end": 0.5, "eval/n": 64},
        )
    return tmp_path


def test_exact_figures(out: Path) -> None:
    summary = summarize(out, ["bf16", "trace"], [0, 1])
    bf16, trace = summary["methods"]["bf16"], summary["methods"]["trace"]
    assert bf16["logprob_abs_diff_mean"] == {"median": 3.0, "min": 2.0, "max": 4.0, "per_seed": [2.0, 4.0]}
    assert bf16["logprob_abs_diff_max"] == {"median": 8.5, "min": 8, "max": 9, "per_seed": [9, 8]}
    assert bf16["reward"] == {"median": 0.875, "min": 0.75, "max": 1.0, "per_seed": [0.75, 1.0]}
    nothing = {"median": None, "min": None, "max": None, "per_seed": [None, None]}
    for figure in (
        "code_mismatch_before",
        "code_mismatch_after",
        "guidance_bytes_per_token",
        "pass_rate_end",
    ):
        assert bf16[figure] == nothing
    assert trace["code_mismatch_before"] == {
        "median": 0.375,
        "min": 0.25,
        "max": 0.5,
        "per_seed": [0.5, 0.25],
    }
    assert trace["code_mismatch_after"]["median"] == 0.125
    assert trace["guidance_bytes_per_token"]["per_seed"] == [100.0, 101.0]
    # Seed by seed (4/2 and 2/4), then the median: not 3/3.
    assert trace["logprob_abs_diff_over_bf16"] == {
        "median": 1.25,
        "min": 0.5,
        "max": 2.0,
        "per_seed": [2.0, 0.5],
    }
    assert trace["logprob_abs_diff_max_over_bf16"]["per_seed"] == [2.0, 2.25]
    assert bf16["logprob_abs_diff_over_bf16"]["median"] == 1.0
    assert trace["pass_rate_start"]["median"] == 0.25
    assert trace["pass_rate_n"] == [64, 64]
    assert (summary["modes"], summary["seeds"], summary["steps"]) == (["bf16", "trace"], [0, 1], 5)


def test_without_a_baseline_there_are_no_ratios(out: Path) -> None:
    summary = summarize(out, ["trace"], [1])
    assert summary["methods"]["trace"]["logprob_abs_diff_over_bf16"]["per_seed"] == [None]
    assert "over bf16" not in table_rows(summary)[0]


def test_a_nonfinite_step_hides_nothing(out: Path) -> None:
    write_run(out, "qat", 0, [*steps([1] * 4, [1] * 4, [1] * 4), {"mismatch/logprob_abs_diff_mean": None}])
    write_run(out, "qat", 1, steps([1], [1], [1]))
    summary = summarize(out, ["bf16", "qat"], [0, 1])
    qat = summary["methods"]["qat"]
    assert qat["logprob_abs_diff_mean"] == {"median": None, "min": None, "max": None, "per_seed": [None, 1.0]}
    assert qat["logprob_abs_diff_over_bf16"]["per_seed"] == [None, 0.25]
    assert qat["nonfinite"] == 1
    assert summary["steps"] is None
    assert caption(summary) == (
        "median of 2 seeds (0, 1), [min, max] over seeds; differing numbers of steps; "
        "NaN or infinite figures, left out above: qat (1)"
    )


def test_a_baseline_of_zero_gives_no_ratio(tmp_path: Path) -> None:
    write_run(tmp_path, "bf16", 0, steps([0], [0], [0]))
    assert summarize(tmp_path, ["bf16"], [0])["methods"]["bf16"]["logprob_abs_diff_over_bf16"]["median"] is None


def test_missing_and_broken_runs_are_named(out: Path) -> None:
    with pytest.raises(SummaryError, match=r"the run of trace with seed 7 left no .*seed7/metrics\.jsonl"):
        summarize(out, ["trace"], [7])
    path = out / "trace" / "seed0" / "metrics.jsonl"
    path.write_text("")
    with pytest.raises(SummaryError, match="the run of trace with seed 0 logged no step"):
        summarize(out, ["trace"], [0])
    path.write_text("{\n")
    with pytest.raises(SummaryError, match="is not one JSON object per line"):
        summarize(out, ["trace"], [0])


def test_small_pieces() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "per_seed": [3.0, 1.0, 2.0]}
    assert [len(last_quarter([{}] * n)) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert over_steps([{"a": 1.0}, {}, {"a": 2.0}], "a") == 1.5
    assert over_steps([{"a": 1.0}, {"a": None}], "a") is None


def test_markdown(out: Path) -> None:
    text = markdown_table({**summarize(out, ["trace", "bf16"], [0, 1]), **FACTS})
    lines = text.splitlines()
    assert lines[0] == (
        "| method | logprob abs diff, mean | over bf16 | logprob abs diff, max | max over bf16 "
        "| reward, last quarter | codes differ before | codes differ after | guidance bytes/token "
        "| pass rate, start | pass rate, end |"
    )
    assert lines[2] == (
        "| trace | 3 [2, 4] | 1.25x | 18 | 2.12x | 0.375 [0.375, 0.375]"
        " | 37.50 % | 12.50 % | 100 | 0.25 | 0.5 [0.5, 0.5] |"
    )
    assert lines[3] == "| bf16 | 3 [2, 4] | 1.00x | 8.5 | 1.00x | 0.875 [0.75, 1] | - | - | - | - | - |"
    assert lines[5:] == [
        "Each cell: median of 2 seeds (0, 1), [min, max] over seeds; 5 steps each; pass rates on 64 held-out problems.",
        "",
        "- command: `tracefp4 compare recipes/x.toml`",
        "- commit: unknown (not a checkout)",
        "- hardware: Some CPU, 2 cores; runs at once: 2, threads of each: 1",
        "- versions: python 3.11.7, torch 2.13.0",
    ]


@pytest.mark.parametrize("transposed", [False, True])
def test_terminal_table_has_the_same_cells(out: Path, transposed: bool) -> None:
    summary = {**summarize(out, ["bf16", "trace"], [0, 1]), **FACTS}
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(rich_table(summary, transposed=transposed))
    text = console.export_text()
    headings, rows = table_rows(summary)
    for cell in (*headings, *(cell for row in rows for cell in row)):
        assert cell in text
    assert "[min, max] over seeds" in text
