"""Bad input through the whole command line: one sentence that names the thing and what to do, exit code 2, and nothing
on disk but what was there before."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bad_disk import BadDisk
from tiny import tiny_checkpoint, tiny_config
from tracefp4.cli import main
from tracefp4.files import LOCK

RECIPE = """
[model]
path = "{path}"
[method]
name = "trace-all"
[sampling]
prompts_per_step = 2
samples_per_prompt = 2
max_new_tokens = 6
[rollout]
max_num_seqs = 16
max_model_len = 64
[run]
steps = 2
state_every = 1
tensorboard = false
"""
ROWS = "".join(json.dumps({"question": f"1+{n}=", "answer": str(1 + n)}) + "\n" for n in (2, 3, 4))
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
STATE, FACTS = "states/step-00000002", "state.json"
Make = Callable[[Path], object]


@dataclass
class World:
    """What the cases share: checkpoints of some ten thousand weights, and a run of two steps."""

    moe: Path
    sharded: Path
    run: Path


@dataclass
class Case:
    """arguments: after `tracefp4`. sentence: a regular expression that the sentence must match, with the thing and the
    remedy in it. make: prepares the current folder, which holds r.toml. source: the checkpoint that is copied to
    "model" first, a field of World."""

    name: str
    arguments: list[str]
    sentence: str
    make: Make = field(default=lambda at: None)
    source: str = ""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    at = tmp_path_factory.mktemp("world")
    moe = tiny_checkpoint(at / "moe", tiny_config())
    sharded = tiny_checkpoint(at / "sharded", tiny_config(), max_shard_size="60KB")
    (at / "r.toml").write_text(RECIPE.format(path=moe))
    assert tracefp4(["train", str(at / "r.toml"), "--out", str(at / "run")]) == 0
    return World(moe, sharded, at / "run")


@pytest.fixture
def here(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a case; checkpoints and the run are copied into it where a case names them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE.format(path=world.moe))
    return tmp_path


def tracefp4(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def contents(folder: Path) -> dict[str, Any]:
    """Every file's bytes and every link below a folder; of an empty output folder nothing is said."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
        elif not path.is_dir():
            found[name] = path.stat().st_mode
    return found


def assert_refused(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], code: int = 2) -> None:
    """Runs a command line that must end in one sentence and leave the current folder as it is."""
    before = contents(Path.cwd())
    capsys.readouterr()
    assert tracefp4(arguments) == code
    error = capsys.readouterr().err
    lines = error.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], error
    assert "Traceback" not in error
    assert re.search(sentence, lines[-1]), f"{lines[-1]!r} does not match {sentence!r}"
    assert lines[-1].isprintable()
    after = contents(Path.cwd())
    assert after.keys() == before.keys()
    assert after == before


# Recipes and settings


def text(content: str | bytes, name: str = "x.toml") -> Make:
    return lambda at: (at / name).write_bytes(content.encode() if isinstance(content, str) else content)


def bad_recipe(name: str, content: str | bytes, sentence: str) -> Case:
    return Case(name, ["train", "x.toml", "--out", "out"], sentence, text(content))


def setting(override: str | list[str], sentence: str, name: str = "") -> Case:
    overrides = [override] if isinstance(override, str) else override
    return Case(name or " ".join(overrides)[:60], ["train", "r.toml", *overrides, "--out", "out"], sentence)


def command(line: str, sentence: str, make: Make = lambda at: None, name: str = "") -> Case:
    return Case(name or line[:60], line.split(), sentence, make)


def loop_link(name: str) -> Make:
    return lambda at: (at / name).symlink_to(name)


