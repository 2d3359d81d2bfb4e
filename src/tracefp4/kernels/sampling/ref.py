"""Reference of drawing tokens, in plain torch: FP32 log-probs, their exponentials summed in FP64."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_logprobs(logits_BV: Tensor, temperature_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logits f32, log-probs f32 of the scaled distribution, bool [B]: whether the row is finite)."""
    logits = logits_BV.float()
    top = logits.amax(-1, keepdim=True)  # NaN where the row holds one
    # However small the temperature, the largest scaled logit is 0 and the others are at worst -Inf.
    return logits, torch.log_softmax((logits - top) / temperature_B[:, None], dim=-1), torch.isfinite(top[:, 0])


def invert(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """int64 [B]: the token in whose share of the FP64 distribution (of any sum) the number falls."""
    cdf = probs_BV.cumsum(-1)
    u = uniform_B * cdf[:, -1]
    drawn = torch.searchsorted(cdf, u[:, None], right=True)[:, 0]
    # u < cdf[-1] up to rounding; the last token with any mass bounds the index.
    last = probs_BV.shape[-1] - 1 - (probs_BV.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(drawn, last)


def draw_tokens(
    logits_BV: Tensor, temperature_B: Tensor, greedy_B: Tensor, uniform_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits, logprobs, finite = scaled_logprobs(logits_BV, temperature_B)
    drawn = invert(logprobs.double().exp(), uniform_B)
    ids = torch.where(greedy_B, logits.argmax(-1), drawn)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0], finite
