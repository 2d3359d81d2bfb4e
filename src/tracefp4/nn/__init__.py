"""Modules and ops of the trainer's forward."""

from tracefp4.nn.context import GuidanceContext, MicroBatch, TrainerForward
from tracefp4.nn.observe import SiteObserver
from tracefp4.nn.prepare import prepare_model
from tracefp4.nn.rounding import fake_quantize, guided_round

__all__ = [
    "GuidanceContext",
    "MicroBatch",
    "SiteObserver",
    "TrainerForward",
    "fake_quantize",
    "guided_round",
    "prepare_model",
]