RECIPES = [
    command("train y.toml --out out", "there is no recipe at y.toml"),
    command("train r.tom --out out", r"there is no recipe at r.tom; did you mean r.toml\?"),
    command("train d.toml --out out", "d.toml is a folder, not a recipe file", lambda at: (at / "d.toml").mkdir()),
    command("train l.toml --out out", "l.toml is not readable .*symbolic links", loop_link("l.toml")),
    Case("a long recipe name", ["train", "x" * 300, "--out", "out"], r"x+ cannot be used \(File name too long\)"),
    bad_recipe("empty", "", 'x.toml is empty: set at least one key, such as method.name = "trace"'),
    bad_recipe("only comments", "# nothing\n", "x.toml is empty: set at least one key"),
    bad_recipe("not TOML", "steps: 3\n", "x.toml is not valid TOML: line 1, column 6"),
    bad_recipe("JSON", '{"run": {"steps": 1}}', "x.toml is not valid TOML: line 1, column 1"),
    bad_recipe("not UTF-8", b"[model]\npath='\xff'\n", "x.toml is not UTF-8 text, as TOML must be"),
    bad_recipe(
        "a key twice", "[run]\nsteps=1\nsteps=2\n", "x.toml is not valid TOML: line 3, column 8: cannot overwrite"
    ),
    bad_recipe("nested too deeply", "a=" + "[" * 5000, "x.toml cannot be read: its brackets are nested too deeply"),
    bad_recipe("5000 digits", "[run]\nseed=" + "9" * 5000, "x.toml cannot be read: a number has thousands of digits"),
    bad_recipe("a large file", "# x\n" * 300_000, "x.toml is larger than 1 MiB, so it is no recipe"),
    bad_recipe("an infinite number", "[train]\nlr=inf\n", "train.lr must be a finite number, got Infinity in x.toml"),
    bad_recipe(
        "a list of sections", "[[run]]\nsteps=1\n", "run must be a section with keys of its own, got .* in x.toml"
    ),
    bad_recipe(
        "control characters", '[model]\npath="\\u001b[31m"\n', r"model.path \\x1b\[31m does not exist: give a local"
    ),
]

SETTINGS = [
    setting("run.steps", r"'run.steps' has no '=': write it as section.key=value"),
    setting("=3", "needs a dotted key such as train.lr before the '='"),
    setting("run.steps=", "has no value: write run.steps='\"\"' for an empty string"),
    setting("run.stepz=3", r"unknown key run.stepz in the override 'run.stepz=3'; did you mean run.steps\?"),
    setting("rum.steps=3", r"unknown key rum.steps in .*; did you mean run\?"),
    setting("run.steps.x=3", "needs run.steps to be a section, but it is a value"),
    setting("run.steps=three", 'run.steps must be an integer, got "three" in the override'),
    setting("run.steps=[1", "'run.steps=\\[1' is not valid TOML: check its brackets and quotes"),
    setting("train.betas=0.9,0.95", 'train.betas must be a list, got "0.9,0.95"'),
    setting("train.betas=[0.9]", "train.betas has too few values in the override"),
    setting("train.lr=1e400", "train.lr must be a finite number"),
    setting("train.lr=-0.0", "train.lr must be greater than 0 and at most 1, got -0.0"),
    setting("train.lr=1e300", "train.lr must be greater than 0 and at most 1, got 1e.?300"),
    setting("train.eps=1e-320", "train.eps must be at least 1e-20 and at most 1"),
    setting("train.clip_high=1e300", "train.clip_high must be greater than 0 and at most 1000000.0"),
    setting("train.tis_cap=1e308", "train.tis_cap must be at least 1 and at most 1000000.0"),
    setting("train.max_version_diff=100000000000000000000", "train.max_version_diff must be at least 0 and less than"),
    setting("sampling.temperature=1e-30", "sampling.temperature must be at least 0.01 and at most 100"),
    setting(
        "sampling.samples_per_prompt=1000000000000", "lower sampling.prompts_per_step or sampling.samples_per_prompt"
    ),
    setting("quant.kv_encode_scale=1e300", "quant.kv_encode_scale must be at least 1e-06 and at most 1000000.0"),
    setting("quant.kv=nvfp5", r"quant.kv: unknown format 'nvfp5'; did you mean 'nvfp4'\?.*\(in the override"),
    setting("quant.kv=mxfp4-even", "needs quant.activations and quant.kv of one family, got nvfp4 and mxfp4-even"),
    setting(
        ["quant.kv=none", "quant.activations=none"], "nothing to guide: quant.activations and quant.kv are both none"
    ),
    setting(
        ["method.name=qat", "quant.weights=none", "quant.activations=none", "quant.kv=none"],
        "method qat has nothing to quantize: .* set one of them, or take method bf16",
    ),
    setting("rollout.dtype=float32", "rollout.dtype float32 and train.dtype bfloat16 differ"),
    setting("rollout.num_pages=1", "needs 2 cache pages of 16, the engine has 1; raise rollout.num_pages"),
    setting("rollout.page_size=1000000000", "the KV cache would take .* GiB of .* GiB: lower rollout.max_num_seqs"),
    setting("rollout.max_model_len=513", "rollout.max_model_len 513 exceeds .* max_position_embeddings 512"),
    setting("sampling.max_new_tokens=64", "leaves no room for a prompt in rollout.max_model_len 64: raise it"),
    setting(
        "sampling.max_prompt_tokens=1",
        "every prompt exceeds 1 tokens .the shortest has [0-9]+.: raise rollout.max_model_len",
    ),
    setting("sampling.chat_template=on", 'no chat template, which sampling.chat_template = "on" requires'),
    setting("method.name=trac", r"unknown method 'trac'; did you mean trace or trace-all\?"),
    setting("task.name=runing_sums", r"task.name must be one of .*; did you mean running_sums\?"),
    setting("task.path=x", 'task.path .* belongs to task.name = "dataset" or "text_search"'),
    setting(
        ["task.name=dataset", "task.path=a.jsonl", "task.check.kind=maths"], r"task.check.kind .*did you mean math\?"
    ),
    setting("run.eval_every=1", "run.eval_every evaluates nothing while run.eval_prompts is 0: set it"),
    setting("run.eval_prompts=1000000", "run.eval_prompts = 1000000 cannot be met"),
    setting("run.threads=100000", "run.threads 100000 exceeds this machine's [0-9]+ cores"),
    setting("run.steps=1000000000000", "needs up to .* for states and checkpoints and its disk has .*: free some"),
    setting("run.seed=123456789012345678901234567890", "run.seed must be at least 0 and less than 1073741824"),
    setting("run.seed=" + "9" * 5000, "the override of run.seed cannot be read: a number has thousands of digits"),
    setting("model.path=" + "x" * 9000, r"error: x{1990,} \.\.\.$", "a long path"),
    command("train r.toml --out out --seeds 00,0", "--seeds names 0 twice"),
    command(f"train r.toml --out out --seeds {'9' * 5000}", "--seeds must be whole numbers joined by commas"),
    command("train r.toml --out out --seeds 0,,1", "--seeds must be whole numbers joined by commas"),
    command("train r.toml --out out --resume --overwrite", "give one of them"),
    command("compare r.toml --out out --modes bf17", r"unknown method 'bf17'; did you mean bf16\?"),
    command("compare r.toml --out out --modes bf16 --seeds 1073741824", "run.seed must be at least 0 and less than"),
    command("compare r.toml --out out --jobs -1", "--jobs must be at least 1, got -1"),
    command("compare r.toml model.path=nope --out out", "model.path nope does not exist: give a local Hugging Face"),
    command("train r.toml", "Missing option '--out'"),
]


