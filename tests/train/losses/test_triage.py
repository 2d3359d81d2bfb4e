"""TRIAGE: gates and penalties by hand, and what is left of it where the paths agree."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from token_batches import single, token_batch
from tracefp4.config import ConfigError
from tracefp4.train.losses import TriageConfig, grpo_loss, triage_loss
from tracefp4.train.losses.triage import repair_penalty, triage_gate

CONFIG = TriageConfig()


def gate_of(delta: list[float], config: TriageConfig = CONFIG) -> list[float]:
    d = torch.tensor([delta], dtype=torch.float64)
    return triage_gate(d, torch.ones_like(d, dtype=torch.bool), config)[0].tolist()


@pytest.mark.parametrize(
    ("delta", "gates"),
    [
        ([-0.4, -0.4], [1.0, 1.0]),
        ([-0.6, -0.6], [0.3, 0.3]),
        ([-1.6, -1.6], [0.1, 0.1]),
        ([-0.5, -0.5], [1.0, 1.0]),  # not below
        ([-3.0, 1.0], [0.3, 1.0]),  # mean -1; only tokens with delta < 0
        ([-7.0] + [1.0] * 19, [0.55] + [1.0] * 19),  # mean .6, one far token: 1 - .9 / 2
        ([-7.0, -7.0] + [1.0] * 30, [0.1, 0.1] + [1.0] * 30),  # two: .1, and three no less
        ([-7.0, -7.0, -7.0] + [1.0] * 40, [0.1] * 3 + [1.0] * 40),
        ([-7.0, -0.1], [0.1, 0.1]),  # mean -3.55: the smaller of .1 and .55
    ],
)
def test_gate(delta: list[float], gates: list[float]) -> None:
    assert gate_of(delta) == pytest.approx(gates)


def test_segments_are_gated_by_themselves() -> None:
    delta = [-2.0] * 64 + [-0.1] * 64 + [-1.0] * 3
    assert gate_of(delta) == pytest.approx([0.1] * 64 + [1.0] * 64 + [0.3] * 3)


def test_segments_count_sampled_tokens() -> None:
    """An environment's tokens between those of the policy belong to no segment."""
    delta = torch.tensor([[-2.0, 9.0, 9.0, -2.0, 0.0, -0.1]], dtype=torch.float64)
    mask = torch.tensor([[True, False, False, True, True, True]])
    gate = triage_gate(delta, mask, TriageConfig(gate_segment=2))
    assert gate.tolist() == [[0.1, 1.0, 1.0, 0.1, 1.0, 1.0]]


def penalty_of(delta: list[float]) -> Tensor:
    d = torch.tensor([delta], dtype=torch.float64)
    return repair_penalty(d, torch.ones_like(d, dtype=torch.bool), CONFIG)[0]


def test_repair_penalty() -> None:
    """q = .1 with beta^2 = 5e-4: 5e-4 (sqrt(21) - 1); small q: about q^2 / 2."""
    assert penalty_of([-0.13, -0.13]).tolist() == pytest.approx([5e-4 * (math.sqrt(21) - 1)] * 2)
    assert penalty_of([-0.031])[0].item() == pytest.approx(0.001**2 / 2, rel=1e-3)
    assert penalty_of([-0.03, -0.03]).tolist() == [0.0, 0.0]
    assert penalty_of([0.5]).tolist() == [0.0]
    two = penalty_of([-0.13] * 128 + [0.0])
    assert two[127] > 0 == two[128]


def test_repair_pulls_the_trainer_up() -> None:
    """Per token of a segment: -coef q / sqrt(1 + (q / beta)^2), whatever the segment's length."""
    for n in (1, 5, 100):
        batch = single([-1.13] * n, [-1.0] * n, 1.0)
        zero = replace(batch, advantages=torch.full((1,), 1e-12, dtype=torch.float64))
        triage_loss(zero, CONFIG, 0.2, 0.28).loss.backward()
        want = -0.015 * 0.1 / math.sqrt(1 + 0.01 / 5e-4)
        torch.testing.assert_close(
            batch.logprobs.grad, torch.full((1, n), want, dtype=torch.float64), rtol=1e-6, atol=1e-10
        )


