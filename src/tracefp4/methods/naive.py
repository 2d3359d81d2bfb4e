"""FP4 rollout under a BF16 trainer that knows nothing of it."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import TrainerForward

NAIVE = register(Method("naive", "FP4 rollout, BF16 trainer", quantized=True, forward=TrainerForward()))
