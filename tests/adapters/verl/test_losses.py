"""verl's loss interface gives the numbers of the built-in trainer's losses. Skipped where verl is not installed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from token_batches import token_batch

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

from tracefp4.adapters.verl import losses
from tracefp4.adapters.verl.settings import AdapterSettings, read_settings
from tracefp4.errors import TracefpError
from tracefp4.methods import get_method
from tracefp4.train.losses import TokenBatch, make_loss
from tracefp4.train.trainer import TrainConfig

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def settings(method: str, **given: Any) -> AdapterSettings:
    found = read_settings({"model_config": {}, "tracefp4": {"method": method, "guidance": {"url": "g"}, **given}})
    assert found is not None
    return found


def actor(**changes: Any) -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        **changes,
    )


def batch(seed: int = 0) -> TokenBatch:
    """FP32, as verl has it; the built-in loss and verl's then round alike."""
    b = token_batch(seed, spread=0.6, moved=0.2)
    tensors = [t.detach().float() for t in (b.logprobs, b.old_logprobs, b.rollout_logprobs, b.advantages)]
    return TokenBatch(tensors[0].requires_grad_(), *tensors[1:], b.mask)


def called(
    method: str, b: TokenBatch, mode: str, config: Any, weights: Tensor | None = None, rollout: Tensor | None = None
) -> tuple[Tensor, dict[str, Any], losses.Beside]:
    """verl's call of a method's loss, through verl's registry."""
    loss = get_policy_loss_fn(losses.loss_mode(get_method(method)))
    with losses.beside(settings(method), b.rollout_logprobs if rollout is None else rollout) as beside:
        value, figures = loss(
            old_log_prob=b.old_logprobs,
            log_prob=b.logprobs,
            advantages=b.advantages[:, None] * b.mask,
            response_mask=b.mask,
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=weights,
        )
    return value, figures, beside


def aggregated(each: Tensor, mask: Tensor, mode: str) -> Tensor:
    """By the modes' names, one response at a time; each [B, R] per token, or [B] per response."""
    rows = [(row[m] if row.ndim else row.expand(int(m.sum()))) for row, m in zip(each, mask, strict=True)]
    n = mask.sum()
    if mode == "token-mean":
        return torch.cat(rows).sum() / n
    if mode == "token-sum":
        return torch.cat(rows).sum()
    if mode == "seq-mean-token-mean":
        return torch.stack([r.mean() for r in rows]).mean()
    mean = torch.stack([r.sum() for r in rows]).mean()
    return mean / mask.shape[1] if mode.endswith("norm") else mean


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["qarl", "triage"])
def test_every_aggregation_mode_gives_the_built_in_losss_terms(method: str, mode: str) -> None:
    for seed in range(3):
        b, mine = batch(seed), batch(seed)
        value, _, _ = called(method, b, mode, actor())
        value.backward()
        loss = make_loss(get_method(method).loss, TrainConfig(clip_low=0.2, clip_high=0.28))
        expected = aggregated(loss(mine).each, mine.mask, mode)
        expected.backward()
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(b.logprobs.grad, mine.logprobs.grad, rtol=1e-5, atol=1e-7)
        assert b.logprobs.grad.abs().sum() > 0


@pytest.mark.parametrize(("method", "mode"), [("qarl", "seq-mean-token-mean"), ("triage", "token-mean")])
def test_split_over_micro_batches_and_ranks_the_sum_is_the_trainers_own_loss(method: str, mode: str) -> None:
    """The built-in trainer divides by the mini-batch's tokens or responses; verl tells each micro-batch how many."""
    whole = batch()
    loss = make_loss(get_method(method).loss, TrainConfig(clip_low=0.2, clip_high=0.28))
    units = int(whole.mask.sum()) if loss.per == "token" else len(whole.mask)
    config, ranks = actor(), 2
    config.global_batch_info.update(dp_size=ranks, batch_num_tokens=int(whole.mask.sum()), global_batch_size=6)
    total = torch.zeros(())
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6)):
        part = TokenBatch(
            whole.logprobs[rows].detach(), whole.old_logprobs[rows], whole.rollout_logprobs[rows],
            whole.advantages[rows], whole.mask[rows],
        )  # fmt: skip
        total += called(method, part, mode, config)[0] / ranks  # FSDP averages over ranks
    torch.testing.assert_close(total, (loss(whole).loss / units).detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["quads", "resq", "qat", "trace"])
def test_grpo_with_verls_capped_weights_is_the_built_in_loss(method: str) -> None:
    b, cap = batch(), 1.5
    weights = (b.old_logprobs - b.rollout_logprobs).exp().clamp(max=cap)
    assert (weights[b.mask] == cap).any()
    value, _, beside = called(method, b, "token-mean", actor(), weights)
    config = TrainConfig(clip_low=0.2, clip_high=0.28, tis_cap=cap)
    terms = make_loss("grpo", config)(b)
    torch.testing.assert_close(value, terms.loss / b.mask.sum(), rtol=1e-5, atol=1e-7)
    assert not beside.called


