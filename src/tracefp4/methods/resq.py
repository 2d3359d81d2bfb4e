"""Rollout-ResQ (arXiv 2607.26515): a sparse quantized residual in the rollout, under an all-FP4 trainer."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import Compensation, TrainerForward

RESQ = register(
    Method(
        "resq",
        "FP4 rollout with a sparse residual, trainer fake-quantizes weights, activations and KV",
        quantized=True,
        forward=TrainerForward(weights=True, activations=True, kv=True),
        compensation=Compensation("resq"),
    )
)
