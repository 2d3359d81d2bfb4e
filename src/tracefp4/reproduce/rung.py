"""A rung of the task ladder: one recipe for the warm start and for the RL runs that set out from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

import tracefp4
from tracefp4.align.watchdog import WatchConfig
from tracefp4.config import ConfigError, StrictModel, config_hash, load_config, resolved
from tracefp4.config_problems import Explainer
from tracefp4.loop import LoopConfig, RunConfig, SamplingConfig
from tracefp4.methods import QuantConfig
from tracefp4.rollout.engine import RolloutConfig
from tracefp4.tasks import AnyTaskConfig
from tracefp4.tasks.running_sums import RunningSumsConfig
from tracefp4.train.trainer import TrainConfig
from tracefp4.train.warmstart import (
    ModelConfig,
    OptimizerConfig,
    StopConfig,
    TokenizerName,
    WarmstartConfig,
    check_easy,
)

FOLDER = Path("recipes", "reproduce")
TINY = "tiny"
_TINY_LAYERS = {"ladder-6": 2, "ladder-12": 3, "ladder-24": 4}


class StartConfig(StrictModel):
    """The warm start, as recipes/warmstart.toml has it; its task is the rung's."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    threads: int = Field(default=1, ge=1)
    tokenizer: TokenizerName = "arithmetic"
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    stop: StopConfig = StopConfig()


class EvaluationConfig(StrictModel):
    """Of the trained policies: held-out problems, and responses to each."""

    problems: int = Field(default=256, ge=1)
    samples: int = Field(default=4, ge=1)


class RungConfig(StrictModel):
    """A rung's recipe: [task] of both, [start] the warm start, [evaluation], and the sections of an RL recipe."""

    task: AnyTaskConfig = RunningSumsConfig()
    start: StartConfig = StartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    quant: QuantConfig = QuantConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    run: LoopConfig = LoopConfig()
    watch: WatchConfig = WatchConfig()

    @model_validator(mode="after")
    def _easy_problems_exist(self) -> Self:
        check_easy(self.start.optimizer, self.task)
        return self

    def warmstart(self, device: str = "cpu") -> WarmstartConfig:
        """The recipe of its warm start."""
        start = {name: getattr(self.start, name) for name in StartConfig.model_fields}
        return WarmstartConfig(task=self.task, device=device, **start)

    def recipe(self, model_path: str) -> dict[str, Any]:
        """The RL recipe over a checkpoint, as a run folder's config.json holds one."""
        sections = {name: getattr(self, name) for name in RunConfig.model_fields if name in type(self).model_fields}
        try:
            config = RunConfig(model={"path": model_path}, **sections)
        except ValidationError as error:  # of sections that do not fit each other
            raise ConfigError(Explainer("the rung's recipe", {}, {}, RunConfig).explain(error)) from None
        return resolved(config)

    @property
    def start_hash(self) -> str:
        """8 hex digits that name the warm start, wherever it is made."""
        # One thread or two, CPU or GPU: another order of sums, and the same start by intent.
        return config_hash(self.warmstart().model_copy(update={"threads": 1}))[:8]


def find_recipe(name: str) -> Path:
    """A recipe of the ladder by its name, or the file itself.

    Raises:
        ConfigError: there is neither; it names those that are there.
    """
    if name.endswith(".toml"):
        return Path(name)
    # Of a checkout, wherever the command is called from.
    folders = [root / FOLDER for root in (Path(), Path(tracefp4.__file__).parents[2])]
    for folder in folders:
        if (path := folder / f"{name}.toml").is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.toml")})
    hint = f": there are {', '.join(known)}" if known else f" and no {FOLDER} here: work in a checkout of tracefp4"
    raise ConfigError(f"--recipe {name} is no rung of the ladder{hint}, or give a .toml file")


def load_rung(name: str, tiny: bool = False, overrides: Sequence[str] = ()) -> RungConfig:
    """The recipe of a rung. tiny: the miniature one in its place, with fewer layers the lower the rung.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    recipe = find_recipe(name)
    if not tiny:
        return load_config(recipe, list(overrides), RungConfig)
    layers = _TINY_LAYERS.get(name, 2)
    return load_config(find_recipe(TINY), [f"start.model.num_layers={layers}", *overrides], RungConfig)