# Data sets, prompts and tokenizers


def rows(name: str, content: str | bytes, sentence: str, *overrides: str, file: str = "d.jsonl") -> Case:
    arguments = ["train", "r.toml", "task.name=dataset", f"task.path={file}", *overrides, "--out", "out"]
    return Case(name, arguments, sentence, text(content, file))


LONG = "".join(json.dumps({"question": "1+" * n + "2=", "answer": "5"}) + "\n" for n in (60, 61))
DATA = [
    rows("an empty data file", "", "task.path d.jsonl is empty: it has no rows"),
    rows("a broken line", ROWS + '{"question": \n', "d.jsonl line 4 is no valid JSON: .* at column 14"),
    rows(
        "a line of digits",
        ROWS + '{"a": ' + "9" * 5000 + "}\n",
        "d.jsonl line 4 is no valid JSON: a number of thousands",
    ),
    rows(
        "a missing field", ROWS + '{"question": "1"}\n', "d.jsonl line 4 has no field answer; its fields are question"
    ),
    rows("no field at all", '{"a": 1}\n', "d.jsonl line 1 has no field that could be the prompt .*task.prompt_field"),
    rows("a null answer", ROWS + '{"question": "1", "answer": null}\n', "d.jsonl line 4: answer is null"),
    rows("an empty question", ROWS + '{"question": " ", "answer": "1"}\n', "d.jsonl line 4: question is empty"),
    rows(
        "rows not UTF-8",
        ROWS.encode() + b'{"question": "\xff"}\n',
        "d.jsonl line 4 is not UTF-8 text; save the file as UTF-8",
    ),
    rows("CSV without header", "1+2=,3\n1+3=,4\n", "give the file a first line of column names", file="d.csv"),
    rows(
        "ragged CSV",
        "question,answer\n1+2=\n",
        "d.csv is no valid CSV: Row #2: Expected 2 columns, got 1",
        file="d.csv",
    ),
    rows("corrupt Parquet", b"PAR1" + bytes(50) + b"PAR1", "d.parquet is no readable Parquet file", file="d.parquet"),
    rows("another ending", ROWS, "task.path d.txt must be a file that ends in .jsonl", file="d.txt"),
    rows("too few rows", ROWS[: ROWS.index("\n") + 1], "sampling.prompts_per_step = 2 cannot be met.*add rows"),
    rows("no held-out rows", ROWS, "run.eval_prompts = 2 cannot be met: .*set task.test_path", "run.eval_prompts=2"),
    rows(
        "an unreadable reference",
        ROWS + r'{"question": "1", "answer": "\\frac{"}',
        "problem train-4, .*mend it, or use",
        "task.check.kind=math",
    ),
    rows("every prompt too long", LONG, "every prompt exceeds 58 tokens .the shortest has "),
    rows(
        "a prompt too long",
        LONG,
        'has 12[24] prompt tokens.*set sampling.overlong_prompts to "drop"',
        "sampling.overlong_prompts=error",
    ),
    rows(
        "a foreign character",
        ROWS.replace("1+", "漢"),
        "the tokenizer cannot write the character '漢' of problem train-",
    ),
    command(
        "train r.toml task.name=dataset task.path=no.jsonl --out out",
        r"task.path no.jsonl does not exist \(relative paths",
    ),
    command("train r.toml task.name=dataset task.path=. --out out", "task.path . is a directory; name a file in it"),
    command(
        "train r.toml task.name=dataset task.path=p.jsonl --out out",
        "task.path p.jsonl is no regular file; save the rows",
        lambda at: os.mkfifo(at / "p.jsonl"),
    ),
    Case(
        "a long data path",
        ["train", "r.toml", "task.name=dataset", f"task.path={'x' * 300}.jsonl", "--out", "out"],
        r"cannot be used \(File name too long\)",
    ),
]


