"""`tracefp4 bench`: suites, refusals, and the training step on sizes for the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tracefp4.bench import cli, train
from tracefp4.bench.train_checks import SMALL
from tracefp4.bench.train_model import GUIDED, QAT, TrainStep
from tracefp4.config import ConfigError
from tracefp4.errors import TracefpError

CPU = torch.device("cpu")
SIZES = {
    "layers": 2,
    "hidden": 32,
    "experts": 4,
    "top": 2,
    "width": 16,
    "heads": 2,
    "kv-heads": 1,
    "head-dim": 16,
    "vocab": 32,
    "tokens": 32,
    "length": 16,
    "repeats": 2,
    "device": "cpu",
}
TINY = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def test_suites_and_words_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    assert "rollout" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean train"):
        cli.run(["trian"])
    with pytest.raises(ConfigError, match="--ony; did you mean --only"):
        cli.run(["train", "--ony", "qat"])
    with pytest.raises(ConfigError, match="--device cudda is no device; did you mean cuda"):
        cli.run(["train", "--device", "cudda"])
    with pytest.raises(ConfigError, match="--layers: invalid int value"):
        cli.run(["train", "--layers", "two"])
    with pytest.raises(ConfigError, match="no case matches --only attenton; did you mean"):
        cli.run(["kernels", "--device", "cpu", "--check-only", "--only", "attenton"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_asked_for_by_name() -> None:
    with pytest.raises(TracefpError, match="--device = cuda needs a GPU"):
        cli.run(["train", "--device", "cuda"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "40"], "--tokens 40 is no multiple of --length 16"),
        (["--hidden", "40"], "--hidden 40 is no multiple of the NVFP4 block"),
        (["--top", "5"], "--top 5 exceeds --experts 4"),
        (["--kv-heads", "0"], "--kv-heads must be at least 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
    ],
)
def test_sizes_that_make_no_model(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train.main([*TINY, *options])


def test_the_whole_flow_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([*TINY, "--out", str(tmp_path / "new"), "--markdown"]) == 0
    stored: dict[str, Any] = json.loads((tmp_path / "new" / "results.json").read_text())
    assert [r["rounds"] for r in stored["results"]] == [2] * 8
    by_name = {r["name"]: r for r in stored["results"]}
    assert by_name["bf16"]["median_ms"] > 0
    assert "over_bf16" not in by_name["bf16"]
    guided = by_name["guided, all layers, weights kept from the step before"]
    assert guided["over_bf16"] == pytest.approx(guided["median_ms"] / by_name["bf16"]["median_ms"])
    qat = by_name["qat, weights kept from the step before"]
    assert guided["over_qat"] == pytest.approx(guided["median_ms"] / qat["median_ms"])
    assert len(stored["checks"]) == 3
    assert stored["targets"] == [], "speed on the CPU is no target"
    printed = capsys.readouterr().out
    assert (tmp_path / "new" / "results.md").read_text().strip() in printed
    assert "| guided, deeper half, weights quantized in the step |" in printed


def test_nothing_is_timed_after_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(device: torch.device) -> list[str]:
        raise AssertionError("guided_round: 3 of 9 values differ")

    monkeypatch.setattr(train, "check_all", wrong)
    assert train.main([*TINY, "--out", str(tmp_path)]) == 1
    assert "FAILED: guided_round: 3 of 9 values differ" in capsys.readouterr().out
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["results"] == []


def test_a_case_that_fails_is_listed_without_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    step = TrainStep(SMALL, CPU)
    cases = train.make_cases(step)[:2]

    def broken() -> None:
        raise RuntimeError("out of memory")

    cases[1].run = broken
    train.warm_up(cases, step)
    train.measure(cases, step, 1, 0.0)
    rows = train.results(cases, SMALL, None)
    assert rows[0]["rounds"] == 1
    assert rows[1]["rounds"] == 0
    assert "| bf16, transformers' own modules | FAILED: RuntimeError: out of memory |" in train.table(rows)


def test_records_are_of_the_rounded_forward_and_seldom_change_it() -> None:
    step = TrainStep(SMALL, CPU)
    records = step.records(noise=0.01, valid_every=32)
    assert {layer for _, layer in records} == {0, 1}
    assert {site for site, _ in records} == {"expert_input", "key", "value"}
    assert all(int((~r.valid).sum()) == SMALL.tokens // 32 for r in records.values())
    plain, guided = step.logits(QAT).float(), step.logits(GUIDED, records).float()
    assert 0 < float((plain - guided).norm() / plain.norm()) < 0.5


def test_operations_of_a_step() -> None:
    # Per token and layer: QKV and output 64 * 32 * 12, scores 4 * 32 * 24, router 64 * 8, experts 3 * 4 * 64 * 32.
    assert SMALL.operations == 6 * 96 * (2 * (64 * 32 * 12 + 4 * 32 * 24 + 64 * 8 + 3 * 4 * 64 * 32) + 64 * 64)
