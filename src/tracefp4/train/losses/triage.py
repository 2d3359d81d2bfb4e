"""TRIAGE (arXiv 2610.07043): segments that the trainer finds far less likely than the rollout did are gated where the
advantage is negative, and pulled back where it is positive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tracefp4.train.config import TriageConfig
from tracefp4.train.losses.base import LossTerms, TokenBatch, masked, mean_over, share
from tracefp4.train.losses.grpo import grpo_loss


@dataclass(frozen=True)
class Triage:
    """``triage_loss`` as a PolicyLoss."""

    config: TriageConfig
    clip_low: float
    clip_high: float
    bypass: bool = False
    per: Literal["token"] = "token"
    top_logprobs: int = 0

    @property
    def tis_cap(self) -> float:
        return self.config.tis_cap

    def __call__(self, batch: TokenBatch) -> LossTerms:
        return triage_loss(batch, self.config, self.clip_low, self.clip_high, self.bypass)


def triage_loss(
    batch: TokenBatch, config: TriageConfig, clip_low: float, clip_high: float, bypass: bool = False
) -> LossTerms:
    """``grpo_loss`` with its weight times ``gate``, plus repair_coef times the sum of ``repair_penalty`` over tokens.

    The gate is constant, by the old log-probs (bypass: by the current ones); the penalty has a gradient.
    """
    mask, A = batch.mask, batch.advantages[:, None]
    reference = batch.logprobs.detach() if bypass else batch.old_logprobs
    negative, positive = mask & (A < 0), mask & (A > 0)
    gate = triage_gate(masked(mask, reference - batch.rollout_logprobs), negative, config)
    b = batch
    terms = grpo_loss(
        b.logprobs,
        b.old_logprobs,
        b.rollout_logprobs,
        b.advantages,
        mask,
        clip_low,
        clip_high,
        config.tis_cap,
        bypass,
        gate,
    )
    penalty = repair_penalty(masked(mask, b.logprobs - b.rollout_logprobs), positive, config)
    sums = {
        "triage/gated_share": share(gate < 1, mask),
        "triage/gate_mean_negative": mean_over(gate, negative),
        "triage/repaired_share": share(penalty.detach() > 0, mask),
        "triage/repair_mean_positive": mean_over(penalty, positive),
    }
    loss = terms.loss + config.repair_coef * penalty.sum()
    return LossTerms(loss, terms.each + config.repair_coef * penalty, terms.ratio, terms.weight, terms.clipped, sums)


def segments(mask: Tensor, length: int) -> Tensor:
    """int64 [B, T - 1]: which run of ``length`` consecutive masked tokens a token belongs to, counted per response."""
    return ((mask.cumsum(-1) - 1) // length).clamp(min=0)


def segment_sums(values: Tensor, mask: Tensor, segment: Tensor) -> Tensor:
    """Of every token the sum over the masked tokens of its segment, [B, T - 1]."""
    sums = values.new_zeros(values.shape).scatter_add(-1, segment, torch.where(mask, values, 0.0))
    return sums.gather(-1, segment)


def triage_gate(delta: Tensor, negative: Tensor, config: TriageConfig) -> Tensor:
    """f32 [B, T - 1]: the gate of tokens with delta < 0 in segments of negative advantage, 1 elsewhere."""
    c = config
    segment = segments(negative, c.gate_segment)
    count = segment_sums(torch.ones_like(delta), negative, segment).clamp(min=1)
    mean = segment_sums(delta, negative, segment) / count
    far = segment_sums((delta < c.tail_below).to(delta.dtype), negative, segment)
    weight = torch.ones_like(delta)
    weight = weight.masked_fill(mean < c.mild_below, c.mild_weight).masked_fill(mean < c.severe_below, c.severe_weight)
    tail = 1 - c.tail_drop * (far / c.tail_count).clamp(max=1)
    return torch.where(negative & (delta < 0), torch.minimum(weight, tail), 1.0)


def repair_penalty(delta: Tensor, positive: Tensor, config: TriageConfig) -> Tensor:
    """[B, T - 1]: on tokens of positive advantage their segment's ``beta^2 (sqrt(1 + (q / beta)^2) - 1)``, 0 elsewhere;
    q = max(-margin - mean delta, 0). Each token carries its segment's penalty, so a sum over tokens weighs segments by
    their length."""
    c = config
    segment = segments(positive, c.repair_segment)
    count = segment_sums(torch.ones_like(delta), positive, segment).clamp(min=1)
    mean = segment_sums(delta, positive, segment) / count
    q = (-c.repair_margin - mean).clamp(min=0)
    penalty = c.repair_beta**2 * ((1 + (q / c.repair_beta) ** 2).sqrt() - 1)
    return torch.where(positive, penalty, 0.0)
