"""Vanilla quantization-aware training: the trainer rounds the same places, each value to nearest."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import TrainerForward

QAT = register(
    Method(
        "qat",
        "FP4 rollout, trainer fake-quantizes weights, activations and KV to nearest",
        quantized=True,
        forward=TrainerForward(weights=True, activations=True, kv=True),
    )
)
