"""Loading a policy from a local Hugging Face checkpoint directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from tracefp4.errors import TracefpError


def load_policy(path: Path, dtype: str) -> PreTrainedModel:
    """A causal LM in ``dtype`` ("bfloat16" or "float32"), read from disk only.

    Raises TracefpError where weights are missing or misshapen: transformers would fill missing ones with random
    numbers and only log it.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of missing weights is a table; ours is a sentence
    try:
        # The annotation: transformers types the return value without the loading info.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except (OSError, SafetensorError) as error:
        raise TracefpError(f"checkpoint {path} cannot be read: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise TracefpError(f"checkpoint {path} lacks weight {missing[0]} ({len(missing)} missing in all)")
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise TracefpError(
            f"checkpoint {path}: weight {name} has shape {tuple(stored)}, its config asks for {tuple(expected)}"
        )
    return model
