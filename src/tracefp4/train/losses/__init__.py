"""Policy losses, one file a method. Each takes a ``TokenBatch`` and returns a sum over tokens or responses."""

from __future__ import annotations

from tracefp4.errors import TracefpError
from tracefp4.train.config import ScoreCenteringConfig, TBPOConfig, TrainConfig, TriageConfig
from tracefp4.train.losses.base import LossTerms, PolicyLoss, Sums, TokenBatch
from tracefp4.train.losses.grpo import GRPO, grpo_loss
from tracefp4.train.losses.score_centering import ScoreCentering, score_centering_loss
from tracefp4.train.losses.tbpo import TBPO, tbpo_loss
from tracefp4.train.losses.triage import Triage, triage_loss

LOSSES = ("grpo", "tbpo", "score_centering", "triage")


def make_loss(name: str, config: TrainConfig) -> PolicyLoss:
    """The loss of this name with its settings in ``config``. Raises TracefpError for another name."""
    bypass = config.old_logprob == "bypass"
    if name == "grpo":
        return GRPO(config.clip_low, config.clip_high, config.tis_cap, bypass)
    if name == "tbpo":
        return TBPO(config.tbpo, config.tis_cap, bypass)
    if name == "score_centering":
        return ScoreCentering(config.score_centering)
    if name == "triage":
        return Triage(config.triage, config.clip_low, config.clip_high, bypass)
    raise TracefpError(f"unknown loss {name!r}; one of {', '.join(LOSSES)}")


__all__ = [
    "GRPO",
    "LOSSES",
    "TBPO",
    "LossTerms",
    "PolicyLoss",
    "ScoreCentering",
    "ScoreCenteringConfig",
    "Sums",
    "TBPOConfig",
    "TokenBatch",
    "Triage",
    "TriageConfig",
    "grpo_loss",
    "make_loss",
    "score_centering_loss",
    "tbpo_loss",
    "triage_loss",
]
