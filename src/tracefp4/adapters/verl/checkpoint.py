"""What stands beside verl's checkpoint of an actor: under which recipe its policy was trained."""

from __future__ import annotations

import json
from pathlib import Path

from tracefp4.adapters.verl.settings import KEY, band_name
from tracefp4.errors import TracefpError
from tracefp4.files import write_text_atomic
from tracefp4.recipe import QuantRecipe

NAME = "tracefp4.json"


def write(folder: str, method: str, recipe: QuantRecipe, version: int) -> None:
    """version: the policy version of the checkpoint's weights. Raises StorageError where the file cannot be written."""
    held = {"method": method, "recipe": recipe.hash, "band": recipe.band, "version": version}
    write_text_atomic(Path(folder) / NAME, json.dumps(held, indent=1) + "\n")


def check(folder: str, method: str, recipe: QuantRecipe) -> str:
    """A sentence for the log. Raises TracefpError for a checkpoint of another recipe or band, or a damaged file.

    A checkpoint without the file was written without this package: it may be continued, which the sentence says. So may
    one that does not name its band, which the recipe's hash leaves out.
    """
    path = Path(folder) / NAME
    if not path.exists():
        return f"no {NAME} in {folder}: a policy trained without tracefp4 goes on under method {method}"
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        recipe_hash, trained_by, version = str(held["recipe"]), str(held["method"]), int(held["version"])
        band, now = band_name(held.get("band")), band_name(recipe.band)
    except (ValueError, KeyError, TypeError) as error:
        raise TracefpError(
            f"{path} is damaged ({error}); remove it to resume without the check of the recipe"
        ) from None
    if recipe_hash != recipe.hash:
        raise TracefpError(
            f"the checkpoint in {folder} was trained by method {trained_by} under recipe {recipe_hash}, and {KEY} now "
            f"says method {method}, recipe {recipe.hash}; resume with the settings it had, or start a run of its own "
            "with trainer.resume_mode=disable"
        )
    if "band" in held and held["band"] != recipe.band:
        raise TracefpError(
            f"the checkpoint in {folder} was trained with {KEY}.guidance.band at {band}, and now it is {now}; resume "
            f"with {KEY}.guidance.band={band}, or start a run of its own with trainer.resume_mode=disable"
        )
    known = "" if "band" in held or recipe.band is None else f"; {NAME} does not name the band it had, now it is {now}"
    return f"policy version {version} goes on under method {method}, recipe {recipe_hash}{known}"
