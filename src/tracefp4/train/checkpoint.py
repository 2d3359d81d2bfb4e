"""A run's state on disk: what it takes to go on as if nothing had happened.

    states/step-00000040/state.safetensors   FP32 master weights, AdamW moments, shuffling generator
                         state.json          finished steps, the config, hashes of the tensors' file

A state is written beside its place and renamed into it, so it is whole or absent; a damaged one is passed over for the
one before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tracefp4.errors import TracefpError
from tracefp4.files import replaced_dir, storage_errors

TENSORS, FACTS = "state.safetensors", "state.json"


def save_state(states_dir: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], keep: int) -> Path:
    """Writes the state after ``step`` finished steps and drops all but the ``keep`` newest.

    facts: plain JSON values. Raises StorageError naming the folder where it cannot be written; what was there stays.
    """
    target = states_dir / f"step-{step:08d}"
    with storage_errors(f"the state of step {step} in {states_dir}"):
        states_dir.mkdir(exist_ok=True)
        for left_over in states_dir.glob(".step-*"):  # of a process that was killed while writing
            shutil.rmtree(left_over, ignore_errors=True)
        with replaced_dir(target) as staging:
            save_file({name: t.contiguous() for name, t in tensors.items()}, staging / TENSORS)
            text = json.dumps({**facts, "step": step, "sha256": _sha256(staging / TENSORS)}, sort_keys=True)
            (staging / FACTS).write_text(text, encoding="utf-8")
        for old in _states(states_dir)[keep:]:
            shutil.rmtree(old)
    return target


def load_latest(states_dir: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """(tensors, facts) of the newest whole state, or None where there is none. Warns of each damaged one."""
    for directory in _states(states_dir):
        try:
            facts: dict[str, Any] = json.loads((directory / FACTS).read_text(encoding="utf-8"))
            if _sha256(directory / TENSORS) != facts["sha256"]:
                raise ValueError("its tensors do not match their hash")
            return load_file(directory / TENSORS), facts
        except (OSError, ValueError, KeyError) as error:
            warnings.warn(f"{directory} is damaged and passed over: {error}", RuntimeWarning, stacklevel=2)
    return None


def latest_facts(states_dir: Path) -> dict[str, Any] | None:
    """The facts of the newest state whose facts can be read, its tensors unread; None where there is none."""
    for directory in _states(states_dir):
        try:
            facts: dict[str, Any] = json.loads((directory / FACTS).read_text(encoding="utf-8"))
            return facts
        except (OSError, ValueError):
            continue
    return None


def check_config(
    stored: dict[str, Any], given: dict[str, Any], free: frozenset[str], defaults: dict[str, Any] | None = None
) -> None:
    """Raises TracefpError naming the first setting that differs, unless it is one of ``free`` (dotted keys).

    defaults: what a run of an older version, whose config lacks a key, is taken to have had.
    """
    for section in sorted({*stored, *given}):
        a, b = {**(defaults or {}).get(section, {}), **stored.get(section, {})}, given.get(section, {})
        for key in sorted({*a, *b}):
            if f"{section}.{key}" not in free and a.get(key) != b.get(key):
                raise TracefpError(
                    f"the run to resume has {section}.{key} = {a.get(key)!r}, the recipe now says {b.get(key)!r}: "
                    "set it back, or train into another folder"
                )


def _states(states_dir: Path) -> list[Path]:
    """Newest first."""
    return sorted(states_dir.glob("step-*"), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
