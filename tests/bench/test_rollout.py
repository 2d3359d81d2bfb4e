"""The whole flow of the rollout benchmark over the kernels' references, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tracefp4.bench import rollout
from tracefp4.bench.rollout import UniformModel, main, part_of
from tracefp4.bench.rollout_table import Row, ratios, table
from tracefp4.rollout.kernel_model import KernelModel

# fmt: off
SMALL = [
    "--device", "cpu", "--layers", "2", "--hidden", "128", "--heads", "4", "--kv-heads", "2", "--head-dim", "64",
    "--experts", "4", "--top-k", "2", "--expert-width", "128", "--vocab", "64", "--contexts", "40,90",
    "--steps", "3", "--steps-per-sync", "2", "--budget-gb", "0.003", "--max-seqs", "2",
]
# fmt: on


def test_every_form_at_every_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--out", str(tmp_path), "--commit", "abc"]) == 0
    document = json.loads((tmp_path / "rollout.json").read_text())
    rows = document["rows"]
    assert [(r["form"], r["context"]) for r in rows] == [
        ("bf16", 40), ("bf16", 90), ("fp4", 40), ("fp4-recorded", 40), ("fp4", 90), ("fp4-recorded", 90),
    ]  # fmt: skip
    assert document["environment"]["commit"] == "abc"
    for r in rows:
        assert r["error"] is None
        ends = ", logits off by 0" if r["form"] == "bf16" else ""
        assert r["checked"] == "attention off by 0, experts off by 0" + ends  # references against themselves
        assert 1 <= r["sequences"] <= 2
        assert r["tokens_per_s"] == pytest.approx(r["sequences"] / r["median_ms"] * 1e3)
        assert r["quartiles_ms"][0] <= r["median_ms"] <= r["quartiles_ms"][1]
        assert r["weight_bytes"] + r["cache_bytes"] <= 0.003e9
        assert r["bytes_step"] < r["weight_bytes"] + r["cache_bytes"]
    by = {(r["form"], r["context"]): r for r in rows}
    assert by["fp4", 90]["weight_bytes"] < by["bf16", 90]["weight_bytes"]
    assert by["fp4", 90]["sequences"] >= by["bf16", 90]["sequences"]
    assert {(e["context"], e["form"]) for e in document["ratios"]} == {
        (c, f) for c in (40, 90) for f in ("fp4", "fp4-recorded")
    }
    assert "| bf16 | 40 |" in capsys.readouterr().out
    assert (tmp_path / "rollout.md").read_text().startswith("| form |")


def test_a_row_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """A context that fits nobody's budget."""
    arguments = [*SMALL, "--contexts", "40,200000", "--forms", "bf16", "--out", str(tmp_path), "--routing", "router"]
    assert main(arguments) == 1
    first, second = json.loads((tmp_path / "rollout.json").read_text())["rows"]
    assert first["error"] is None
    assert "holds no sequence of 200000 tokens" in second["error"]
    assert main([*SMALL, "--seconds", "-1", "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "rollout.json").read_text())["rows"]
    assert all("not begun" in r["error"] for r in rows)


@pytest.mark.parametrize(("part", "method"), [("attention", "_attend"), ("experts", "_mlp")])
def test_no_time_is_printed_where_a_part_is_wrong(
    part: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, calls = getattr(KernelModel, method), []

    def wrong(self: UniformModel, *arguments: Any) -> Any:
        calls.append(0)
        result, sign = run(self, *arguments), -1 if len(calls) == 3 else 1  # the second layer's, by the kernels
        return (result[0] * sign, result[1]) if method == "_mlp" else result * sign

    monkeypatch.setattr(KernelModel, method, wrong)
    assert main([*SMALL, "--contexts", "40", "--forms", "fp4", "--out", str(tmp_path)]) == 1
    (row,) = json.loads((tmp_path / "rollout.json").read_text())["rows"]
    assert f"{part} off by 2" in row["error"]
    assert row["median_ms"] is None
    assert "FAILED" in capsys.readouterr().out


def test_ratios_are_of_tokens_per_second_and_of_bytes() -> None:
    rows = [
        Row("bf16", 8, sequences=2, bound_ms=10.0, median_ms=20.0, tokens_per_s=100.0),
        Row("fp4", 8, sequences=8, bound_ms=10.0, median_ms=24.0, tokens_per_s=330.0),
        Row("fp4-recorded", 8, sequences=8, bound_ms=10.0, median_ms=25.0, tokens_per_s=320.0),
    ]
    plain, recorded = ratios(rows)
    assert plain["measured"] == pytest.approx(3.3)
    assert plain["roofline"] == pytest.approx(4.0)
    assert recorded["share"] == pytest.approx(0.8)
    assert recorded["recording_share"] == pytest.approx(0.04)
    assert ratios(rows[1:]) == []
    assert "FAILED" in table([Row("bf16", 8, error="RuntimeError: no memory")])


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_attend", "attention"),
        ("_products_dense", "experts"),
        ("_write_kv", "quantize and record"),
        ("nvjet_tst_128x64_64x8_2x1_v_bz_TNN", "projections and head"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kernels_belong_to_parts(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_unknown_forms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--forms", "fp8"])
    assert "not fp8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps-per-sync", "65"], "--steps-per-sync takes 0 to 64, not 65"),
        (["--steps-per-sync", "-1"], "--steps-per-sync takes 0 to 64, not -1"),
        (["--steps", "1"], "--steps must be at least 2, not 1"),
        (["--max-seqs", "0"], "--max-seqs must be at least 1, not 0"),
        (["--forms", "fp5"], "--forms takes bf16, fp4, fp4-recorded, not fp5"),
        (["--head-dim", "32"], "the kernels, which this times, do not take the checkpoint's head_dim 32"),
        (["--expert-width", "96"], "moe_intermediate_size 96, the kernels take multiples of 128 in FP4"),
        (["--heads", "3"], "--heads 3 is no multiple of --kv-heads 2"),
        (["--top-k", "9"], "--top-k 9 is more than --experts"),
        (["--experts", "0"], "--experts must be at least 1, not 0"),
        (["--budget-gb", "nan"], "--budget-gb must be more than 0, not nan"),
        (["--guided", "upper"], "'upper'"),
        (["--bits", "3"], "3.0 bits per value is no width of 'nvfp4'"),
        (["--contexts", "40,abc"], "--contexts takes numbers of tokens joined by commas, not '40,abc'"),
        (["--contexts", "0"], "--contexts takes numbers of tokens"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda: torch finds no GPU here; with --device cpu the references are timed",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *arguments])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_file_is_no_folder_for_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results"
    file.write_text("")
    with pytest.raises(SystemExit):
        main([*SMALL, "--out", str(file)])
    assert f"--out {file} is a file: name a folder" in capsys.readouterr().err


def test_a_model_that_the_memory_of_a_cpu_does_not_hold_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout, "machine_memory", lambda: 25 * 10**9)
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "weights of 61 GB in 25 GB of memory: on the CPU give smaller --layers" in capsys.readouterr().err
