"""Loading a policy from a local Hugging Face checkpoint directory, whole or not at all.

Config, shard headers, names, dtypes and shapes are checked before any weight is read: transformers would fill a
missing weight with random numbers and drop an unknown one, and only log it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from transformers.utils.logging import disable_progress_bar

from tracefp4.errors import TracefpError
from tracefp4.nn.prepare import SUPPORTED_MODEL_TYPES

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
ACCEPTED_DTYPES = ("BF16", "F32")
MAX_LAYERS = 4096
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(?:gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its shard states it. dtype: safetensors' name, such as "BF16"."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def checkpoint_directory(path: str) -> Path:
    """``model.path`` as a directory that holds a config.json. Raises TracefpError saying what is there instead."""
    directory = Path(path)
    if not path.strip():
        raise TracefpError("model.path is empty: give a local Hugging Face checkpoint directory")
    if directory.is_file():
        raise TracefpError(f"model.path {path} is a file; give the Hugging Face checkpoint directory that holds it")
    if not directory.exists():
        remedy = "give a local Hugging Face checkpoint directory"
        if _HUB_ID.fullmatch(path):
            remedy = (
                "only local directories are read; where it names a model of the Hugging Face hub, fetch it by "
                f"`hf download {path} --local-dir DIR` and set model.path to DIR"
            )
        raise TracefpError(f"model.path {path} does not exist: {remedy}")
    if not (directory / "config.json").is_file():
        raise TracefpError(f"model.path {path} is no Hugging Face checkpoint directory (it has no config.json)")
    return directory


def checkpoint_folder(path: str) -> Path:
    """The folder that holds a checkpoint's config.json: ``path``, or of a hub's model its folder in the hub's cache.

    Raises TracefpError where there is neither such a folder nor such a model.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, "config.json")).parent
    except Exception as error:  # a name that is none, a model that is not there, no network, no cache
        raise TracefpError(
            f"{path} is neither a folder nor a model of the hub that can be had here ({_one_line(error)}); "
            "give the folder of a checkpoint, or download it first"
        ) from error


