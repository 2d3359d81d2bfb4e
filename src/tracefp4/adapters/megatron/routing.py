"""Routing replay (R3) through the seam that Megatron's router has: the object it asks for its top-k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tracefp4.nn import GuidanceContext


class ContextReplay:
    """In place of ``megatron.core...RouterReplay`` as a router's ``router_replay``.

    Megatron's own holds a queue a router; this one looks the experts up in the armed micro-batch, so that a recomputed
    forward sees the same ones whatever ran in between. Rows without valid routing keep the router's choice; gates are
    the router's own, computed by Megatron from the logits of the experts that are returned.
    """

    router_replay_action = None
    layer_number: int | None = None

    def __init__(self, context: GuidanceContext, layer: int) -> None:
        self._context, self._layer = context, layer

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """scores [N, E] -> (scores, experts int64) of the chosen ones, [N, topk] each."""
        assert default_compute_topk is not None
        own_scores, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        mb = self._context.current
        if mb is None or self._layer not in mb.experts:
            return own_scores, own
        experts, valid = mb.experts[self._layer]
        if self._context.observer is not None:
            self._context.observer.observe_routing(own, experts, valid)
        if not self._context.forward.replay:
            return own_scores, own
        chosen = torch.where(valid[:, None], experts, own)
        return scores.gather(1, chosen), chosen
