"""GRPO with a token-level truncated importance ratio (TIS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tracefp4.train.losses.base import MAX_LOG_RATIO, LossTerms, TokenBatch, masked


@dataclass(frozen=True)
class GRPO:
    """``grpo_loss`` as a PolicyLoss."""

    clip_low: float
    clip_high: float
    tis_cap: float
    bypass: bool = False
    per: Literal["token"] = "token"
    top_logprobs: int = 0

    def __call__(self, batch: TokenBatch) -> LossTerms:
        b = batch
        return grpo_loss(
            b.logprobs,
            b.old_logprobs,
            b.rollout_logprobs,
            b.advantages,
            b.mask,
            self.clip_low,
            self.clip_high,
            self.tis_cap,
            self.bypass,
        )


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    tis_cap: float,
    bypass: bool = False,
    gate: Tensor | None = None,
) -> LossTerms:
    """``-sum_t w_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)`` over masked tokens.

    logprobs (with gradient), old_logprobs, rollout_logprobs f32 [B, T - 1]; advantages f32 [B]; mask bool.
    w_t = min(exp(old - rollout), tis_cap), without gradient. bypass: the ratio and its clip are taken directly against
    the rollout's log-probs and w_t = 1; then nothing corrects for the two paths' distance but the clip. gate: f32
    [B, T - 1], a further factor of w_t.
    """
    reference = rollout_logprobs if bypass else old_logprobs
    log_ratio = masked(mask, logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    if bypass:
        weight = torch.ones_like(ratio)
    else:
        weight = masked(mask, old_logprobs - rollout_logprobs).exp().clamp(max=tis_cap)
    weight = weight.detach() if gate is None else weight.detach() * gate
    A = advantages[:, None]
    plain = ratio * A
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * A
    each = torch.where(mask, -(weight * torch.minimum(plain, bounded)), 0.0)
    return LossTerms(each.sum(), each, ratio.detach(), weight, (bounded < plain).detach() & mask)
