"""The distance between two policies on the tokens one of them sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.device import to_device


def mismatch_metrics(train_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, float]:
    """Metrics of ``delta = log p_train - log p_rollout`` over response tokens; f32 [n] each, natural log.

    kl_k1 and kl_k3 estimate KL(rollout || train) (Schulman's estimators: mean(-delta), mean(e^delta - delta - 1)).
    Each figure also stands under the alias other frameworks log it as. Raises ValueError for unequal lengths.
    """
    if train_logprobs.shape != rollout_logprobs.shape:
        raise ValueError(f"log-probs differ in shape: {tuple(train_logprobs.shape)}, {tuple(rollout_logprobs.shape)}")
    if train_logprobs.numel() == 0:
        return {}
    delta = train_logprobs.double() - rollout_logprobs.double()
    size = delta.abs()
    figures = (
        size.mean(),
        size.max(),
        (-delta).mean(),
        (delta.exp() - delta - 1).mean(),
        size.exp().mean(),
        (size > math.log(2.0)).double().mean(),
    )
    mean, largest, k1, k3, mult, extreme = torch.stack(figures).tolist()  # read once: each read waits for a GPU
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
    }


def extreme_by_response(train_logprobs: Tensor, rollout_logprobs: Tensor, tokens: Sequence[int]) -> dict[str, float]:
    """Where tokens off by more than 2x are: the share of responses that hold one, and the most that one holds.

    log-probs f32 [n], response by response; tokens: of each response, n in all. Many in one response are a fault of
    that response, one in each of many a fault of a step. Raises ValueError where the tokens are not n.
    """
    if train_logprobs.numel() != sum(tokens):
        raise ValueError(f"{train_logprobs.numel()} log-probs of responses with {sum(tokens)} tokens")
    if not sum(tokens):
        return {}
    ends = torch.tensor(tokens).cumsum(0)
    extreme = (train_logprobs.double() - rollout_logprobs.double()).abs() > math.log(2.0)
    before = F.pad(extreme.cumsum(0), (1, 0))
    each = before.index_select(0, to_device(F.pad(ends, (1, 0)), extreme.device)).diff()
    share, most = torch.stack([(each > 0).double().mean(), each.max().double()]).tolist()
    return {"mismatch/extreme_response_frac": share, "mismatch/extreme_tokens_max": most}


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
