"""What `tracefp4.loop` exports."""

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