@pytest.mark.parametrize("bypass", [False, True])
def test_without_distance_it_is_grpo(bypass: bool) -> None:
    batch = token_batch(1, spread=0.0, moved=0.3)
    up = 0.5 * (batch.logprobs.detach() - batch.rollout_logprobs).abs()  # nothing to gate in bypass form, or to repair
    near = replace(batch, logprobs=(batch.rollout_logprobs + up).requires_grad_())
    other = replace(near, logprobs=near.logprobs.detach().clone().requires_grad_())
    ours = triage_loss(near, CONFIG, 0.2, 0.28, bypass)
    b = other
    grpo = grpo_loss(
        b.logprobs, b.old_logprobs, b.rollout_logprobs, b.advantages, b.mask, 0.2, 0.28, tis_cap=2.0, bypass=bypass
    )
    ours.loss.backward()
    grpo.loss.backward()
    assert ours.loss.item() == pytest.approx(grpo.loss.item(), rel=1e-12)
    torch.testing.assert_close(near.logprobs.grad, other.logprobs.grad)


def test_gate_and_weight_multiply_and_are_constant() -> None:
    batch = single([-2.0, -2.0], [-1.0, -1.0], -1.0)
    terms = triage_loss(batch, CONFIG, 0.2, 0.28)
    terms.loss.backward()
    weight = 0.3 * math.exp(-1.0)
    assert terms.weight.tolist() == [pytest.approx([weight, weight])]
    torch.testing.assert_close(batch.logprobs.grad, torch.full((1, 2), weight, dtype=torch.float64))
    up = triage_loss(single([-1.0], [-4.0], 1.0), CONFIG, 0.2, 0.28)
    assert up.weight.item() == 2.0
    shares = {name: float(a / b) if b else None for name, (a, b) in terms.sums.items()}
    assert shares["triage/gated_share"] == 1
    assert shares["triage/gate_mean_negative"] == pytest.approx(0.3)
    assert shares["triage/repaired_share"] == 0
    assert shares["triage/repair_mean_positive"] is None


def test_positive_responses_are_never_gated_and_negative_ones_never_repaired() -> None:
    far = [-9.0] * 4
    positive, negative = (triage_loss(single(far, [-1.0] * 4, A), CONFIG, 0.2, 0.28).sums for A in (1.0, -1.0))
    assert float(positive["triage/gated_share"][0]) == 0
    assert float(positive["triage/repaired_share"][0]) == 4
    assert float(negative["triage/repaired_share"][0]) == 0
    assert float(negative["triage/gated_share"][0]) == 4


def test_numerical_gradient() -> None:
    batch = token_batch(2, spread=0.5, moved=0.05)
    config = TriageConfig(gate_segment=5, repair_segment=7, repair_coef=1.0)
    assert torch.autograd.gradcheck(
        lambda x: triage_loss(replace(batch, logprobs=x), config, 0.4, 0.5).loss, (batch.logprobs,), eps=1e-7
    )


def test_masked_tokens_have_no_influence() -> None:
    clean = token_batch(4)
    dirty = replace(
        clean,
        **{
            name: torch.where(clean.mask, getattr(clean, name).detach(), math.nan)
            for name in ("logprobs", "old_logprobs", "rollout_logprobs")
        },
    )
    dirty.logprobs.requires_grad_()
    losses = [triage_loss(b, CONFIG, 0.2, 0.28).loss for b in (clean, dirty)]
    for loss in losses:
        loss.backward()
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(clean.logprobs.grad, dirty.logprobs.grad)


def test_thresholds_are_ordered() -> None:
    with pytest.raises((ConfigError, ValueError), match="severe_below must not lie above"):
        TriageConfig(severe_below=-0.1)