def test_verls_own_clip_of_large_ratios_is_the_one_difference() -> None:
    """Its dual clip, beyond a ratio of 3 where the advantage is negative; a large clip_ratio_c takes it away."""
    b = token_batch(0, spread=0.1, moved=1.5)
    weights = (b.old_logprobs - b.rollout_logprobs).exp()
    terms = make_loss("grpo", TrainConfig(clip_low=0.2, clip_high=0.28))(b)
    expected = terms.loss / b.mask.sum()
    assert called("trace", b, "token-mean", actor(), weights)[0] < expected
    torch.testing.assert_close(called("trace", b, "token-mean", actor(clip_ratio_c=1e9), weights)[0], expected)


def test_weights_of_verls_correction_are_not_applied_a_second_time() -> None:
    b = batch()
    weights = torch.full_like(b.old_logprobs, 0.5)
    for method in ("qarl", "triage"):
        assert called(method, b, "token-mean", actor(), weights)[0] == called(method, b, "token-mean", actor())[0]


def test_figures_are_verls_names_and_the_losss_own() -> None:
    b = batch()
    _, figures, beside = called("qarl", b, "seq-mean-token-mean", actor())
    terms = make_loss("tbpo", TrainConfig())(b)
    assert figures["actor/pg_clipfrac"] == pytest.approx(float(terms.clipped.sum() / b.mask.sum()))
    moved = (b.old_logprobs - b.logprobs.detach())[b.mask].mean()
    assert figures["actor/ppo_kl"] == pytest.approx(float(moved), abs=1e-6)
    assert beside.sums == terms.sums


def test_nested_rollout_logprobs_are_padded_as_verl_pads_the_rest() -> None:
    b = batch()
    b.mask[:] = torch.arange(b.mask.shape[1]) < torch.tensor([[40], [3], [7], [1], [12], [39]])
    lengths = b.mask.sum(-1).tolist()
    rows = [row[:n] for row, n in zip(b.rollout_logprobs, lengths, strict=True)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    value = called("triage", b, "token-mean", actor(), rollout=nested)[0]
    assert value == called("triage", b, "token-mean", actor())[0]


# -- what is refused ----------------------------------------------------------------------------------------------


def config(loss: str = "vanilla", agg: str = "token-mean", bypass: bool = False) -> Any:
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": loss}, "loss_agg_mode": agg}},
            "algorithm": {"rollout_correction": {"bypass_mode": bypass}},
        }
    )


@pytest.mark.parametrize(
    ("method", "agg", "wanted"),
    [
        ("qarl", "token-mean", ("tracefp4_tbpo", "seq-mean-token-mean")),
        ("qarl", "token-sum", ("tracefp4_tbpo", "token-sum")),
        ("triage", "token-mean", ("tracefp4_triage", "token-mean")),
        ("quads", "token-mean", ("vanilla", "token-mean")),
        ("trace", "token-mean", ("vanilla", "token-mean")),
    ],
)
def test_the_method_chooses_the_loss(method: str, agg: str, wanted: tuple[str, str]) -> None:
    c = config(agg=agg)
    losses.select_loss(c, get_method(method))
    a = c.actor_rollout_ref.actor
    assert (a.policy_loss.loss_mode, a.loss_agg_mode) == wanted


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("qarl", {"loss": "gspo"}, "method qarl has a loss of its own, tracefp4_tbpo; leave .*loss_mode at vanilla"),
        ("trace", {"loss": "tracefp4_tbpo"}, "loss_mode=tracefp4_tbpo is not the loss of method trace"),
        ("triage", {"bypass": True}, r"rollout_correction\.bypass_mode=False"),
    ],
)
def test_a_loss_that_does_not_fit_the_method_is_refused(method: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(TracefpError, match=words):
        losses.select_loss(config(**given), get_method(method))


def test_another_loss_of_verl_may_stand_under_a_method_without_its_own() -> None:
    c = config(loss="gspo")
    assert losses.select_loss(c, get_method("trace")) == ""
    assert c.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"


def call(loss: str, method: str | None, advantages: Tensor | None = None, rollout: bool = True) -> None:
    b = batch()
    arguments = (
        b.old_logprobs,
        b.logprobs,
        b.advantages[:, None] * b.mask if advantages is None else advantages,
        b.mask,
    )
    if method is None:
        losses.policy_loss(loss, *arguments, config=actor())
        return
    with losses.beside(settings(method), b.rollout_logprobs if rollout else None):
        losses.policy_loss(loss, *arguments, config=actor())


def test_calls_that_would_be_silently_wrong_raise() -> None:
    with pytest.raises(TracefpError, match="tracefp4_tbpo runs in the engines of tracefp4 alone"):
        call("tbpo", None)
    with pytest.raises(TracefpError, match=r"method qat trains by .*loss_mode=vanilla, not tracefp4_triage"):
        call("triage", "qat")
    with pytest.raises(TracefpError, match=r"rollout\.calculate_log_probs=True"):
        call("tbpo", "qarl", rollout=False)
    with pytest.raises(TracefpError, match=r"one advantage a response.*adv_estimator=grpo"):
        call("tbpo", "qarl", advantages=torch.randn_like(batch().old_logprobs))
