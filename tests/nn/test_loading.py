"""A checkpoint is loaded whole or not at all, and what is wrong with it is one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny import TinyConfig, tiny_checkpoint, tiny_config, tiny_dense_config, tiny_model, tiny_recipe
from tracefp4.errors import TracefpError
from tracefp4.loop import RunConfig, run_training
from tracefp4.methods import get_method
from tracefp4.nn import prepare_model
from tracefp4.nn.loading import INDEX, SINGLE_FILE, checkpoint_folder, load_policy, read_config, read_headers
from tracefp4.rollout.model import ModelShape

SHARDED = {"max_shard_size": "60KB"}
CONFIGS = {
    "moe": tiny_config(),
    "moe untied": tiny_config(tie_word_embeddings=False),
    "dense": tiny_dense_config(),
    "dense untied": tiny_dense_config(tie_word_embeddings=False),
}


# -- what loads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [{}, SHARDED], ids=["one file", "shards"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_come_back(kind: str, stored: str, save: dict[str, str], tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, CONFIGS[kind], stored, **save)
    assert len(list(tmp_path.glob("*.safetensors"))) >= (2 if save else 1)
    for dtype in ("float32", "bfloat16"):
        check_equal(load_policy(tmp_path, dtype), tiny_model(CONFIGS[kind], stored), dtype)


def check_equal(model: Any, want: Any, dtype: str) -> None:
    assert model.state_dict().keys() == want.state_dict().keys()
    for name, w in model.state_dict().items():
        assert w.dtype == getattr(torch, dtype)
        assert torch.equal(w, want.state_dict()[name].to(w.dtype)), name
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings


def test_experts_load_under_the_hubs_names_and_stacked(tmp_path: Path) -> None:
    """transformers writes experts one by one, as the hub has them; a stacked file loads to the same model."""
    single, stacked = tmp_path / "single", tmp_path / "stacked"
    model = tiny_model(tiny_config())
    tiny_checkpoint(single, tiny_config(), "float32")
    tiny_checkpoint(stacked, tiny_config(), "float32")
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(state, stacked / SINGLE_FILE, metadata={"format": "pt"})
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in read_headers(single)
    assert "model.layers.1.mlp.experts.down_proj" in read_headers(stacked)
    for directory in (single, stacked):
        check_equal(load_policy(directory, "float32"), model, "float32")


def test_a_model_of_the_hub_is_looked_up_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def download(repo: str, file: str) -> str:
        asked.append((repo, file))
        if repo != "somebody/model":
            raise OSError("no such model\nand no network")
        return str(tmp_path / "snapshot" / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert checkpoint_folder(str(tmp_path)) == tmp_path
    assert checkpoint_folder("somebody/model") == tmp_path / "snapshot"
    assert asked == [("somebody/model", "config.json")]
    with pytest.raises(TracefpError, match=r"^somebody/else is neither a folder nor a model .*give the folder") as told:
        checkpoint_folder("somebody/else")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_config_as_the_hub_has_it(kind: str, tmp_path: Path) -> None:
    """Older field names: num_experts, rope_theta beside rope_scaling, torch_dtype; no layer_types."""

    def to_hub(c: dict[str, Any]) -> None:
        for name in ("rope_parameters", "dtype", "layer_types"):
            c.pop(name, None)
        c.update(rope_theta=1e6, rope_scaling=None, torch_dtype="bfloat16", max_window_layers=2, eos_token_id=[1, 2])
        if "num_local_experts" in c:
            c["num_experts"] = c.pop("num_local_experts")

    edit_json(tiny_checkpoint(tmp_path, CONFIGS[kind]) / "config.json", to_hub)
    config = read_config(tmp_path)
    shape = ModelShape.from_hf(config)
    assert (shape.rope_theta, shape.experts) == (1e6, 8 if kind == "moe" else 1)
    check_equal(load_policy(tmp_path, "float32"), tiny_model(CONFIGS[kind], "bfloat16"), "float32")


def test_a_stored_copy_of_the_tied_head_and_old_rotary_buffers_are_no_harm(tmp_path: Path) -> None:
    edit_weights(tiny_checkpoint(tmp_path, dtype="float32"), add_harmless)
    check_equal(load_policy(tmp_path, "float32"), tiny_model(tiny_dense_config()), "float32")


def add_harmless(weights: dict[str, Tensor]) -> None:
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_prepared_policy_saves_a_directory_for_plain_transformers(kind: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "in", CONFIGS[kind], **SHARDED)
    model = load_policy(tmp_path / "in", "bfloat16")
    prepare_model(model, tiny_recipe("trace-all", 2), get_method("trace-all").forward)
    model.save_pretrained(tmp_path / "out", **SHARDED)
    assert "tracefp4" not in (tmp_path / "out/config.json").read_text()
    ids = torch.tensor([[3, 9, 4, 17, 30]])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(plain(ids).logits, tiny_model(CONFIGS[kind], "bfloat16")(ids).logits)
    check_equal(load_policy(tmp_path / "out", "bfloat16"), tiny_model(CONFIGS[kind], "bfloat16"), "bfloat16")


# -- what does not ------------------------------------------------------------------------------------------------


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = directory / SINGLE_FILE
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def set_config(**fields: Any) -> Callable[[Path], None]:
    return lambda d: edit_json(d / "config.json", lambda c: c.update(fields))


def set_weight(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return lambda d: edit_weights(d, lambda w: w.update({name: make(w[name])}))


def drop_weight(*names: str) -> Callable[[Path], None]:
    return lambda d: edit_weights(d, lambda w: [w.pop(name) for name in names])


def cut(file: str, size: int) -> Callable[[Path], object]:
    return lambda d: (d / file).write_bytes((d / file).read_bytes()[:size])


def write(file: str, text: str) -> Callable[[Path], object]:
    return lambda d: (d / file).write_text(text)


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    def change(w: Tensor) -> Tensor:
        w = w.clone()
        w.view(-1)[3] = value
        return w

    return change


def move_in_index(d: Path) -> None:
    edit_json(d / INDEX, lambda i: i["weight_map"].update({"model.norm.weight": min(i["weight_map"].values())}))


def keep_only(*names: str) -> Callable[[Path], None]:
    return lambda d: [p.unlink() for p in d.iterdir() if p.name not in names] and None


SHARD = "model-00001-of-0000"
NORM, K_NORM = "model.norm.weight", "model.layers.1.self_attn.k_norm.weight"
EXPERT = "model.layers.0.mlp.experts.3.gate_proj.weight"

BAD: dict[str, tuple[Any, Callable[[Path], object], str]] = {
    # files
    "no config": ("dense", lambda d: (d / "config.json").unlink(), r"no Hugging Face checkpoint directory"),
    "empty directory": ("dense", keep_only(), r"no Hugging Face checkpoint directory \(it has no config.json\)"),
    "no weights": ("dense", lambda d: (d / SINGLE_FILE).unlink(), rf"has neither {SINGLE_FILE} nor {INDEX}"),
    "weights of another kind": (
        "dense",
        lambda d: (d / SINGLE_FILE).rename(d / "pytorch_model.bin"),
        "holds pytorch_model.bin, but neither",
    ),
    "truncated": ("dense", cut(SINGLE_FILE, 5000), rf"{SINGLE_FILE} is damaged or cut short .*; fetch it again"),
    "empty file": ("dense", cut(SINGLE_FILE, 0), rf"{SINGLE_FILE} is damaged or cut short"),
    "lfs pointer": (
        "dense",
        write(SINGLE_FILE, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"),
        rf"{SINGLE_FILE} is a Git LFS pointer, not the weights; fetch them by `git lfs pull`",
    ),
    "missing shard": ("sharded", lambda d: shard(d).unlink(), r"lacks its shard model-00001-of-\d+\.safetensors"),
    "truncated shard": (
        "sharded",
        lambda d: cut(shard(d).name, 900)(d),
        r"model-00001-of-\d+\.safetensors is damaged or cut short",
    ),
    "index of another checkpoint": ("sharded", move_in_index, rf"{INDEX} says that model-00001\S+ holds {NORM}, but"),
    "index without a map": ("sharded", write(INDEX, "{}"), rf"{INDEX} has no weight_map"),
    "corrupt index": ("sharded", cut(INDEX, 40), rf"{INDEX} is no readable JSON"),
    # config
    "corrupt config": ("dense", cut("config.json", 30), r"config.json is no readable JSON"),
    "config of a list": ("dense", write("config.json", "[1]"), r"config.json must hold a JSON object, not a list"),
    "other architecture": (
        "dense",
        set_config(model_type="llama"),
        r"config.json: model_type 'llama' is not supported; use a checkpoint of one of qwen3_moe, qwen3",
    ),
    "no architecture": (
        "dense",
        lambda d: edit_json(d / "config.json", lambda c: c.pop("model_type")),
        "model_type None",
    ),
    "wrong type": ("dense", set_config(hidden_size="x"), r"config.json is no valid qwen3 config: .*hidden_size"),
    "no heads": ("dense", set_config(num_attention_heads=0), r"num_attention_heads must be a positive integer, got 0"),
    "heads": (
        "dense",
        set_config(num_key_value_heads=3),
        r"num_attention_heads 4 and num_key_value_heads 3 do not fit",
    ),
    "quantized": (
        "dense",
        set_config(quantization_config={"quant_method": "fp8"}),
        r"config.json has a quantization_config \('fp8'\); use the model's BF16 or FP32 checkpoint",
    ),
    # tensors
    "float16": ("dense", set_weight(NORM, Tensor.half), rf"{NORM} is stored as F16; BF16 and F32 are accepted"),
    "float8": (
        "dense",
        set_weight(NORM, lambda w: w.to(torch.float8_e4m3fn)),
        rf"{SINGLE_FILE}: tensor {NORM} is stored as F8_E4M3",
    ),
    "integers": ("dense", set_weight(NORM, lambda w: w.to(torch.int8)), "stored as I8; BF16 and F32 are accepted"),
    "NaN": ("dense", set_weight(K_NORM, with_value(float("nan"))), rf"weight {K_NORM} holds NaN or Inf"),
    "Inf": ("moe", set_weight(EXPERT, with_value(float("-inf"))), r"mlp\.experts\.gate_up_proj holds NaN or Inf"),
    "missing": ("dense", drop_weight(NORM, K_NORM), rf"lacks weight {K_NORM} \(2 missing in all\)"),
    "missing expert": ("moe", drop_weight(EXPERT), rf"lacks weight {EXPERT} \(1 missing in all\)"),
    "misshapen": (
        "dense",
        set_weight(NORM, lambda w: torch.ones(32)),
        rf"weight {NORM} has shape \(32,\), its config asks for \(64,\)",
    ),
    "misshapen expert": (
        "moe",
        set_weight(EXPERT, lambda w: torch.ones(16, 64)),
        rf"weight {EXPERT} has shape \(16, 64\), its config asks for \(32, 64\)",
    ),
    "more layers than its config": (
        "moe",
        set_config(num_hidden_layers=1),
        r"holds weight model\.layers\.1\.\S+, which",
    ),
    "layers and layer types": (
        "dense",
        set_config(num_hidden_layers=3),
        r"config.json is no valid qwen3 config: .*num_hidden",
    ),
    "fewer layers than its config": ("moe", set_config(num_hidden_layers=3), r"lacks weight model\.layers\.2\."),
    "fewer experts than its config": (
        "moe",
        set_config(num_local_experts=9),
        r"lacks weight \S+\.experts\.8\.gate_proj",
    ),
    "more experts than its config": (
        "moe",
        set_config(num_local_experts=7),
        r"weight model\.layers\.0\.mlp\.gate\.weight has shape \(8, 64\), its config asks for \(7, 64\)",
    ),
    "a bias": (
        "dense",
        lambda d: edit_weights(d, lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)})),
        r"holds weight model\.layers\.0\.self_attn\.q_proj\.bias, which",
    ),
    "untied head": (
        "dense",
        lambda d: edit_weights(d, lambda w: w.update({"lm_head.weight": 2 * w["model.embed_tokens.weight"]})),
        r"lm_head\.weight differs from the embedding that its config ties it to; set tie_word_embeddings to false",
    ),
}


def shard(directory: Path) -> Path:
    return min(directory.glob("model-*.safetensors"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("good")
    configs: dict[str, tuple[TinyConfig, dict[str, str]]] = {
        "dense": (tiny_dense_config(), {}),
        "moe": (tiny_config(), {}),
        "sharded": (tiny_dense_config(), SHARDED),
    }
    return {name: tiny_checkpoint(root / name, c, "float32", **save) for name, (c, save) in configs.items()}


@contextmanager
def nothing_written(root: Path) -> Iterator[None]:
    def contents() -> dict[Path, bytes | None]:
        return {p: p.read_bytes() if p.is_file() else None for p in root.rglob("*")}

    before = contents()
    yield
    assert contents() == before


def config_for(path: Path | str) -> RunConfig:
    sections = {"model": {"path": str(path)}, "method": {"name": "qat"}, "run": {"steps": 1, "tensorboard": False}}
    return RunConfig.model_validate({**sections, "rollout": {"max_num_seqs": 2}})


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_one_sentence_and_nothing_is_written(
    case: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    good, damage, message = BAD[case]
    model, run_dir = tmp_path / "model", tmp_path / "run"
    shutil.copytree(checkpoints[good], model)
    damage(model)
    run_dir.mkdir()
    with nothing_written(tmp_path), pytest.raises(TracefpError, match=message) as caught:
        run_training(config_for(model), run_dir)
    assert str(model) in str(caught.value), "the message names the checkpoint"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "Qwen/Qwen3-30B-A3B",
            r"Qwen/Qwen3-30B-A3B does not exist: only local directories are read; .* "
            r"`hf download Qwen/Qwen3-30B-A3B --local-dir DIR` and set model.path to DIR",
        ),
        ("/no/such/place", "model.path /no/such/place does not exist: give a local Hugging Face checkpoint directory"),
        (__file__, "is a file; give the Hugging Face checkpoint directory that holds it"),
        ("", "model.path"),
    ],
)
def test_a_path_that_is_no_checkpoint(path: str, message: str, tmp_path: Path) -> None:
    with nothing_written(tmp_path), pytest.raises(TracefpError, match=message):
        run_training(config_for(path), tmp_path)
