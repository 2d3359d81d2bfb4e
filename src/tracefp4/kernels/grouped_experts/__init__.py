"""Grouped matrix products of routed experts."""

from tracefp4.kernels.grouped_experts.ref import ExpertMatrices, Routing, grouped_linear

__all__ = ["ExpertMatrices", "Routing", "grouped_linear"]
