"""The distance between two policies on the tokens one of them sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.device import to_device


def mismatch_metrics(train_logprobs: Tensor, rollout_logprobs: Tensor, tokens: Sequence[int] = ()) -> dict[str, float]:
    """Metrics of ``delta = log p_train - log p_rollout`` over response tokens; f32 [n] each, natural log.

    kl_k1 and kl_k3 estimate KL(rollout || train) (Schulman's estimators: mean(-delta), mean(e^delta - delta - 1)).
    Each figure also stands under the alias other frameworks log it as. tokens: of each response, n in all: then also
    where tokens off by more than 2x are. Many in one response are a fault of that response, one in each of many a fault
    of a step. Raises ValueError for unequal lengths.
    """
    if train_logprobs.shape != rollout_logprobs.shape:
        raise ValueError(f"log-probs differ in shape: {tuple(train_logprobs.shape)}, {tuple(rollout_logprobs.shape)}")
    if train_logprobs.numel() == 0:
        return {}
    delta = train_logprobs.double() - rollout_logprobs.double()
    size = delta.abs()
    off = size > math.log(2.0)
    figures = (
        size.mean(),
        size.max(),
        (-delta).mean(),
        (delta.exp() - delta - 1).mean(),
        size.exp().mean(),
        off.double().mean(),
        *(_by_response(off, tokens) if tokens else ()),
    )
    # Read once: each read waits for a GPU.
    mean, largest, k1, k3, mult, extreme, *by_response = torch.stack(figures).tolist()
    names = ("mismatch/extreme_response_frac", "mismatch/extreme_tokens_max")
    return {
        "mismatch/logprob_abs_diff_mean": mean,
        "mismatch/logprob_abs_diff_max": largest,
        "mismatch/kl_k1": k1,
        "mismatch/kl_k3": k3,
        "mismatch/mult_prob_error": mult,
        "mismatch/extreme_token_frac": extreme,
        "rollout_corr/kl": k1,
        "rollout_corr/k3_kl": k3,
        "train_rollout_logprob_abs_diff": mean,
        "token_mult_prob_error": mult,
        **dict(zip(names, by_response, strict=False)),
    }


def _by_response(extreme: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(share of responses that hold an extreme token, the most that one holds) of bool [n], response by response."""
    if extreme.numel() != sum(tokens):
        raise ValueError(f"{extreme.numel()} log-probs of responses with {sum(tokens)} tokens")
    edges = to_device(F.pad(torch.tensor(tokens).cumsum(0), (1, 0)), extreme.device)
    each = F.pad(extreme.cumsum(0), (1, 0)).index_select(0, edges).diff()
    return (each > 0).double().mean(), each.max().double()


def importance_metrics(log_weight: Tensor, cap: float) -> dict[str, float]:
    """Of the token-level importance weights ``w = e^log_weight`` (f32 [n], log p_train_old - log p_rollout).

    ess = (sum w)^2 / (n sum w^2), of the raw weights and of those truncated at the cap.
    """
    if log_weight.numel() == 0:
        return {}
    w = log_weight.double().exp()
    t = w.clamp(max=cap)
    n = w.numel()
    figures = {
        "tis/mean": t.mean(),
        "tis/max": t.max(),
        "tis/max_untruncated": w.max(),
        "tis/clip_frac": (w > cap).double().mean(),
        "tis/ess": t.sum() ** 2 / (n * (t**2).sum()),
        "tis/ess_untruncated": w.sum() ** 2 / (n * (w**2).sum()),
    }
    return dict(zip(figures, torch.stack(list(figures.values())).tolist(), strict=True))
