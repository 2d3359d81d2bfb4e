"""This package's losses behind verl's policy-loss interface, so that a method means the same in both trainers.

verl calls a loss with old and current log-probs, advantages and a mask, but not with the rollout's log-probs, which
TBPO and TRIAGE weigh by. The engine lays them ``beside`` the call, and reads the loss's own figures there.

Legend: B responses, R padded response length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss

from tracefp4.adapters.verl.settings import AdapterSettings
from tracefp4.errors import TracefpError
from tracefp4.methods import Method
from tracefp4.train.losses import LossTerms, Sums, TokenBatch, make_loss
from tracefp4.train.trainer import TrainConfig

STOCK = "vanilla"
"""verl's PPO loss: of methods whose loss is GRPO, weighed by verl's own rollout correction."""
OWN = ("tbpo", "triage")
_ACTOR = "actor_rollout_ref.actor"


def loss_mode(method: Method) -> str:
    """What ``actor.policy_loss.loss_mode`` must be for a method."""
    return STOCK if method.loss == "grpo" else f"tracefp4_{method.loss}"


@dataclass
class Beside:
    """rollout_logprobs: f32 [B, R] or nested, of the responses of one micro-batch; None where the batch has none.
    sums: the loss's own figures, filled in by the call; ``called`` tells whether there was one."""

    settings: AdapterSettings
    rollout_logprobs: Tensor | None
    sums: Sums = field(default_factory=dict)
    called: bool = False


_beside: Beside | None = None


@contextmanager
def beside(settings: AdapterSettings, rollout_logprobs: Tensor | None) -> Iterator[Beside]:
    """What a loss of this package finds while one micro-batch is trained."""
    global _beside
    _beside = Beside(settings, rollout_logprobs)
    try:
        yield _beside
    finally:
        _beside = None


def policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss ``name`` of ``tracefp4.train.losses`` as verl calls one; f32 [B, R] each, mask bool or 0/1.

    What the loss is a sum of is aggregated by verl's ``loss_agg_mode``; a loss over responses stands on every token of
    its response, so that "seq-mean-token-mean" is the mean over responses. rollout_is_weights is not applied: these
    losses weigh by the rollout's log-probs themselves. Raises TracefpError outside of this package's engine, under
    another method, without rollout log-probs, or for advantages that differ within a response.
    """
    if _beside is None:
        raise TracefpError(
            f"{_ACTOR}.policy_loss.loss_mode=tracefp4_{name} runs in the engines of tracefp4 alone: set "
            f"{_ACTOR}.strategy=fsdp2 or megatron, and actor_rollout_ref.model.override_config.tracefp4.method"
        )
    _beside.called = True
    batch = _token_batch(_beside, name, old_log_prob, log_prob, advantages, response_mask)
    settings = _beside.settings
    loss = make_loss(
        name,
        TrainConfig(
            clip_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
            clip_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
            tbpo=settings.tbpo,
            triage=settings.triage,
        ),
    )
    terms = loss(batch)
    _beside.sums = terms.sums
    total = agg_loss(
        loss_mat=_per_token(terms, batch.mask),
        loss_mask=batch.mask,
        loss_agg_mode=loss_agg_mode,
        **config.global_batch_info,
    )
    return total, _stock_figures(terms, batch)


def _token_batch(
    found: Beside, name: str, old: Tensor, new: Tensor, advantages: Tensor, response_mask: Tensor
) -> TokenBatch:
    method = found.settings.mode
    if method.loss != name:
        raise TracefpError(
            f"method {method.name} trains by {_ACTOR}.policy_loss.loss_mode={loss_mode(method)}, not tracefp4_{name}"
        )
    rollout = found.rollout_logprobs
    if rollout is None:
        raise TracefpError(
            f"method {method.name} weighs by the rollout's log-probs: set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if rollout.is_nested:
        rollout = torch.nested.to_padded_tensor(rollout, 0.0, tuple(new.shape))
    mask = response_mask.bool()
    first = mask.int().argmax(-1, keepdim=True)
    A = advantages.gather(-1, first)
    if bool(((advantages != A) & mask).any()):
        raise TracefpError(
            f"method {method.name} takes one advantage a response; this batch has several: set "
            "algorithm.adv_estimator=grpo"
        )
    return TokenBatch(new.float(), old.float(), rollout.to(new.device).float(), A[:, 0].float(), mask)


def _per_token(terms: LossTerms, mask: Tensor) -> Tensor:
    return terms.each if terms.each.ndim == 2 else torch.where(mask, terms.each[:, None], 0.0)


def _stock_figures(terms: LossTerms, batch: TokenBatch) -> dict[str, float]:
    """What verl's own losses report, under its names."""
    tokens = batch.mask.sum().clamp(min=1)
    moved = torch.where(batch.mask, batch.old_logprobs - batch.logprobs.detach(), 0.0).sum() / tokens
    return {
        "actor/pg_clipfrac": float(terms.clipped.sum() / tokens),
        "actor/ppo_kl": float(moved),
        "actor/pg_clipfrac_lower": 0.0,
    }


def select_loss(config: Any, method: Method) -> str:
    """Puts a method's loss in verl's config, where the workers find it; returns what was set, for the log.

    A loss over responses also takes ``loss_agg_mode`` from verl's default "token-mean", which would count a response
    once a token, to "seq-mean-token-mean". Raises TracefpError where the config asks for another loss, or for what the
    loss cannot have.
    """
    actor, wanted = config.actor_rollout_ref.actor, loss_mode(method)
    given = actor.policy_loss.loss_mode
    if wanted == STOCK:
        if given.startswith("tracefp4_"):
            raise TracefpError(f"{_ACTOR}.policy_loss.loss_mode={given} is not the loss of method {method.name}; "
                               f"leave it at {STOCK}")  # fmt: skip
        return ""
    if given not in (STOCK, wanted):
        raise TracefpError(
            f"method {method.name} has a loss of its own, {wanted}; leave {_ACTOR}.policy_loss.loss_mode at {STOCK}, "
            f"got {given}"
        )
    if config.algorithm.rollout_correction.get("bypass_mode", False):
        raise TracefpError(
            f"method {method.name} needs old log-probs beside the rollout's: set "
            "algorithm.rollout_correction.bypass_mode=False"
        )
    actor.policy_loss.loss_mode = wanted
    if method.loss == "tbpo" and actor.loss_agg_mode == "token-mean":
        actor.loss_agg_mode = "seq-mean-token-mean"
    return f"policy_loss.loss_mode={wanted}, loss_agg_mode={actor.loss_agg_mode}"


def register() -> None:
    for name in OWN:
        key = f"tracefp4_{name}"
        if key not in POLICY_LOSS_REGISTRY:
            loss: Callable[..., tuple[Tensor, dict[str, Any]]] = partial(policy_loss, name)
            register_policy_loss(key)(loss)
