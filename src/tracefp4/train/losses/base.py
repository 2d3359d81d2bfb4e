"""What a policy loss takes and gives.

Legend: B trajectories, T padded length, k likeliest tokens of the rollout at each position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metric name to (sum, weight), 0-d each: over micro-batches and updates both are added, then divided."""

MAX_LOG_RATIO = 20.0
"""Bound of log ratios: e^89 is infinite in FP32, and infinity times the clip's zero gradient is NaN."""


@dataclass(frozen=True)
class TokenBatch:
    """Log-probs of a micro-batch's tokens, natural log, under the temperature of the rollout.

    logprobs: of the trained policy, with gradient; old_logprobs: of the trainer's forward before this rollout's
    updates; rollout_logprobs: of the engine; f32 [B, T - 1] each. advantages f32 [B]. mask bool [B, T - 1], True on
    sampled response tokens. head_logprobs (with gradient), rollout_head_logprobs f32 [B, T - 1, k]: of the k tokens
    that were likeliest in the rollout (-Inf where there is none); None unless the loss asks for them.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    head_logprobs: Tensor | None = None
    rollout_head_logprobs: Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """loss: 0-d, the sum over tokens, or over responses (divide by the mini-batch's); each: what it is the sum of, with
    gradient, [B, T - 1] or [B], 0 where nothing was sampled; ratio, weight: detached [B, T - 1]; clipped: bool
    [B, T - 1], tokens whose clipped branch was taken; sums: the method's own metrics."""

    loss: Tensor
    each: Tensor
    ratio: Tensor
    weight: Tensor
    clipped: Tensor
    sums: Sums = field(default_factory=dict)


class PolicyLoss(Protocol):
    """per: what the loss is a sum over. top_logprobs: how many of the rollout's likeliest tokens it needs at every
    position. tis_cap: where its importance weight is truncated (metrics report the share)."""

    @property
    def per(self) -> Literal["token", "response"]: ...

    @property
    def top_logprobs(self) -> int: ...

    @property
    def tis_cap(self) -> float: ...

    def __call__(self, batch: TokenBatch) -> LossTerms: ...


def masked(mask: Tensor, difference: Tensor) -> Tensor:
    """A difference of log-probs on the masked tokens, 0 elsewhere (where it may be NaN)."""
    return torch.where(mask, difference, 0.0)


def share(selected: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """(count of selected ones, count of all), bool of one shape, as an entry of ``Sums``."""
    return (selected & among).sum().double(), among.sum().double()


def mean_over(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of values where mask, count), as an entry of ``Sums``."""
    return torch.where(mask, values.detach(), 0.0).sum().double(), mask.sum().double()
