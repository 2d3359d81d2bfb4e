"""Checkpoints that ship with the package."""

from __future__ import annotations

from pathlib import Path

from tracefp4.tasks.base import nearest_name_hint


def builtin_model_path(name: str) -> Path:
    """Directory of the built-in checkpoint ``name``, in the Hugging Face layout; serves ``builtin:<name>``.

    Raises:
        ValueError: no checkpoint has that name; the message holds the nearest one that exists.
    """
    root = Path(__file__).parent
    available = sorted(path.parent.name for path in root.glob("*/config.json"))
    if name not in available:
        raise ValueError(f"unknown built-in model {name!r}: {nearest_name_hint(name, available)}")
    return root / name