# Checkpoints


def changed(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """None removes a key."""
    return {key: value for key, value in (content | changes).items() if key not in changes or value is not None}


def edited(file: str, **changes: Any) -> Make:
    """Changes keys of a JSON file of the checkpoint; None removes one."""

    def make(at: Path) -> None:
        path = at / "model" / file
        path.write_text(json.dumps(changed(json.loads(path.read_text()), changes)))

    return make


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Make:
    def make(at: Path) -> None:
        path = at / "model" / WEIGHTS
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return make


def checkpoint(name: str, make: Make, sentence: str, *overrides: str, source: str = "moe") -> Case:
    return Case(name, ["train", "r.toml", "model.path=model", *overrides, "--out", "out"], sentence, make, source)


def shard(n: int) -> Callable[[Path], Path]:
    return lambda at: sorted((at / "model").glob("*.safetensors"))[n]


NORM = "model.norm.weight"
CHECKPOINTS = [
    checkpoint(
        "no config.json",
        lambda at: (at / "model/config.json").unlink(),
        "model.path model is no Hugging Face checkpoint",
    ),
    checkpoint(
        "corrupt config", text("{", "model/config.json"), "model/config.json is no readable JSON .*; fetch it again"
    ),
    checkpoint(
        "unknown architecture",
        edited("config.json", model_type="llama"),
        "'llama' is not supported; use a checkpoint of one of",
    ),
    checkpoint(
        "quantized weights",
        edited("config.json", quantization_config={"quant_method": "fp8"}),
        "quantization_config .*use the model's BF16",
    ),
    checkpoint(
        "a size of text", edited("config.json", hidden_size="64"), "model/config.json is no valid qwen3_moe config"
    ),
    checkpoint(
        "a dtype of no library", edited("config.json", dtype="float5"), "model/config.json is no valid qwen3_moe config"
    ),
    checkpoint("heads of no size", edited("config.json", head_dim=0), "head_dim must be a positive integer, got 0"),
    checkpoint(
        "padding outside", edited("config.json", pad_token_id=99), "pad_token_id 99 is outside the vocabulary of 32"
    ),
    checkpoint(
        "a billion layers",
        edited("config.json", num_hidden_layers=10**9),
        "num_hidden_layers 1000000000 is beyond any model",
    ),
    checkpoint(
        "a layer too many",
        edited("config.json", num_hidden_layers=3, layer_types=None),
        r"lacks weight model\.layers\.2\.input",
    ),
    checkpoint(
        "a wider model", edited("config.json", hidden_size=10**9), "weight .* has shape .*, its config asks for"
    ),
    checkpoint("no weights", lambda at: (at / "model" / WEIGHTS).unlink(), f"model has neither {WEIGHTS} nor {INDEX}"),
    checkpoint(
        "truncated weights",
        lambda at: os.truncate(at / "model" / WEIGHTS, 5000),
        "is damaged or cut short .*; fetch it again",
    ),
    checkpoint(
        "missing shard",
        lambda at: shard(1)(at).unlink(),
        "lacks its shard model-00002-.* names; fetch it again",
        source="sharded",
    ),
    checkpoint(
        "truncated shard",
        lambda at: os.truncate(shard(1)(at), 3000),
        "model-00002-.*is damaged or cut short .*; fetch it",
        source="sharded",
    ),
    checkpoint(
        "a shard twice",
        lambda at: shutil.copy(shard(0)(at), shard(1)(at)),
        f"{INDEX} says that .* but it does not; fetch",
        source="sharded",
    ),
    checkpoint(
        "float16 weights",
        weights(lambda w: {k: v.half() for k, v in w.items()}),
        "is stored as F16; BF16 and F32 are accepted, so convert",
    ),
    checkpoint(
        "int8 weights",
        weights(lambda w: {k: v.to(torch.int8) for k, v in w.items()}),
        "is stored as I8; BF16 and F32 are accepted",
    ),
    checkpoint("NaN weights", weights(lambda w: w | {NORM: w[NORM] * torch.nan}), f"weight {NORM} holds NaN or Inf"),
    checkpoint(
        "misshapen weight",
        weights(lambda w: w | {NORM: w[NORM][:3].clone()}),
        rf"{NORM} has shape \(3,\), its config asks for \(64,\)",
    ),
    checkpoint("missing weight", weights(lambda w: {k: v for k, v in w.items() if k != NORM}), f"lacks weight {NORM}"),
    setting("model.path=Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir DIR` and set model.path to DIR"),
    setting("model.path=''", "model.path is empty: give a local Hugging Face checkpoint directory"),
    setting("model.path=builtin:sums", r"unknown built-in model 'sums'; did you mean sums-moe\?"),
    checkpoint(
        "no padding token",
        edited("tokenizer_config.json", pad_token=None),
        "has no pad_token_id; set one in its tokenizer_config.json",
    ),
    checkpoint(
        "no end token",
        edited("tokenizer_config.json", eos_token=None),
        "has no eos_token_id; set one in its tokenizer_config.json",
    ),
    checkpoint(
        "a tokenizer of nothing",
        text("{}", "model/tokenizer.json"),
        "the tokenizer in model cannot be read .*; fetch it again",
    ),
    checkpoint(
        "a small vocabulary",
        edited("config.json", vocab_size=16),
        "the tokenizer in model has 25 tokens, the model only 16",
    ),
    checkpoint(
        "a refusing template",
        edited("tokenizer_config.json", chat_template="{{ raise_exception('no') }}"),
        "chat template refuses problem .*: no",
    ),
    checkpoint(
        "a broken template",
        edited("tokenizer_config.json", chat_template="{{ 1 / 0 }}"),
        "chat template refuses problem .*division by zero",
    ),
]


def of_widths(**sizes: int) -> Make:
    def make(at: Path) -> None:
        shutil.rmtree(at / "model")
        tiny_checkpoint(at / "model", tiny_config(**sizes))

    return make


CHECKPOINTS += [
    checkpoint(
        "hidden size of no blocks",
        of_widths(hidden_size=72),
        'hidden_size 72 is not a multiple .*set quant.weights="none"',
    ),
    checkpoint("heads of no blocks", of_widths(head_dim=8), 'head_dim 8 is not a multiple .*set quant.kv="none"'),
]


# Reward functions


def reward(name: str, source: str, sentence: str, function: str = "f.py:score") -> Case:
    settings = ["task.name=dataset", "task.path=d.jsonl", "task.check.kind=python", "task.check.timeout=1"]
    settings += ["task.check.workers=1", f"task.check.function={function}", "method.name=bf16"]
    settings += [
        "sampling.samples_per_prompt=8",
        "sampling.max_new_tokens=24",
    ]  # some of 16 responses end by themselves

    def make(at: Path) -> None:
        (at / "d.jsonl").write_text(ROWS)
        (at / "f.py").write_text(source)

    return Case(name, ["train", "r.toml", *settings, "--out", "out"], sentence, make)


def returning(value: str) -> str:
    return f"def score(prompt, response):\n    return {value}\n"


REWARDS = [
    reward("no reward file", "", r"the reward function's file no.py does not exist \(looked from", "no.py:score"),
    reward("no such function", returning("1"), "there is no scor in f.py; functions there: score", "f.py:scor"),
    reward(
        "reward import", "import no_such_module\n", "f.py:score cannot be imported: ModuleNotFoundError.*f.py, line 1"
    ),
    reward(
        "reward raises", returning("1 / 0"), r"f.py:score raised ZeroDivisionError.*\(f.py, line 2\) on problem train-"
    ),
    reward(
        "reward hangs",
        returning("__import__('time').sleep(60)"),
        r"did not return within 1 s \(check.timeout\) on problem",
    ),
    reward("reward NaN", returning("float('nan')"), "f.py:score returned nan, which is no finite number, on problem"),
    reward("reward None", returning("None"), "f.py:score returned None, which is no finite number, on problem"),
    reward("reward text", returning("'1'"), "f.py:score returned str '1', which is no finite number, on problem"),
    reward(
        "not path:function", "", "function must be written as path.py:function or package.module:function, got 'f'", "f"
    ),
]


# Where the output goes


def taken(at: Path) -> None:
    (at / "out").mkdir()
    (at / "out/notes.txt").write_text("mine")


def a_run(at: Path) -> None:
    (at / "out").mkdir()
    (at / "out/run.json").write_text("{}")


OUTPUTS = [
    command("train r.toml --out r.toml", "the folder r.toml cannot be made: a file is in its place"),
    command("train r.toml --out r.toml/x", "the folder r.toml/x cannot be made: a file is in its place"),
    command(
        "train r.toml --out l/x",
        r"the folder l/x cannot be written \(Too many levels of symbolic links\)",
        loop_link("l"),
    ),
    command(
        "train r.toml --out out",
        "out is not empty: choose another with --out or pass --overwrite",
        taken,
        "out is taken",
    ),
    command(
        "train r.toml --out out --overwrite", "out holds no tracefp4 run.*choose another --out", taken, "out is no run"
    ),
    command(
        "train r.toml --out out --resume",
        r"^error: out is no run to go on with, it lacks metrics.jsonl and holds notes.txt: give the folder of a run as "
        r"--out, or a new folder without --resume$",
        taken,
        "nothing to resume",
    ),
    command(
        "train r.toml --out out --seeds 0,1 --resume",
        "out is a run itself, and --seeds makes a folder a seed in it: choose another --out",
        a_run,
        "seeds within a run",
    ),
    command(
        "compare r.toml --modes bf16 --seeds 0 --out out",
        "out is not empty: choose another",
        taken,
        "compare into files",
    ),
    Case(
        "a long --out",
        ["train", "r.toml", "--out", "x" * 300],
        r"cannot be used \(File name too long\): choose another",
    ),
    Case("an empty --out", ["train", "r.toml", "--out", ""], r"--out is empty or the current folder: name a folder"),
    Case(
        "--out not UTF-8",
        ["train", "r.toml", "--out", "n\udcff"],
        r"--out 'n\\udcff' is not UTF-8: choose another name",
    ),
    command(
        "warmstart w.toml out",
        "out exists and is not an empty directory: choose another",
        lambda at: (taken(at), text("seed=0", "w.toml")(at)),
    ),
    command(
        "warmstart w.toml l",
        "l exists and is not an empty directory",
        lambda at: (loop_link("l")(at), text("seed=0", "w.toml")(at)),
    ),
    command(
        "warmstart w.toml out",
        r"unknown key optimizer.rate in w.toml",
        text("[optimizer]\nrate=1\n", "w.toml"),
        "warmstart key",
    ),
    command(
        "warmstart w.toml out",
        "optimizer.learning_rate must be a finite number",
        text("[optimizer]\nlearning_rate=inf\n", "w.toml"),
        "warmstart inf",
    ),
    command(
        "warmstart w.toml out",
        "model.hidden_size must be a multiple of 16, got 17",
        text("[model]\nhidden_size=17\n", "w.toml"),
        "warmstart width",
    ),
    command(
        "plan --model qwen3-30b --context 9 --trajectories 1",
        r"--model qwen3-30b is no file .*did you mean qwen3-30b-a3b",
    ),
    command("plan --model qwen3-30b-a3b --context 0 --trajectories 1", "--context must be greater than 0, got 0"),
    command(f"plan --model qwen3-30b-a3b --context {'9' * 400} --trajectories 1", "--context must be at most 1e.12"),
    command("plan --model qwen3-30b-a3b --context 9 --trajectories 1 --memory inf", "--memory must be at most 1e.12"),
    command(
        "plan --model c.json --context 9 --trajectories 1",
        "c.json has no hidden_size, so it cannot be sized",
        text("{}", "c.json"),
    ),
    command("report out", "no run found in out: neither it nor a folder below it holds metrics.jsonl", taken),
    command("report nope", "nope is no folder: give a run folder or one that holds some"),
]

CASES = [*RECIPES, *SETTINGS, *DATA, *CHECKPOINTS, *REWARDS, *OUTPUTS]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_sentence_and_nothing_written(
    case: Case, world: World, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if case.source:
        shutil.copytree(getattr(world, case.source), here / "model")
    case.make(here)
    assert_refused(case.arguments, case.sentence, capsys)
    assert (
        not (here / "out").is_dir()
        or case.make is taken
        or [*(here / "out").iterdir()] in ([], [here / "out/notes.txt"], [here / "out/run.json"])
    )


# A run to go on with


def states(change: Callable[[Path], object]) -> Make:
    return lambda at: [change(state) for state in (at / "states").iterdir()]


def facts(**changes: Any) -> Make:
    """Changes keys of every state.json; None removes one."""

    def change(state: Path) -> None:
        (state / FACTS).write_text(json.dumps(changed(json.loads((state / FACTS).read_text()), changes)))

    return states(change)


def newer(state: Path) -> None:
    content = json.loads((state / FACTS).read_text())
    content["config"]["train"]["muon"] = True
    (state / FACTS).write_text(json.dumps(content))


def without_states(at: Path) -> None:
    shutil.rmtree(at / "states")


NO_STATE = "none of the states in out/states is whole, .*train into another folder, or pass --overwrite"
RESUMES: dict[str, tuple[Make, str, str]] = {
    "every state cut": (states(lambda s: os.truncate(s / "state.safetensors", 100)), "", NO_STATE),
    "every state.json cut": (states(lambda s: (s / FACTS).write_text("{")), "", NO_STATE),
    "a list for a state": (states(lambda s: (s / FACTS).write_text("[]")), "", NO_STATE),
    "a step of text": (facts(step="two"), "", NO_STATE),
    "a step below 0": (facts(step=-1), "", NO_STATE),
    "no config": (facts(config=None), "", NO_STATE),
    "no counters": (facts(counters={}), "", "the newest state in out/states lacks 'version': go on with the version"),
    "a newer version": (
        states(newer),
        "",
        "is of a newer version, which has the setting train.muon: go on with the vers",
    ),
    "another recipe": (
        facts(recipe_hash="0" * 16),
        "",
        "written under the recipe hash 0{16}, the same settings now mean",
    ),
    "another setting": (
        lambda at: None,
        "train.lr=1e-3",
        "has train.lr = 5e-05, the recipe now says 0.001: set it back",
    ),
    "fewer steps": (lambda at: None, "run.steps=1", "out has 2 steps already: run.steps 1 is too few"),
    "no metrics": (lambda at: (at / "metrics.jsonl").unlink(), "", "out/metrics.jsonl lacks step 0.*start it anew"),
    "broken metrics": (text("{x\n{}\n", "metrics.jsonl"), "", "out/metrics.jsonl lacks step 0.*start it anew"),
    "binary metrics": (text(b"\xff\n\xff\n", "metrics.jsonl"), "", "out/metrics.jsonl lacks step 0.*start it anew"),
    "no timing": (lambda at: (at / "timing.jsonl").unlink(), "", "out/timing.jsonl lacks step 0.*start it anew"),
    "broken events": (text("{\n", "events.jsonl"), "", "line 1 of out/events.jsonl is of no step: mend or remove"),
    "broken run.json": (text("{", "run.json"), "", "out/run.json cannot be read .*: mend it, or train into another"),
    "complete, no state": (
        without_states,
        "",
        "out is complete after 2 steps and has no state to go on from: train into",
    ),
    "a broken config.json": (
        lambda at: (without_states(at), text("{", "config.json")(at)),
        "",
        "out/config.json cannot be read .*: mend it",
    ),
}


@pytest.mark.parametrize("name", RESUMES)
def test_a_run_that_cannot_go_on_stays_as_it_is(
    name: str, world: World, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, override, sentence = RESUMES[name]
    shutil.copytree(world.run, here / "out")
    make(here / "out")
    settings = [override or "run.steps=3"]
    assert_refused(["train", "r.toml", *settings, "--out", "out", "--resume"], sentence, capsys)


def test_a_damaged_state_is_passed_over_with_one_warning(
    world: World, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(world.run, here / "out")
    os.truncate(here / "out" / STATE / "state.safetensors", 100)
    assert tracefp4(["train", "r.toml", "run.steps=3", "--out", "out", "--resume"]) == 0
    assert capsys.readouterr().err.count(f"warning: out/{STATE} is damaged and passed over: ") == 1
    assert (here / "out/metrics.jsonl").read_bytes().startswith((world.run / "metrics.jsonl").read_bytes())


REPORTS: dict[str, tuple[Make, str]] = {
    "no step": (text("", "metrics.jsonl"), "metrics.jsonl holds no step yet: report it once a step is done"),
    "a broken line": (text("{x\n{}\n", "metrics.jsonl"), "metrics.jsonl line 1 is no JSON object"),
    "a deep line": (text("[" * 100_000 + "\n{}\n", "metrics.jsonl"), "metrics.jsonl line 1 is no JSON object"),
    "no step number": (text('{"a": 1}\n', "metrics.jsonl"), "line 1 is no JSON object with a whole number as step"),
    "a step of 50 digits": (text('{"step": ' + "9" * 50 + "}\n", "metrics.jsonl"), "with a whole number as step"),
    "a word": (text('{"step": 0, "a": "b"}\n', "metrics.jsonl"), "metrics.jsonl line 1: a is str, not a number"),
    "falling steps": (text('{"step": 1}\n{"step": 0}\n', "metrics.jsonl"), "line 2 is of step 0.*steps must rise"),
    "broken config": (text("[" * 100_000, "config.json"), "config.json is not valid JSON"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_run_that_cannot_be_reported(name: str, world: World, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, sentence = REPORTS[name]
    shutil.copytree(world.run, here / "out")
    make(here / "out")
    assert_refused(["report", "out"], sentence, capsys)


@pytest.mark.parametrize("option", ["--out", "--csv"])
def test_a_report_replaces_no_pipe_or_device(
    option: str, world: World, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(here / "pipe")
    shutil.copytree(world.run, here / "run")
    (here / "run/report.html").write_text("old")
    arguments = ["report", "run", "--out", "run/new.html", option, "pipe"] if option == "--csv" else []
    arguments = arguments or ["report", "run", option, "pipe"]
    assert_refused(arguments, "pipe is no regular file: give the name of a file to write", capsys)


# The disk, another process, and the real command


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
@pytest.mark.parametrize("place", ["out$", r"metrics\.jsonl", r"\.final\.json"])
def test_a_disk_that_refuses(
    place: str, number: int, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = BadDisk(monkeypatch)
    disk.fail(place, number)
    assert tracefp4(["train", "r.toml", "run.steps=1", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert error.endswith(f"cannot be written ({os.strerror(number)})\n")
    assert "Traceback" not in error
    assert not [p for p in here.rglob("*") if p.name.startswith(".") or p.name in (LOCK, "final.json")]
    if "final" not in place:
        assert not (here / "out").exists() or not [*(here / "out").iterdir()]


def test_a_folder_that_another_process_holds(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "out").mkdir()
    with (here / "out" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_refused(
            ["train", "r.toml", "--out", "out"], "out is in use by .*: wait for it or choose another", capsys
        )


def command_line(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tracefp4", *arguments], capture_output=True, text=True, timeout=120, **options
    )


@pytest.mark.parametrize("arguments", [["train", "--seeds", "0,1"], ["compare", "--modes", "bf16", "--seeds", "0"]])
def test_a_recipe_from_a_pipe_is_read_once_only(arguments: list[str], here: Path) -> None:
    """The second reading would find nothing."""
    name, *options = arguments
    with (here / "r.toml").open() as recipe:
        cat = subprocess.Popen(["cat"], stdin=recipe, stdout=subprocess.PIPE)
        done = command_line([name, "/dev/stdin", *options, "--out", "out"], stdin=cat.stdout)
        assert cat.stdout is not None
        cat.stdout.close()
        cat.wait()
    assert done.returncode == 2
    assert done.stderr.startswith("error: /dev/stdin is no file: it is read anew for each run, so save the recipe")
    assert done.stderr.count("\n") == 1
    assert not (here / "out").exists()


def test_the_real_command(here: Path) -> None:
    done = command_line(["train", "r.toml", "run.stepz=1", "--out", "out"])
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: unknown key run.stepz in the override .*; did you mean run.steps\?\n", done.stderr)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no device that is always full")
def test_an_output_that_is_full(here: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tracefp4", "methods"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be written (No space left on device)\n")
    assert "Traceback" not in done.stderr


# Odd, and right


@pytest.mark.parametrize(
    "override",
    [
        "rollout.max_tokens_per_step=1",
        "train.micro_batch_tokens=1",
        "run.seed=1073741823",
        "task.seed=2147483647",
        "run.seed=-0",
    ],
)
def test_settings_at_their_limits(override: str, here: Path) -> None:
    assert tracefp4(["train", "r.toml", override, "run.steps=1", "run.state_every=0", "--out", "out"]) == 0
    assert (here / "out/final.json").is_file()


def test_odd_names_and_line_ends(world: World, here: Path) -> None:
    recipe = here / "ein Rezept ü 漢.toml"
    recipe.write_bytes(b"\xef\xbb\xbf" + RECIPE.format(path=world.moe).replace("\n", "\r\n").encode())
    assert tracefp4(["train", recipe.name, "run.steps=1", "--out", "nach ü 漢"]) == 0
    assert (here / "nach ü 漢/final.json").is_file()
