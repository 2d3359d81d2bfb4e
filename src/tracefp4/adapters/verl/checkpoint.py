"""What stands beside verl's checkpoint of an actor: under which recipe its policy was trained."""

from __future__ import annotations

import json
from pathlib import Path

from tracefp4.adapters.verl.settings import KEY
from tracefp4.errors import TracefpError
from tracefp4.files import write_text_atomic

NAME = "tracefp4.json"


def write(folder: str, method: str, recipe_hash: str, version: int) -> None:
    """version: the policy version of the checkpoint's weights. Raises StorageError where the file cannot be written."""
    text = json.dumps({"method": method, "recipe": recipe_hash, "version": version}, indent=1)
    write_text_atomic(Path(folder) / NAME, text + "\n")


def check(folder: str, method: str, recipe_hash: str) -> str:
    """A sentence for the log. Raises TracefpError for a checkpoint of another recipe, or a file that is damaged.

    A checkpoint without the file was written without this package: it may be continued, which the sentence says.
    """
    path = Path(folder) / NAME
    if not path.exists():
        return f"no {NAME} in {folder}: a policy trained without tracefp4 goes on under method {method}"
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        found = str(held["recipe"]), str(held["method"]), int(held["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise TracefpError(
            f"{path} is damaged ({error}); remove it to resume without the check of the recipe"
        ) from None
    recipe, trained_by, version = found
    if recipe != recipe_hash:
        raise TracefpError(
            f"the checkpoint in {folder} was trained by method {trained_by} under recipe {recipe}, and {KEY} now says "
            f"method {method}, recipe {recipe_hash}; resume with the settings it had, or start a run of its own with "
            "trainer.resume_mode=disable"
        )
    return f"policy version {version} goes on under method {method}, recipe {recipe}"
