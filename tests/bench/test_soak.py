"""benchmarks/soak.py: equal rounds, and what a changed bit looks like."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import load_script

SCRIPT = Path(__file__).parents[2] / "benchmarks/soak.py"
SMALL = ["method.name=trace-all", "sampling.prompts_per_step=1", "sampling.samples_per_prompt=2"]


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def round_of(script: Any) -> Any:
    config = script.load_config("recipes/demo.toml", [*SMALL, "sampling.max_new_tokens=12"], script.RunConfig)
    soak = script.Soak(config)
    return soak, *soak.rollout()


def test_a_round_compares_tokens_experts_records_and_forwards(script: Any, round_of: Any) -> None:
    soak, trajectories, first = round_of
    logprobs = soak.forward(trajectories)
    soak.discard(trajectories)
    again, second = soak.rollout()
    assert [script.differences(a, b) for a, b in zip(first, second, strict=True)] == [None, None]
    assert all(script.same(a, b) for a, b in zip(logprobs, soak.forward(again), strict=True))
    layers = soak.parts.hf_config.num_hidden_layers
    assert list(first[0].sites) == [(i, name) for i in range(layers) for name in ("key", "value", "expert_input")]
    assert all(len(rows) == trajectories[0].num_rows for rows in first[0].sites.values())
    soak.discard(again)


def test_the_first_operation_that_differs_is_named(script: Any, round_of: Any) -> None:
    _, _, (kept, _) = round_of
    changed = {where: rows.clone() for where, rows in kept.sites.items()}
    changed[1, "expert_input"][4, 0] ^= 1
    changed[2, "key"][4:, 3] ^= 1
    found = script.differences(kept, replace(kept, sites=changed))
    assert found["first_row"] == 4
    assert found["sites"] == ["1 expert_input", "2 key"]
    assert found["rows"] == len(changed[2, "key"]) - 4
    assert found["first_token"] is None
    assert found["first_logprob"] is None


def test_tokens_logprobs_and_experts_count_too(script: Any, round_of: Any) -> None:
    _, _, (kept, _) = round_of
    tokens = (*kept.tokens[:-1], kept.tokens[-1] + 1)
    assert script.differences(kept, replace(kept, tokens=tokens))["first_token"] == len(tokens) - 1
    assert script.differences(kept, replace(kept, tokens=kept.tokens[:-2]))["first_token"] == len(tokens) - 2
    logprobs = kept.logprobs.clone()
    logprobs[3] = torch.nextafter(logprobs[3], torch.tensor(-1e9))
    assert script.differences(kept, replace(kept, logprobs=logprobs))["first_logprob"] == 3
    experts = kept.experts.clone()
    experts[2, 0, 0] += 1
    found = script.differences(kept, replace(kept, experts=experts))
    assert (found["first_row"], found["experts"], found["sites"]) == (2, True, [])


def test_the_summary_counts_rounds_and_names_what_differs(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"round": 1, "different": 0, "where": [], "forward": []}
    bad = {"round": 2, "different": 1, "where": [{"response": 7, "first_row": 3}], "forward": []}
    path = tmp_path / "worker0.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in ({"round": 0, "responses": 2, "tokens": 9}, good, bad)))
    assert script.summary([path]) == (2, 1)
    out = capsys.readouterr().out
    assert "a round: 2 responses, 9 tokens" in out
    assert "worker0, round 2: 1 responses" in out
    assert "{'response': 7, 'first_row': 3}" in out
    assert "2 rounds of 1 processes, 1 with a difference" in out


def test_a_process_and_its_exit_codes(script: Any, tmp_path: Path) -> None:
    small = ["recipes/demo.toml", *SMALL, "sampling.max_new_tokens=4", "--out", str(tmp_path), "--seconds", "0.1"]
    assert script.main([*small, "--processes", "1"]) == 0
    lines = [json.loads(x) for x in (tmp_path / "worker0.jsonl").read_text().splitlines()]
    assert [x["round"] for x in lines] == list(range(len(lines)))
    assert len(lines) >= 2
    assert script.main(["recipes/demo.toml", "method.name=no", "--out", str(tmp_path)]) == 2


@pytest.mark.parametrize("wrong", [["--processes", "0"], ["--seconds", "-1"]])
def test_a_soak_of_nothing_is_refused(script: Any, tmp_path: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        script.main(["recipes/demo.toml", "--out", str(tmp_path), *wrong])
    assert end.value.code == 2


def test_a_process_that_fails_is_no_clean_bill(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "worker0.jsonl").mkdir()  # its log cannot be written
    small = ["recipes/demo.toml", *SMALL, "--out", str(tmp_path), "--seconds", "0.1", "--processes", "1"]
    assert script.main(small) == 2
    assert "process 0 failed with exit code 2" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert script.main([*small[:4], "--out", str(tmp_path / "file"), "sampling.max_new_tokens=4"]) == 2
    assert "a file is in its place" in capsys.readouterr().err
