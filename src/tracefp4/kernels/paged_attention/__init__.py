"""Attention over a paged KV cache."""

from tracefp4.kernels.paged_attention.ref import paged_attention

__all__ = ["paged_attention"]
