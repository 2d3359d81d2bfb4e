"""What lies beside the weights of a Hugging Face checkpoint, and the headers of the weights themselves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tracefp4.errors import TracefpError


def read_hf_config(path: Path) -> Any:
    """The transformers config of a checkpoint directory. Raises TracefpError where it cannot be read."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise TracefpError(f"config.json in {path} cannot be read: {error}") from error


def read_tokenizer(path: Path, hf_config: Any) -> Any:
    """The tokenizer of a checkpoint directory.

    Raises TracefpError where it cannot be read, lacks a pad or end token, or is larger than the model's vocabulary.
    """
    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TracefpError(f"the tokenizer in {path} cannot be read: {error}") from error
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, name) is None:
            raise TracefpError(f"the tokenizer in {path} has no {name}; set one in its tokenizer_config.json")
    if len(tokenizer) > hf_config.vocab_size:
        raise TracefpError(
            f"the tokenizer in {path} has {len(tokenizer)} tokens, the model only {hf_config.vocab_size}"
        )
    return tokenizer


def count_weights(path: Path) -> int:
    """Number of weights (elements of all tensors) by the headers of the safetensors files.

    Raises TracefpError where a file is missing, cut short or has no readable header; no tensor is read.
    """
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    try:
        if index.is_file():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = [path / name for name in sorted(shards)]
        if not files:
            raise TracefpError(f"checkpoint {path} holds no weights: it has no *.safetensors file")
        count = 0
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        return count
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise TracefpError(f"checkpoint {path} cannot be read: {error}") from error
