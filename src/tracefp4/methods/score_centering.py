"""Score Centering (arXiv 2609.20807): vanilla QAT under a truncated importance ratio without its bias."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import TrainerForward

SCORE_CENTERING = register(
    Method(
        "score_centering",
        "FP4 rollout, trainer rounds to nearest, centered truncated importance sampling",
        quantized=True,
        forward=TrainerForward(weights=True, activations=True, kv=True),
        loss="score_centering",
    )
)
