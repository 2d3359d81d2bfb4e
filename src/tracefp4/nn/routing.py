"""Routing replay (R3, arXiv 2510.11370): the rollout's experts, the trainer's own gate values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.nn.context import GuidanceContext


def replay_hook(context: GuidanceContext, layer: int) -> Any:
    """A forward hook for a Qwen3-MoE top-k router, whose output is (logits [N, E], gates [N, K], experts [N, K]).

    Valid rows get the rollout's experts with gates recomputed from the trainer's logits by the model's own rule, so
    that gradients flow to the router; other rows keep their own choice.
    """

    def hook(router: nn.Module, _args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> Any:
        mb = context.current
        if mb is None or layer not in mb.experts:
            return None
        logits, gates, own = output
        experts, valid = mb.experts[layer]
        if context.observer is not None:
            context.observer.observe_routing(own, experts, valid)
        if not context.forward.replay:
            return None
        chosen = torch.where(valid[:, None], experts, own)
        probs = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
        if router.norm_topk_prob:
            probs = probs / probs.sum(-1, keepdim=True)
        return logits, probs.to(gates.dtype), chosen

    return hook
