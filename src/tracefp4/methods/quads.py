"""QUADS (arXiv 2607.15810): a W4A16 trainer, and a rollout that gives back part of its activations' rounding error."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import Compensation, TrainerForward

QUADS = register(
    Method(
        "quads",
        "FP4 rollout with residual activation compensation, trainer fake-quantizes weights",
        quantized=True,
        forward=TrainerForward(weights=True),
        compensation=Compensation("quads"),
    )
)

QUADS_KV = register(
    Method(
        "quads-kv",
        "FP4 rollout with residual activation compensation, trainer fake-quantizes weights and KV",
        quantized=True,
        forward=TrainerForward(weights=True, kv=True),
        compensation=Compensation("quads"),
    )
)
