"""TRACE (arXiv 2610.07767): as QAT, and recorded rows are rounded to the slots the rollout picked."""

from tracefp4.methods.base import Guidance, Method, register
from tracefp4.recipe import TrainerForward

STALE_BAND = 0.06
"""Slots about a rounding border within which a record of older weights is followed: some three times what two copies of
an activation differ by, and less than what a few updates move it (docs/decisions/0008)."""

_GUIDED = TrainerForward(weights=True, activations=True, kv=True, guided=True)


def _trace(name: str, description: str, layers: str, bits: float, rule: str, band: float | None = None) -> Method:
    return register(Method(name, description, True, _GUIDED, Guidance(layers, bits, rule, band)))


TRACE = _trace("trace", "guided, 1.125 bits, deeper half of the layers", "deeper-half", 1.125, "cell", STALE_BAND)
TRACE_ALL = _trace("trace-all", "guided, 1.125 bits, all layers", "all", 1.125, "cell", STALE_BAND)
TRACE_PAPER = _trace("trace-paper", "guided, 1.5 bits, bracket rule, deeper half", "deeper-half", 1.5, "bracket")
TRACE_FULL = _trace("trace-full", "guided by full codes, 4.5 bits, all layers", "all", 4.5, "cell")
