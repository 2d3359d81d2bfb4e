"""Sizing: the paper's figures, ours beside them, and records as large as planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tiny import make_engine, tiny_config, tiny_requests
from tracefp4.cli import _guided_recipes, main
from tracefp4.guidance.plan import (
    MODELS,
    ROW_BYTES,
    find_model,
    guidance_size,
    kv_bytes_per_token,
    plan,
    shape_from_config,
    weight_bytes,
)
from tracefp4.guidance.store import MemoryStore
from tracefp4.methods import QuantConfig, get_method
from tracefp4.recipe import QuantRecipe
from tracefp4.report.plan_table import duration, guidance_table, size

KIB, TIB = 1024, 1024**4
PAPER = {"model": "qwen3.5-35b-a3b", "context": 262144, "trajectories": 4096}


@pytest.fixture(scope="module")
def modes() -> dict[str, dict[str, Any]]:
    shape = find_model(PAPER["model"])
    result = plan(shape, _guided_recipes(shape.num_layers), PAPER["context"], PAPER["trajectories"])
    return {mode["mode"]: mode for mode in result["guidance"]}


def kib(mode: dict[str, Any], part: str) -> float:
    return mode[f"{part}_bytes_per_token"] / KIB


def test_full_codes_are_the_papers(modes: dict[str, dict[str, Any]]) -> None:
    """45 KB of activations and 5.6 KB of K and V a token; 51 TB, which are 50.6 TiB, a step; 3 minutes and 3 hours."""
    full = modes["trace-full"]
    assert full["guided_layers"] == 40
    assert kib(full, "activation") == 45.0
    assert kib(full, "kv") == 5.625
    assert kib(full, "payload") == 50.625
    assert full["payload_bytes_per_step"] == 50.625 * TIB
    assert full["payload_bytes_per_step"] / 300e9 == pytest.approx(185.5, abs=0.1)  # 3.1 minutes
    assert full["payload_bytes_per_step"] / 5e9 / 3600 == pytest.approx(3.09, abs=0.01)
    assert full["link_seconds"] == pytest.approx(185.5, rel=0.01)  # overheads included
    assert full["disk_seconds"] / 3600 == pytest.approx(3.09, rel=0.01)


def test_the_papers_compact_setting(modes: dict[str, dict[str, Any]]) -> None:
    paper = modes["trace-paper"]
    assert paper["guided_layers"] == 20
    assert kib(paper, "activation") == 7.5
    assert kib(paper, "kv") == 0.9375
    assert kib(paper, "payload") == 8.4375
    assert modes["trace-full"]["payload_bytes_per_token"] / paper["payload_bytes_per_token"] == 6.0


def test_ours_beside_it(modes: dict[str, dict[str, Any]]) -> None:
    trace = modes["trace"]
    assert kib(trace, "activation") == 5.625
    assert kib(trace, "kv") == pytest.approx(0.703125)
    assert kib(trace, "payload") == pytest.approx(6.328125)
    assert kib(modes["trace-all"], "payload") == 2 * kib(trace, "payload")
    assert kib(modes["trace, 1.0625"], "activation") == 2048 * 20 * 1.0625 / 8 / KIB
    assert all(0 < mode["overhead_share"] <= 0.03 for mode in modes.values())
    assert next(iter(modes)) == "trace-full"


@pytest.mark.parametrize("method", ["trace", "trace-all", "trace-paper", "trace-full"])
@pytest.mark.parametrize(
    "quant", [{}, {"kv": "none"}, {"activations": "none"}, {"activations": "mxfp4-even", "kv": "mxfp4-even"}]
)
def test_real_records_are_as_large_as_planned(method: str, quant: dict[str, Any]) -> None:
    store, config = MemoryStore(), tiny_config(num_hidden_layers=3)
    engine = make_engine(method, config=config, quant=quant, store=store)
    (trajectory,) = engine.generate(tiny_requests(1))
    assert trajectory.guidance is not None
    record = store.get(trajectory.guidance)
    shape = shape_from_config("tiny", config.to_dict())
    planned = guidance_size(shape, engine.recipe)
    tensors = [record.token_ids, record.versions, record.valid]
    for data in record.sites.values():
        tensors += [data.payload, *([] if data.encode_scale is None else [data.encode_scale])]
    stored = sum(t.numel() * t.element_size() for t in tensors)
    checksum = 4
    assert stored + checksum == planned.per_token * record.rows + planned.per_trajectory
    assert record.payload_nbytes == (planned.payload + planned.encode_scales) * record.rows
    assert planned.rows == ROW_BYTES


def test_the_cache_is_as_large_as_planned() -> None:
    shape = shape_from_config("tiny", tiny_config().to_dict())
    for method, name in (("trace", "nvfp4"), ("bf16", None)):
        engine = make_engine(method)
        assert kv_bytes_per_token(shape, name) == engine.pool.bytes_per_token_layer * 2


def test_modes_without_guidance_take_nothing() -> None:
    shape = find_model("qwen3-30b-a3b")
    for method in ("bf16", "naive", "qat"):
        size_of = guidance_size(shape, get_method(method).recipe(QuantConfig(), shape.num_layers))
        assert (size_of.per_token, size_of.per_trajectory) == (0, 0)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_real_model(name: str) -> None:
    """Against transformers on the meta device, reduced to four layers: all weights but norms, gates and biases."""
    keys = {**MODELS[name], "num_hidden_layers": 4}
    config = AutoConfig.for_model(keys["model_type"], **{k: v for k, v in keys.items() if k != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    shape = shape_from_config(name, keys)
    assert shape.expert_params + shape.other_params == counted
    assert shape_from_config(name, config.to_dict()) == shape  # as written by save_pretrained


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3.5-35b-a3b", 35), ("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235)]
)
def test_sizes_are_as_the_names_say(name: str, billions: float) -> None:
    shape = find_model(name)
    assert (shape.expert_params + shape.other_params) / 1e9 == pytest.approx(billions, rel=0.015)
    assert weight_bytes(shape, None) == 2 * (shape.expert_params + shape.other_params)


def test_capacity_by_hand() -> None:
    shape = find_model("qwen3-30b-a3b")
    kv = 48 * 2 * 4 * 128
    assert kv_bytes_per_token(shape, None) == 2 * kv
    assert kv_bytes_per_token(shape, "nvfp4") == kv * 4.5 / 8
    bf16, mixed, fp4 = plan(shape, [], 131072, 1, memory=130)["capacity"]
    assert bf16["tokens"] == int((130e9 - bf16["weight_bytes"]) // (2 * kv))
    assert fp4["sequences"] == int((130e9 - fp4["weight_bytes"]) // (131072 * kv * 4.5 / 8))
    assert mixed["weight_bytes"] == fp4["weight_bytes"] < bf16["weight_bytes"] / 3
    assert plan(shape, [], 1024, 1, memory=10)["capacity"][0]["tokens"] == 0  # the weights alone do not fit


def test_a_nested_and_a_dense_config(tmp_path: Path) -> None:
    nested = {"model_type": "qwen3_5_moe", "text_config": MODELS["qwen3.5-35b-a3b"]}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    for where in (tmp_path, tmp_path / "config.json"):
        assert replace(find_model(str(where)), name="qwen3.5-35b-a3b") == find_model("Qwen3.5-35B-A3B")
    dense = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 32,
        "intermediate_size": 128,
    }
    shape = shape_from_config("dense", dense)
    assert (shape.moe_layers, shape.kv_width, shape.expert_params) == ((), 64, 0)
    assert guidance_size(shape, QuantRecipe(2, kv="nvfp4", activations="nvfp4", guided_layers=(1,))).activations == 0


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "qwen3.5-35b-a3b", "--context", "262144", "--trajectories", "4096")
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    for cell in (
        "45 KiB",
        "5.62 KiB",
        "50.6 KiB",
        "3.1 min",
        "3.1 h",
        "7.5 KiB",
        "8.44 KiB",
        "6.33 KiB",
        "trace-paper",
    ):
        assert cell in text, cell
    assert run(*arguments, "--json", "--link", "600") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["guidance"][0]["link_seconds"] == pytest.approx(185.5 / 2, rel=0.01)
    assert len(result["capacity"]) == 3


MISTAKES = [
    (
        ("--model", "qwen3.5-35b-a3"),
        "--model qwen3.5-35b-a3 is no file or folder and no model known here; did you mean qwen3.5-35b-a3b",
    ),
    (("--model", "."), "--model . is a folder without a config.json"),
    (("--model", "bad.json"), "--model bad.json cannot be read as JSON"),
    (("--model", "list.json"), "--model list.json holds no JSON object"),
    (("--model", "empty.json"), "the config of empty.json has no hidden_size, so it cannot be sized"),
    (("--model", "odd.json"), "the config of odd.json has hidden_size = 'large', which is no size"),
    (("--model", "mla.json"), "mla.json keeps latent vectors in place of K and V"),
    (("--model", "window.json"), "window.json has layers of type sliding_attention"),
    (("--model", "ragged.json"), "a row of 100 values is not a whole number of blocks of 16"),
    (("--model", "qwen3-30b-a3b", "--context", "0"), "--context must be greater than 0, got 0"),
    (("--model", "qwen3-30b-a3b", "--link", "-1"), "--link must be greater than 0, got -1"),
    (("--model", "qwen3-30b-a3b", "--memory", "nan"), "--memory must be greater than 0, got nan"),
    (("--model", "qwen3-30b-a3b", "--context", "many"), "Invalid value for '--context'"),
]


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES)
def test_one_sentence_per_mistake(
    arguments: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    good = MODELS["qwen3-30b-a3b"]
    files = {
        "list": [],
        "empty": {},
        "odd": {**good, "hidden_size": "large"},
        "mla": {**good, "kv_lora_rank": 512},
        "window": {**good, "layer_types": ["sliding_attention"] * 48},
        "ragged": {**good, "hidden_size": 100},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "bad.json").write_text("{")
    defaults = {"--context": "8192", "--trajectories": "16"} | dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert run(*[word for pair in defaults.items() for word in pair]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {sentence}"), captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_narrow_terminal_gets_a_column_per_mode() -> None:
    from rich.console import Console

    shape = find_model("qwen3.5-35b-a3b")
    result = plan(shape, _guided_recipes(shape.num_layers)[:3], 8192, 16)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(guidance_table(result, transposed=True))
    lines = captured.get().splitlines()
    assert next(line.split("│")[1:3] for line in lines if "payload/token" in line)[1].strip() == "50.6 KiB"


def test_units() -> None:
    assert [size(n) for n in (0, 5.5, 1000, 51840, 50.625 * TIB)] == ["0 B", "5.5 B", "1000 B", "50.6 KiB", "50.6 TiB"]
    assert [duration(s) for s in (0.5, 45, 185.5, 11132)] == ["0.5 s", "45 s", "3.1 min", "3.1 h"]
