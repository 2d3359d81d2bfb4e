"""The RL loop: wires a Rollout and a Trainer, which know nothing of each other.

``RunConfig`` is a recipe, ``preflight`` what it is made of, ``TrainingRun`` its parts and its step, ``run_training`` a
whole run with its folder.
"""

from tracefp4.loop.config import LoopConfig, MethodConfig, ModelConfig, RunConfig, SamplingConfig
from tracefp4.loop.parts import Parts, derive_seed, model_path, preflight
from tracefp4.loop.run import DivergedError, check_resumable, check_start, run_training
from tracefp4.loop.training import TrainingRun

__all__ = [
    "DivergedError",
    "LoopConfig",
    "MethodConfig",
    "ModelConfig",
    "Parts",
    "RunConfig",
    "SamplingConfig",
    "TrainingRun",
    "check_resumable",
    "check_start",
    "derive_seed",
    "model_path",
    "preflight",
    "run_training",
]
