"""TBPO, the loss of QaRL (arXiv 2604.07853): a trust band on whole responses, dual for negative advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tracefp4.train.config import TBPOConfig
from tracefp4.train.losses.base import MAX_LOG_RATIO, LossTerms, TokenBatch, masked, mean_over, share

WEIGHT_FAR = 0.1
"""A response's weight counts as far from 1 beyond this: nothing caps it. It is a mean over tokens: 0.1 is much."""


@dataclass(frozen=True)
class TBPO:
    """``tbpo_loss`` as a PolicyLoss. tis_cap: of the token-level metrics only."""

    config: TBPOConfig
    tis_cap: float
    bypass: bool = False
    per: Literal["response"] = "response"
    top_logprobs: int = 0

    def __call__(self, batch: TokenBatch) -> LossTerms:
        c = self.config
        return tbpo_loss(batch, c.eps_low, c.eps_high, c.reference_length, self.bypass)


def tbpo_loss(
    batch: TokenBatch, eps_low: float, eps_high: float, reference_length: int = 0, bypass: bool = False
) -> LossTerms:
    """Minus the sum over responses of ``w min(r A, clip(r) A)`` where A > 0 and ``w clip(r) A`` where A < 0.

    r = exp(mean_t log pi / pi_old) and w = exp(mean_t log pi_old / pi_rollout), without gradient, over a response's
    sampled tokens; clip to the band. So a response with A > 0 above the band, or with A < 0 outside of it on either
    side, has no gradient: it is dropped. bypass: r against the rollout's log-probs and w = 1.
    """
    mask, A = batch.mask, batch.advantages
    length = mask.sum(-1)
    answered = length > 0

    def mean(difference: Tensor) -> Tensor:
        return masked(mask, difference).sum(-1) / length.clamp(min=1)

    reference = batch.rollout_logprobs if bypass else batch.old_logprobs
    ratio = mean(batch.logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = torch.ones_like(ratio)
    if not bypass:
        weight = mean(batch.old_logprobs - batch.rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()
    wider = torch.ones_like(ratio)
    if reference_length:
        wider = (reference_length / length.clamp(min=1).to(ratio.dtype)).clamp(min=1).sqrt()
    low, high = (1 - eps_low * wider).clamp(min=0), 1 + eps_high * wider
    bounded = torch.maximum(torch.minimum(ratio, high), low) * A
    surrogate = torch.where(A > 0, torch.minimum(ratio * A, bounded), bounded)
    per_response = torch.where(answered, -(weight * surrogate), 0.0)
    above, below = answered & (ratio > high), answered & (ratio < low)
    dropped = torch.where(A > 0, above, above | below).detach()
    sums = {
        "tbpo/dropped_share": share(dropped, answered),
        "tbpo/dropped_share_positive": share(dropped, answered & (A > 0)),
        "tbpo/dropped_share_negative": share(dropped, answered & (A < 0)),
        "tbpo/ratio_abs_log_mean": mean_over(ratio.detach().log().abs(), answered),
        "tbpo/weight_mean": mean_over(weight, answered),
        "tbpo/weight_far_share": share((weight - 1).abs() > WEIGHT_FAR, answered),
    }
    each = torch.ones_like(batch.logprobs)
    return LossTerms(
        per_response.sum(),
        per_response,
        ratio.detach()[:, None] * each,
        weight[:, None] * each,
        dropped[:, None].expand_as(mask) & mask,
        sums,
    )
