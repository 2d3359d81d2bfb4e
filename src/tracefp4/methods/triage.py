"""TRIAGE (arXiv 2610.07043): vanilla QAT whose loss gates and repairs segments that the trainer finds unlikely."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import TrainerForward

TRIAGE = register(
    Method(
        "triage",
        "FP4 rollout, trainer rounds to nearest, mismatched segments gated or repaired",
        quantized=True,
        forward=TrainerForward(weights=True, activations=True, kv=True),
        loss="triage",
    )
)
