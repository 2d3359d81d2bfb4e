"""Attention over quantized K and V as a registered transformers attention implementation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tracefp4.nn.context import GuidanceContext

ATTENTION_NAME = "tracefp4"
CAUSAL_NAME = "tracefp4-causal"
"""For forwards of right-padded rows that pass no mask: transformers makes none for a name without a mask function.
Under the other name it first looks whether several sequences are packed into a row, for which the host waits until a
GPU has done all that it was given."""


def quantized_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    guidance_key: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Rounds K (after RoPE) and V [B, G, T, D] as the cache of the rollout does, then torch's attention.

    One row is one token: its G * D values of K, or of V. Raises GuidanceError where the forward runs under
    another micro-batch than it was called for.
    """
    context: GuidanceContext = module.tracefp4_context  # type: ignore[assignment]
    context.check(guidance_key)
    layer: int = module.layer_idx  # type: ignore[assignment]
    key = _round(context, "key", layer, key)
    value = _round(context, "value", layer, value)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _round(context: GuidanceContext, site: str, layer: int, x_BGTD: Tensor) -> Tensor:
    B, G, T, D = x_BGTD.shape
    rows = context.round_site(site, layer, x_BGTD.transpose(1, 2).reshape(B * T, G * D))
    return rows.view(B, T, G, D).transpose(1, 2)


for _name in (ATTENTION_NAME, CAUSAL_NAME):
    AttentionInterface.register(_name, quantized_attention)
# The mask function must be registered under the same name: without it padding would silently be attended to.
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
