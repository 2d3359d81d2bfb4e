"""Token batches in FP64, far enough apart that every branch of a loss occurs."""

from __future__ import annotations

import torch

from tracefp4.train.losses import TokenBatch

B, T = 6, 40


def token_batch(seed: int = 0, rows: int = B, length: int = T, spread: float = 1.0, moved: float = 0.3) -> TokenBatch:
    """spread: of log p_old - log p_rollout; moved: of log p - log p_old."""
    g = torch.Generator().manual_seed(seed)
    shape = (rows, length)
    rollout = -torch.rand(shape, generator=g, dtype=torch.float64) * 5 - 0.1
    old = rollout + spread * torch.randn(shape, generator=g, dtype=torch.float64)
    new = old + moved * torch.randn(shape, generator=g, dtype=torch.float64)
    advantages = torch.randn(rows, generator=g, dtype=torch.float64)
    mask = torch.rand(shape, generator=g) < 0.6
    return TokenBatch(new.requires_grad_(), old, rollout, advantages, mask)


def single(new: list[float], rollout: list[float], advantage: float, old: list[float] | None = None) -> TokenBatch:
    """One response of these log-probs, all of them sampled."""
    row = [torch.tensor([values], dtype=torch.float64) for values in (new, old or new, rollout)]
    mask = torch.ones(1, len(new), dtype=torch.bool)
    return TokenBatch(row[0].requires_grad_(), row[1], row[2], torch.tensor([advantage], dtype=torch.float64), mask)