def read_config(directory: Path) -> PreTrainedConfig:
    """The checkpoint's config. Raises TracefpError where it is corrupt, of another architecture, or of quantized
    weights."""
    file = directory / "config.json"
    raw = _read_json(file)
    layers = raw.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:  # transformers makes a list of as many
        raise TracefpError(f"{file}: num_hidden_layers {layers} is beyond any model ({MAX_LAYERS}); fetch it again")
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise TracefpError(
            f"{file}: model_type {model_type!r} is not supported; use a checkpoint of one of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if raw.get("quantization_config") is not None:
        quantization = raw["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise TracefpError(
            f"{file} has a quantization_config ({method!r}); use the model's BF16 or FP32 checkpoint, which is "
            "quantized here as the recipe says"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # its validators raise whatever a wrong value meets
        raise TracefpError(f"{file} is no valid {model_type} config: {_one_line(error)}") from error
    _check_sizes(file, config)
    return config


def check_vocabulary(directory: Path) -> None:
    """Raises TracefpError where no file holds a vocabulary: transformers may make an empty tokenizer then."""
    if not any(True for pattern in VOCABULARIES for _ in directory.glob(pattern)):
        raise TracefpError(
            f"{directory} has no tokenizer (neither {VOCABULARIES[0]} nor another file with a vocabulary): copy the "
            "tokenizer files of the model into it"
        )


def read_tokenizer(path: Path, hf_config: Any) -> Any:
    """The tokenizer of a checkpoint directory.

    Raises TracefpError where it is missing, cannot be read, lacks a pad or end token, or is larger than the model's
    vocabulary.
    """
    check_vocabulary(path)
    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizers raises plain Exception, transformers KeyError and others
        raise TracefpError(
            f"the tokenizer in {path} cannot be read ({type(error).__name__}: {_one_line(error)}); fetch it again"
        ) from error
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, name) is None:
            raise TracefpError(f"the tokenizer in {path} has no {name}; set one in its tokenizer_config.json")
    if len(tokenizer) > hf_config.vocab_size:
        raise TracefpError(
            f"the tokenizer in {path} has {len(tokenizer)} tokens, the model only {hf_config.vocab_size}"
        )
    return tokenizer


def count_weights(directory: Path) -> int:
    """Number of weights (elements of all stored tensors), from the headers alone. Raises TracefpError as they do."""
    return sum(math.prod(t.shape) for t in read_headers(directory).values())


def check_weights(directory: Path, config: PreTrainedConfig) -> None:
    """Raises TracefpError where the headers show weights that are not those of ``config``, as ``load_policy`` does."""
    _check_tensors(directory, config, read_headers(directory))


def load_policy(path: Path, dtype: str) -> PreTrainedModel:
    """A causal LM in ``dtype`` ("bfloat16" or "float32"), read from disk only.

    Takes one file or shards with an index, in BF16 or FP32, experts stacked or one by one as on the hub. Raises
    TracefpError naming path and tensor where a weight is missing, unknown, misshapen, of another dtype or not finite.
    """
    config = read_config(path)
    _check_tensors(path, config, read_headers(path))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of weights is a table; ours is a sentence
    try:
        # The annotation: transformers types the return value without the loading info.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, SafetensorError) as error:
        raise TracefpError(f"checkpoint {path} cannot be read: {_one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys"):  # none, by the checks above; random weights if they err
        for name in sorted(map(str, info[kind])):
            raise TracefpError(f"checkpoint {path}: transformers reports {name} among its {kind}")
    for name, p in model.named_parameters():
        if not bool(torch.isfinite(p).all()):
            raise TracefpError(f"checkpoint {path}: weight {name} holds NaN or Inf")
    if config.tie_word_embeddings and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise TracefpError(
            f"checkpoint {path}: lm_head.weight differs from the embedding that its config ties it to; set "
            "tie_word_embeddings to false in its config.json, or remove lm_head.weight"
        )
    return model


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """All stored tensors by name. Raises TracefpError naming the file that is missing, cut short, or not as indexed."""
    if (directory / SINGLE_FILE).is_file():
        return _shard_header(directory / SINGLE_FILE)
    index = directory / INDEX
    if not index.is_file():
        other = next((p.name for pattern in ("*.safetensors", "*.bin", "*.pt*") for p in directory.glob(pattern)), None)
        holds = f"holds {other}, but" if other else "has"
        raise TracefpError(
            f"checkpoint {directory} {holds} neither {SINGLE_FILE} nor {INDEX}: weights are read from those"
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()) or not weight_map:
        raise TracefpError(f"{index} has no weight_map of tensor names to files; fetch it again")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            raise TracefpError(f"checkpoint {directory} lacks its shard {shard}, which {INDEX} names; fetch it again")
        tensors |= _shard_header(directory / shard)
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != Path(shard).name:
            raise TracefpError(f"{index} says that {shard} holds {name}, but it does not; fetch the checkpoint again")
    return tensors


def _shard_header(file: Path) -> dict[str, StoredTensor]:
    with file.open("rb") as stream:
        if stream.read(20) == b"version https://git-":
            raise TracefpError(f"{file} is a Git LFS pointer, not the weights; fetch them by `git lfs pull`")
    try:
        with safe_open(file, "pt") as shard:
            parts = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118  # not a dict
            return {name: StoredTensor(file, s.get_dtype(), tuple(s.get_shape())) for name, s in parts.items()}
    except (OSError, SafetensorError) as error:
        raise TracefpError(f"{file} is damaged or cut short ({_one_line(error)}); fetch it again") from error


def _check_tensors(directory: Path, config: PreTrainedConfig, stored: dict[str, StoredTensor]) -> None:
    """Names, shapes and dtypes against those of the model that the config describes."""
    for name, t in stored.items():
        if t.dtype not in ACCEPTED_DTYPES:
            raise TracefpError(
                f"{t.file}: tensor {name} is stored as {t.dtype}; BF16 and F32 are accepted, so convert the checkpoint "
                "first"
            )
    deepest = f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight"
    if deepest not in stored:  # before a model of as many layers is laid out
        raise TracefpError(f"checkpoint {directory} lacks weight {deepest}, though its config counts that layer")
    expected = _expected_shapes(config, stored)
    missing = [name for name in expected if name not in stored]
    if missing:
        raise TracefpError(f"checkpoint {directory} lacks weight {missing[0]} ({len(missing)} missing in all)")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise TracefpError(
                f"checkpoint {directory}: weight {name} has shape {stored[name].shape}, its config asks for {shape}"
            )
    free = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unknown = [n for n in sorted(set(stored) - set(expected) - free) if not n.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise TracefpError(
            f"checkpoint {directory} holds weight {unknown[0]}, which the model of its config does not have "
            f"({len(unknown)} such in all)"
        )


def _expected_shapes(config: PreTrainedConfig, stored: dict[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, experts one by one where the checkpoint stores them so."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    single = {match[1] for name in stored if (match := _EXPERT.fullmatch(name))}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, p in model.named_parameters():
        experts, _, projection = name.rpartition(".")
        if experts not in single:
            shapes[name] = tuple(p.shape)
            continue
        E, out, width = p.shape
        split = {"gate_proj": out // 2, "up_proj": out // 2} if projection == "gate_up_proj" else {projection: out}
        for e in range(E):
            shapes |= {f"{experts}.{e}.{part}.weight": (rows, width) for part, rows in split.items()}
    return shapes


def _check_sizes(file: Path, config: Any) -> None:
    """Raises TracefpError for sizes of which no model can be built."""
    fields = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    fields += ["num_key_value_heads", "max_position_embeddings"]
    routed = config.model_type == "qwen3_moe" and config.num_experts != 0
    if routed:
        fields += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"]
    if getattr(config, "head_dim", None) is not None:
        fields.append("head_dim")
    for field in fields:
        if not (isinstance(getattr(config, field), int) and getattr(config, field) > 0):
            raise TracefpError(f"{file}: {field} must be a positive integer, got {getattr(config, field)!r}")
    pad = config.pad_token_id
    if pad is not None and not 0 <= pad < config.vocab_size:
        raise TracefpError(f"{file}: pad_token_id {pad} is outside the vocabulary of {config.vocab_size}")
    if not (math.isfinite(config.rms_norm_eps) and config.rms_norm_eps > 0):
        raise TracefpError(f"{file}: rms_norm_eps must be a positive number, got {config.rms_norm_eps!r}")
    pairs = [
        ("num_attention_heads", "num_key_value_heads", config.num_attention_heads % config.num_key_value_heads == 0)
    ]
    if routed:
        pairs += [("num_experts", "num_experts_per_tok", config.num_experts_per_tok <= config.num_experts)]
    for whole, part, ok in pairs:
        if not ok:
            raise TracefpError(
                f"{file}: {whole} {getattr(config, whole)} and {part} {getattr(config, part)} do not fit"
            )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TracefpError(f"{file} is no readable JSON ({_one_line(error)}); fetch it again") from error
    if not isinstance(data, dict):
        raise TracefpError(f"{file} must hold a JSON object, not a {type(data).__name__}; fetch it again")
    return data


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
