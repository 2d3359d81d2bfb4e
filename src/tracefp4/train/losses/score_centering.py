"""Score Centering (arXiv 2609.20807): truncated importance sampling whose gradient keeps a zero mean.

Truncation makes the expected score under the rollout, sum_v q_v f(p_v / q_v) grad log p_v, differ from 0, a drift that
no advantage causes. It is subtracted: exactly on the rollout's likeliest tokens H, and with one common ratio for the
tail, of which only the mass is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tracefp4.train.config import ScoreCenteringConfig
from tracefp4.train.losses.base import MAX_LOG_RATIO, LossTerms, TokenBatch, masked, mean_over, share

_TAIL = 1e-6
"""Below this mass of the tail (a head that is the whole vocabulary, or rounding) its ratio means nothing; its factor
then is 1, and multiplies a term that is as small as the mass itself."""


@dataclass(frozen=True)
class ScoreCentering:
    """``score_centering_loss`` as a PolicyLoss."""

    config: ScoreCenteringConfig
    per: Literal["token"] = "token"

    @property
    def tis_cap(self) -> float:
        return self.config.cap

    @property
    def top_logprobs(self) -> int:
        return self.config.top_logprobs

    def __call__(self, batch: TokenBatch) -> LossTerms:
        return score_centering_loss(batch, self.config.cap)


def score_centering_loss(batch: TokenBatch, cap: float) -> LossTerms:
    """Sum over masked tokens of ``-A [sg f(p_y/q_y) log p_y - sum_{v in H} sg(min(p_v, C q_v) - alpha p_v) log p_v]``.

    p: the trained policy; q: the rollout; f(r) = min(r, C); rho = (1 - sum_H q) / (1 - sum_H p); alpha = min(1, C rho).
    The old log-probs are not used: p / q corrects for the two paths and for the updates at once. Raises ValueError
    where the batch has no head.
    """
    log_p, log_q = batch.head_logprobs, batch.rollout_head_logprobs
    if log_p is None or log_q is None:
        raise ValueError("score centering needs the rollout's head: sample with top_logprobs > 0")
    mask, A = batch.mask, batch.advantages[:, None]
    with torch.no_grad():
        there = log_q > -torch.inf
        p, q = torch.where(there, log_p.exp(), 0.0), log_q.exp()
        tail_p, tail_q = (1 - p.sum(-1)).clamp(min=0), (1 - q.sum(-1)).clamp(min=0)
        alpha = torch.where(tail_p > _TAIL, (cap * tail_q / tail_p.clamp(min=_TAIL)).clamp(max=1), 1.0)
        center = torch.minimum(p, cap * q) - alpha[..., None] * p
        log_ratio = masked(mask, batch.logprobs - batch.rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        weight = ratio.clamp(max=cap)
    centered = (center * torch.where(there & mask[..., None], log_p, 0.0)).sum(-1)
    each = torch.where(mask, -A * (weight * masked(mask, batch.logprobs) - centered), 0.0)
    truncated = (ratio > cap) & mask
    sums = {
        "score_centering/truncated_share": share(truncated, mask),
        "score_centering/head_mass_rollout": mean_over(q.sum(-1), mask),
        "score_centering/head_mass_train": mean_over(p.sum(-1), mask),
        "score_centering/alpha_mean": mean_over(alpha, mask),
        "score_centering/center_abs_mean": mean_over(center.abs().sum(-1), mask),
    }
    return LossTerms(each.sum(), each, ratio, weight, truncated, sums)
