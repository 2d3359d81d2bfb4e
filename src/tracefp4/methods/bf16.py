"""BF16 rollout, BF16 trainer: the reference ceiling, and the floor of the distance between two engines."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import TrainerForward

BF16 = register(Method("bf16", "BF16 rollout and trainer", quantized=False, forward=TrainerForward()))
