"""Checkpoints that ship with the package."""

from __future__ import annotations

from pathlib import Path

from tracefp4.config import did_you_mean
from tracefp4.errors import TracefpError


def builtin_model_path(name: str) -> Path:
    """Directory of the built-in checkpoint ``name``, in the Hugging Face layout; serves ``builtin:<name>``.

    Raises:
        TracefpError: no checkpoint has that name; the message holds the nearest one that exists.
    """
    root = Path(__file__).parent
    available = sorted(path.parent.name for path in root.glob("*/config.json"))
    if name not in available:
        raise TracefpError(f"unknown built-in model {name!r}{did_you_mean(name, available)}")
    return root / name
