"""GRPO with a token-level truncated importance ratio (TIS)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """loss: 0-d, the sum over tokens (divide by the mini-batch's tokens); ratio, weight: detached [B, T - 1];
    clipped: bool [B, T - 1], tokens whose clipped branch was taken."""

    loss: Tensor
    ratio: Tensor
    weight: Tensor
    clipped: Tensor


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
) -> LossTerms:
    """``-sum_t w_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)`` over masked tokens (METHODS section 2).

    logprobs (with gradient), old_logprobs, rollout_logprobs f32 [B, T - 1]; advantages f32 [B]; mask bool.
    w_t = min(exp(old - rollout), tis_cap), without gradient. bypass: the ratio and its clip are taken directly against
    the rollout's log-probs and w_t = 1; then nothing corrects for the two paths' distance but the clip.
    """
    reference = rollout_logprobs if bypass else old_logprobs
    # Bounded, since e^89 is infinite in FP32 and infinity times the clip's zero gradient is NaN.
    log_ratio = torch.where(mask, logprobs - reference, 0.0).clamp(-20, 20)
    ratio = log_ratio.exp()
    if bypass:
        weight = torch.ones_like(ratio)
    else:
        weight = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).exp().clamp(max=tis_cap)
    weight = weight.detach()
    A = advantages[:, None]
    plain = ratio * A
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * A
    loss = -(weight * torch.minimum(plain, bounded))[mask].sum()
    return LossTerms(loss, ratio.detach(), weight, (bounded < plain).detach() & mask)
