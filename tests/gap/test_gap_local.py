"""Forms on this machine: any architecture, rounded or not; answers do not depend on the batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from gap_models import checkpoint
from tracefp4.errors import TracefpError
from tracefp4.formats import get_format
from tracefp4.gap.answers import Sampling
from tracefp4.gap.forms import EndpointForm, LocalForm, parse_form
from tracefp4.gap.local import EngineRunner, TransformersRunner, check_local, load_runner
from tracefp4.rollout.engine import RolloutEngine

QUESTIONS = ["Hello", "What is 2 + 2?", "A longer question than the others, so that rows are padded."]
SAMPLED = Sampling(temperature=0.8, max_new_tokens=12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: checkpoint(root / kind, kind) for kind in ("llama", "gpt2", "qwen3", "qwen3_moe")}


def local(text: str) -> LocalForm:
    form = parse_form("--train-form", text)
    assert isinstance(form, LocalForm)
    return form


def load(text: str, sampling: Sampling = SAMPLED, dtype: str = "auto") -> TransformersRunner | EngineRunner:
    return load_runner(local(text), sampling, "cpu", dtype, 4)  # type: ignore[return-value]


def prompts(runner: TransformersRunner | EngineRunner) -> list[list[int]]:
    return [runner.encode([{"role": "user", "content": text}]) for text in QUESTIONS]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
def test_answers_do_not_depend_on_the_batch(folders: dict[str, Path], kind: str) -> None:
    runner = load(str(folders[kind]))
    asked = prompts(runner)
    together = runner.generate(asked, [1, 2, 3])
    alone = [runner.generate([p], [s])[0] for p, s in zip(asked, [1, 2, 3], strict=True)]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert len({a.text for a in together}) == 3
    assert [a.finish == "length" for a in together] == [a.token_ids[-1] != 1 for a in together]  # type: ignore[index]
    again = runner.generate(asked, [4, 5, 6])
    assert [a.text for a in again] != [a.text for a in together]


def test_greedy_answers_are_those_of_transformers(folders: dict[str, Path]) -> None:
    runner = load(str(folders["llama"]), Sampling(max_new_tokens=10))
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    for prompt, answer in zip(prompts(runner), runner.generate(prompts(runner), [0, 0, 0]), strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert answer.token_ids == expected[0, len(prompt) :].tolist()


def test_log_probs_of_generation_and_scoring_agree(folders: dict[str, Path]) -> None:
    runner = load(str(folders["llama"]))
    assert isinstance(runner, TransformersRunner)
    answers = runner.generate(prompts(runner), [1, 2, 3])
    scored = runner.score([a.prompt_ids or [] for a in answers], [a.token_ids or [] for a in answers])
    for answer, values in zip(answers, scored, strict=True):
        assert values == pytest.approx(answer.logprobs, abs=2e-5)


@pytest.mark.parametrize(
    "variant", ["nvfp4", "nvfp4-4over6", "nvfp4-exact", "mxfp4-even", "mxfp4-floor", "nvfp4-w4a4", "mxfp4-even-w4a4"]
)
def test_weights_hold_values_of_the_format_alone(folders: dict[str, Path], variant: str) -> None:
    stored, runner = load(str(folders["llama"])), load(f"{folders['llama']}@{variant}")
    assert isinstance(stored, TransformersRunner)
    assert isinstance(runner, TransformersRunner)
    fmt = get_format(variant.removesuffix("-w4a4"))
    for (name, old), new in zip(stored.model.named_parameters(), runner.model.parameters(), strict=True):
        if "proj" in name:
            blocks = fmt.quantize(old, "tensor") if fmt.scale_kind == "e4m3" else fmt.quantize(old)
            assert torch.equal(new, fmt.dequantize(blocks, new.dtype))
        else:
            assert torch.equal(old, new)  # embeddings, tied head, norms
    assert runner.about["rounded"]["layers"] == 14
    hooked = [m for m in runner.model.modules() if m._forward_pre_hooks]
    assert len(hooked) == (14 if variant.endswith("w4a4") else 0)


def test_inputs_are_rounded_token_by_token(folders: dict[str, Path]) -> None:
    runner = load(f"{folders['llama']}@nvfp4-w4a4")
    assert isinstance(runner, TransformersRunner)
    layer, fmt = runner.model.model.layers[0].mlp.gate_proj, get_format("nvfp4")
    x = torch.randn(2, 3, 64)
    expected = torch.nn.functional.linear(fmt.dequantize(fmt.quantize(x, "row")), layer.weight)
    assert torch.equal(layer(x), expected)


def test_conv1d_is_rounded_along_its_inputs(folders: dict[str, Path]) -> None:
    stored, runner = load(str(folders["gpt2"])), load(f"{folders['gpt2']}@nvfp4")
    assert isinstance(stored, TransformersRunner)
    assert isinstance(runner, TransformersRunner)
    old, new = (r.model.transformer.h[0].mlp.c_fc.weight for r in (stored, runner))
    fmt = get_format("nvfp4")
    assert torch.equal(new, fmt.dequantize(fmt.quantize(old.T, "tensor")).T)


def test_stacked_experts_are_rounded_and_their_inputs_refused(folders: dict[str, Path]) -> None:
    runner = load(f"{folders['qwen3_moe']}@nvfp4")
    assert runner.about["rounded"]["share_of_weights"] > 0.5
    with pytest.raises(TracefpError, match="@engine:nvfp4"):
        load(f"{folders['qwen3_moe']}@nvfp4-w4a4")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_engine_without_quantization_answers_as_transformers_does(folders: dict[str, Path], kind: str) -> None:
    sampling = Sampling(max_new_tokens=6)
    engine = load(f"{folders[kind]}@engine:bf16", sampling, "float32")
    plain = load(str(folders[kind]), sampling)
    asked = prompts(plain)
    assert [a.text for a in engine.generate(asked, [0] * 3)] == [a.text for a in plain.generate(asked, [0] * 3)]
    fp4 = load(f"{folders[kind]}@engine:nvfp4", sampling, "float32")
    assert [a.text for a in fp4.generate(asked, [0] * 3)] != [a.text for a in plain.generate(asked, [0] * 3)]


def test_chat_template_is_used_where_there_is_one(folders: dict[str, Path]) -> None:
    message = [{"role": "user", "content": "Hi"}]
    assert len(load(str(folders["llama"])).encode(message)) > len(
        load(str(folders["llama"]), Sampling(chat="off")).encode(message)
    )


def test_a_layer_of_odd_width_is_left_and_named(tmp_path: Path, folders: dict[str, Path]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tracefp4.gap.quantize import quantize_linears

    config = LlamaConfig(
        vocab_size=98, hidden_size=64, intermediate_size=100, num_hidden_layers=1, num_attention_heads=4
    )
    done = quantize_linears(LlamaForCausalLM(config), "nvfp4", None)
    assert done.skipped == ["model.layers.0.mlp.down_proj"]
    assert done.layers == 6


def test_damaged_and_missing_forms_are_one_sentence(tmp_path: Path, folders: dict[str, Path]) -> None:
    damaged = checkpoint(tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for text, message in (
        (str(damaged), "cannot be loaded"),
        (str(tmp_path / "m.gguf"), "needs the package gguf|cannot be read"),
    ):
        with pytest.raises(TracefpError, match=message):
            load(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_missing_device_is_refused(folders: dict[str, Path]) -> None:
    for text in (str(folders["llama"]), f"{folders['qwen3']}@engine:nvfp4"):
        form = local(text)
        with pytest.raises(TracefpError, match=r"--device = cuda needs a GPU.*set --device to cpu"):
            check_local(form, SAMPLED, "cuda", "auto")
        check_local(form, SAMPLED, "auto", "auto")


def test_the_device_reaches_models_and_engines(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str] = {}

    def to(module: Any, device: str) -> Any:
        asked["model"] = device
        return module

    def made(*arguments: Any, device: str) -> RolloutEngine:
        asked["engine"] = device
        return RolloutEngine(*arguments, device="cpu")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(LlamaForCausalLM, "to", to)
    monkeypatch.setattr("tracefp4.gap.local.RolloutEngine", made)
    for device, want in (("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")):
        model = load_runner(local(str(folders["llama"])), SAMPLED, device, "auto", 4)
        engine = load_runner(local(f"{folders['qwen3']}@engine:nvfp4"), Sampling(max_new_tokens=1), device, "auto", 4)
        engine.generate([[5, 6]], [0])
        assert asked == {"model": want, "engine": want}
        assert model.about["device"] == engine.about["device"] == want
        assert engine.about["backend"] == "torch"


def test_what_is_missing_shows_without_loading(tmp_path: Path, folders: dict[str, Path]) -> None:
    def without(kind: str, *names: str) -> Path:
        folder = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folders[kind], folder)
        for name in names:
            (folder / name).unlink()
        return folder

    cut = without("llama")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:1000])
    files = ("tokenizer.json", "tokenizer_config.json")
    for text, message in (
        (str(without("llama", *files)), "has no tokenizer"),
        (str(without("gpt2", "tokenizer.json")), "has no tokenizer"),  # transformers makes an empty one of these
        (str(without("qwen3", "tokenizer.json")), "has no tokenizer"),
        (f"{without('qwen3', *files)}@engine:nvfp4", "has no tokenizer"),
        (str(without("llama", "model.safetensors")), "neither model.safetensors nor"),
        (str(cut), "damaged or cut short"),
        (f"{folders['llama']}@engine:nvfp4", "model_type 'llama' is not supported"),
    ):
        with pytest.raises(TracefpError, match=message):
            check_local(local(text), SAMPLED, "cpu", "auto")
    with pytest.raises(TracefpError, match="@engine:nvfp4"):
        check_local(local(f"{folders['qwen3_moe']}@nvfp4-w4a4"), SAMPLED, "cpu", "auto")
    with pytest.raises(TracefpError, match="bfloat16 or float32"):
        check_local(local(f"{folders['qwen3']}@engine:nvfp4"), SAMPLED, "cpu", "float16")
    form = local(str(checkpoint(tmp_path / "plain", chat=False)))
    with pytest.raises(TracefpError, match="no chat template"):
        check_local(form, Sampling(chat="on"), "cpu", "auto")


def test_compressed_tensors_needs_its_package(tmp_path: Path) -> None:
    import importlib.util
    import json

    folder = checkpoint(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    (folder / "config.json").write_text(json.dumps(config))
    if importlib.util.find_spec("compressed_tensors") is None:
        with pytest.raises(TracefpError, match="needs the package compressed-tensors"):
            load(str(folder))
    with pytest.raises(TracefpError, match="quantized already"):
        load(f"{folder}@nvfp4")


def test_forms_as_they_are_written(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (
        "http://h:8000/v1?model=a/b&key_env=K",
        "endpoint:http://h:8000/v1/chat/completions,model=a/b,key_env=K",
    ):
        form = parse_form("--serve-form", text)
        assert isinstance(form, EndpointForm)
        assert (form.url, form.model, form.key_env) == ("http://h:8000/v1", "a/b", "K")
        with pytest.raises(TracefpError, match="variable K"):
            form.key()
    monkeypatch.setenv("K", " secret ")
    assert form.key() == "secret"
    for text, message in (
        ("http://h/v1", "names no model"),
        ("http://u:secret@h/v1?model=m", "user name or password"),
        ("http://h/v1?model=m&api_key=secret", "unknown key 'api_key'"),
        ("http://h/v1?model=m&price_in=x", "price per million"),
        ("http:///v1?model=m", "must be an http"),
        ("nowhere", "does not exist"),
        ("org/model", "hf download"),
        (f"{folders['llama']}@nvfp5", "did you mean"),
        (f"{folders['llama']}/config.json", "is a file"),
        (str(folders["llama"].parent), "no config.json"),
        ("missing.gguf", "does not exist"),
        ("builtin:nothing", "built-in"),
        ("", "is empty"),
    ):
        with pytest.raises(TracefpError, match=message) as error:
            parse_form("--serve-form", text)
        assert "secret" not in str(error.value)
