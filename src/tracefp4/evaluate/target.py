"""What to evaluate: the weights of a run folder or of a recipe, and their numeric forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tracefp4.config import ConfigError, did_you_mean, load_config
from tracefp4.errors import TracefpError
from tracefp4.loop.config import RunConfig
from tracefp4.methods import get_method, list_methods
from tracefp4.recipe import QuantRecipe
from tracefp4.report.logger import CONFIG
from tracefp4.saves import BEST, CHECKPOINT

FP4 = "fp4"
_FP4_METHOD = "naive"  # quantizes as [quant] says and records nothing


@dataclass(frozen=True)
class Form:
    """A numeric form of the weights: what is quantized, and the compute dtype of the rest. calibrated: weights take
    their block scales by H-Scale."""

    name: str
    recipe: QuantRecipe
    dtype: str
    calibrated: bool = False


def load_target(target: str, overrides: list[str], checkpoint: str | None = None) -> RunConfig:
    """The recipe of a run folder or of a TOML file, its ``model.path`` that of the weights to evaluate.

    checkpoint: a checkpoint directory, or "best" for a run folder's checkpoint-best; None takes a run folder's
    checkpoint, or a recipe's own model. Raises TracefpError for whatever is not there.
    """
    folder = Path(target)
    if not folder.is_dir():
        if not folder.exists() and folder.suffix != ".toml":
            raise ConfigError(f"there is neither a run folder nor a recipe at {target}")
        if checkpoint == "best":
            raise ConfigError(f"--checkpoint best is of a run folder, and {target} is a recipe: give the run's folder")
        config = load_config(folder, overrides, RunConfig)
        return config if checkpoint is None else _with_model(config, _named(checkpoint))
    _check_run_folder(folder)
    config = load_config(folder / CONFIG, overrides, RunConfig)
    if checkpoint is not None and checkpoint != "best":
        return _with_model(config, _named(checkpoint))
    weights = folder / (BEST if checkpoint == "best" else CHECKPOINT)
    if not weights.is_dir():
        why = "run.keep_best=1 keeps one" if checkpoint == "best" else "a run writes it at its end"
        raise TracefpError(f"{folder} has no {weights.name}/ ({why}): name another by --checkpoint DIR")
    return _with_model(config, str(weights))


def _check_run_folder(folder: Path) -> None:
    try:
        content = json.loads((folder / CONFIG).read_bytes())
    except FileNotFoundError:
        inner = sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{CONFIG}"))
        hint = f", such as {inner[0]}" if inner else ""
        raise TracefpError(f"{folder} is no run folder (it has no {CONFIG}): give one{hint}, or a recipe") from None
    except (OSError, ValueError) as error:
        raise TracefpError(f"{folder / CONFIG} cannot be read: {' '.join(str(error).split())}") from None
    if isinstance(content, dict) and "model_type" in content:
        raise TracefpError(f"{folder} is a checkpoint, not a run: give a recipe and --checkpoint {folder}")


def _named(checkpoint: str) -> str:
    """A checkpoint of --checkpoint, which is there."""
    if not checkpoint.startswith("builtin:") and not (Path(checkpoint) / "config.json").is_file():
        raise TracefpError(f'--checkpoint {checkpoint} is no Hugging Face checkpoint directory: give one, or "best"')
    return checkpoint


def _with_model(config: RunConfig, path: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def make_forms(names: Sequence[str], config: RunConfig, num_layers: int) -> list[Form]:
    """The forms of these names. Raises TracefpError for an unknown one, and for two that run the same numbers."""
    forms: list[Form] = []
    for name in names:
        if name != FP4 and name.partition("@")[0] not in {m.name for m in list_methods()}:
            known = [FP4, *(m.name for m in list_methods())]
            raise ConfigError(f"unknown form {name!r} in --forms{did_you_mean(name, known)}")
        method = get_method(_FP4_METHOD if name == FP4 else name).configured(config.method)
        # Recording changes no number of the rollout: only the trainer reads it.
        recipe = method.deployed_recipe(config.quant, num_layers)
        recipe = replace(recipe, guided_layers=(), bits=1.125, rule="cell", band=None)
        forms.append(Form(name, recipe, method.dtype or config.rollout.dtype, method.calibrated))
        for other in forms[:-1]:
            if other.name == name:
                raise ConfigError(f"--forms names {name} twice")
            if other.calibrated == method.calibrated and (other.recipe.hash, other.dtype) == (
                recipe.hash,
                forms[-1].dtype,
            ):
                why = " (what a method records changes no response)" if recipe.quantized else ""
                raise ConfigError(f"the forms {other.name} and {name} run the same numbers{why}: leave one out")
    return forms
