"""QaRL (arXiv 2604.07853): the trainer's forward in the rollout's low precision, under a loss on whole responses."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import TrainerForward

QARL = register(
    Method(
        "qarl",
        "FP4 rollout, trainer in the same low precision, TBPO on whole responses",
        quantized=True,
        forward=TrainerForward(weights=True, activations=True, kv=True),
        loss="tbpo",
    )
)
