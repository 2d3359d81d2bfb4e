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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tracefp4.errors import TracefpError
from tracefp4.files import StorageError, replaced_dir, storage_errors, warn

TENSORS, FACTS = "state.safetensors", "state.json"


def save_state(states_dir: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], keep: int) -> Path:
    """Writes the state after ``step`` finished steps and drops all but the ``keep`` newest of this and earlier steps.

    Those of later steps go too: the run has gone back behind them, and takes these steps again.
    facts: plain JSON values. Raises StorageError naming the folder where it cannot be written; what was there stays.
    """
    target = states_dir / f"step-{step:08d}"
    with storage_errors(f"the state of step {step} in {states_dir}"):
        states_dir.mkdir(exist_ok=True)
        for left_over in states_dir.glob(".step-*"):  # of a process that was killed while writing
            shutil.rmtree(left_over, ignore_errors=True)
        with replaced_dir(target) as staging:
            save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, staging / TENSORS)
            text = json.dumps({**facts, "step": step, "sha256": _sha256(staging / TENSORS)}, sort_keys=True)
            (staging / FACTS).write_text(text, encoding="utf-8")
        states = _states(states_dir)
        at = states.index(target)
        for other in states[:at] + states[at + keep :]:
            shutil.rmtree(other)
    return target


def load_latest(
    states_dir: Path, required: Sequence[str] = (), check: Callable[[dict[str, Any]], None] = lambda _: None
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """(tensors, facts) of the newest whole state that passes, or None where there is no whole one. Warns of the others.

    required: facts without which a state counts as damaged. check: raises StorageError for a state that cannot be
    gone on from; what it says of the newest such state is raised where no older one passes.
    """
    refused: StorageError | None = None
    for directory in _states(states_dir):
        try:
            facts = _read_facts(directory, required)
            check(facts)
            if _sha256(directory / TENSORS) != facts["sha256"]:
                raise ValueError("its tensors do not match their hash")
            return load_file(directory / TENSORS), facts
        except StorageError as error:
            warn(f"{directory} is passed over: {error}")
            refused = refused or error
        except (OSError, ValueError, SafetensorError) as error:
            warn(f"{directory} is damaged and passed over: {error}")
    if refused is not None:
        raise refused
    return None


def latest_facts(states_dir: Path, required: Sequence[str] = ()) -> dict[str, Any] | None:
    """The facts of the newest state whose facts can be read, its tensors unread; None where there is none."""
    for directory in _states(states_dir):
        try:
            return _read_facts(directory, required)
        except (OSError, ValueError):
            continue
    return None


def _read_facts(directory: Path, required: Sequence[str]) -> dict[str, Any]:
    """A state.json. Raises ValueError where it lacks what a state has, or one of ``required``."""
    facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    if not isinstance(facts, dict):
        raise ValueError(f"{FACTS} holds no JSON object")
    kinds: dict[str, type | tuple[type, ...]] = {
        "step": int,
        "sha256": str,
        "config": dict,
        "counters": dict,
        "totals": dict,
        "pass_rate_start": (float, int, type(None)),
        "pending": (list, type(None)),
    }
    for key, kind in kinds.items():
        if key in facts and not isinstance(facts[key], kind):
            raise ValueError(f"{key} in {FACTS} is {type(facts[key]).__name__}")
    if missing := [key for key in ("step", "sha256", *required) if key not in facts]:
        raise ValueError(f"{FACTS} lacks {missing[0]}")
    if facts["step"] < 0:
        raise ValueError(f"step in {FACTS} is {facts['step']}")
    if not all(isinstance(section, dict) for section in facts.get("config", {}).values()):
        raise ValueError(f"config in {FACTS} holds more than sections")
    return facts


def check_config(
    stored: dict[str, Any], given: dict[str, Any], free: frozenset[str], defaults: dict[str, Any] | None = None
) -> None:
    """Raises TracefpError naming the first setting that differs, unless it is one of ``free`` (dotted keys).

    defaults: what a run of an older version, whose config lacks a key, is taken to have had.
    """
    for section in sorted({*stored, *given}):
        a, b = {**(defaults or {}).get(section, {}), **stored.get(section, {})}, given.get(section, {})
        for key in sorted({*a, *b}, key=lambda key: (key != "name", key)):  # another name brings other keys
            if f"{section}.{key}" in free or a.get(key) == b.get(key):
                continue
            if key not in a or key not in b:
                which = "a newer" if key in a else "an older"
                raise TracefpError(
                    f"the run to resume is of {which} version, which {'has' if key in a else 'lacks'} the setting "
                    f"{section}.{key}: go on with the version that its run.json names, or train into another folder"
                )
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
