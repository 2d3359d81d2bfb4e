"""TBPO against a loop over responses in FP64, against PPO on single tokens, and branch by branch."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from token_batches import B, T, single, token_batch
from tracefp4.train.losses import TokenBatch, grpo_loss, tbpo_loss

LOW, HIGH = 0.03, 0.04


def by_hand(batch: TokenBatch, reference_length: int, bypass: bool) -> tuple[float, Tensor, int]:
    """(loss, gradient, dropped responses), one response at a time; the gradient from the formula."""
    loss, gradient, dropped = 0.0, torch.zeros(B, T, dtype=torch.float64), 0
    for b in range(B):
        tokens = [t for t in range(T) if batch.mask[b, t]]
        n, A = len(tokens), float(batch.advantages[b])
        new, old, mu = (
            sum(float(x.detach()[b, t]) for t in tokens) / n
            for x in (batch.logprobs, batch.old_logprobs, batch.rollout_logprobs)
        )
        r = math.exp(new - (mu if bypass else old))
        w = 1.0 if bypass else math.exp(old - mu)
        wider = max(1.0, math.sqrt(reference_length / n)) if reference_length else 1.0
        low, high = 1 - LOW * wider, 1 + HIGH * wider
        clipped = min(max(r, low), high)
        outside = r > high if A > 0 else clipped != r
        loss -= w * (min(r * A, clipped * A) if A > 0 else clipped * A)
        dropped += outside
        if not outside:
            for t in tokens:
                gradient[b, t] = -w * A * r / n
    return loss, gradient, dropped


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("reference_length", [0, 100])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient(seed: int, reference_length: int, bypass: bool) -> None:
    batch = token_batch(seed, spread=0.05, moved=0.2)
    terms = tbpo_loss(batch, LOW, HIGH, reference_length, bypass)
    terms.loss.backward()
    loss, gradient, dropped = by_hand(batch, reference_length, bypass)
    assert terms.loss.item() == pytest.approx(loss, rel=1e-10)
    torch.testing.assert_close(batch.logprobs.grad, gradient, rtol=1e-10, atol=1e-12)
    count, responses = terms.sums["tbpo/dropped_share"]
    assert (int(count), int(responses)) == (dropped, B)
    assert int(terms.clipped.any(-1).sum()) == dropped


def test_seeds_show_dropped_and_kept_responses_of_both_signs() -> None:
    shares = [tbpo_loss(token_batch(s, spread=0.05, moved=0.2), LOW, HIGH).sums for s in range(3)]
    for sign in ("positive", "negative"):
        dropped, of = (sum(float(s[f"tbpo/dropped_share_{sign}"][i]) for s in shares) for i in (0, 1))
        assert 0 < dropped < of


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.1, 1.5])
@pytest.mark.parametrize("A", [1.5, -1.5])
def test_a_response_of_one_token_is_ppo(A: float, ratio: float) -> None:
    """For A > 0 with its clip; for A < 0 with the other side clipped too, where PPO has none."""
    new = [math.log(ratio) - 1.0]
    ours, theirs = (single(new, [-1.2], A, old=[-1.0]) for _ in range(2))
    tbpo = tbpo_loss(ours, 0.2, 0.3)
    b = theirs
    ppo = grpo_loss(
        b.logprobs, b.old_logprobs, b.rollout_logprobs, b.advantages, b.mask, clip_low=0.2, clip_high=0.3, tis_cap=1e9
    )
    tbpo.loss.backward()
    ppo.loss.backward()
    if A > 0 or ratio <= 1.3:
        assert tbpo.loss.item() == pytest.approx(ppo.loss.item(), rel=1e-12)
        torch.testing.assert_close(ours.logprobs.grad, theirs.logprobs.grad)
    else:
        assert theirs.logprobs.grad.item() > 0 == ours.logprobs.grad.item()


@pytest.mark.parametrize(
    ("A", "ratio", "loss", "gradient"),
    [
        (2.0, 1.1, -2.2, -2.2),
        (2.0, 1.5, -2.6, 0.0),  # above and wanted: dropped
        (2.0, 0.5, -1.0, -1.0),  # below and wanted: kept
        (-2.0, 1.1, 2.2, 2.2),
        (-2.0, 0.5, 1.6, 0.0),  # below and unwanted: dropped
        (-2.0, 3.0, 2.6, 0.0),  # above and unwanted: dropped, the dual clip
    ],
)
def test_branches(A: float, ratio: float, loss: float, gradient: float) -> None:
    step = math.log(ratio)  # all tokens moved by the same, so the geometric mean is the ratio itself
    batch = single([-1.0 + step, -2.0 + step], [-1.0, -2.0], A, old=[-1.0, -2.0])
    terms = tbpo_loss(batch, 0.2, 0.3)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(batch.logprobs.grad, torch.full((1, 2), gradient / 2, dtype=torch.float64))


def test_shorter_responses_have_a_wider_band() -> None:
    """The band grows by sqrt(reference / length), and never shrinks."""
    for length, wider in ((1, 8.0), (16, 2.0), (64, 1.0), (256, 1.0)):
        for factor, dropped in ((0.99, 0.0), (1.01, 1.0)):
            ratio = 1 + factor * 0.01 * wider
            batch = single([math.log(ratio)] * length, [0.0] * length, 1.0, old=[0.0] * length)
            share = tbpo_loss(batch, 0.005, 0.01, reference_length=64).sums["tbpo/dropped_share"]
            assert float(share[0]) == dropped, (length, factor)


def test_the_weight_is_a_constant_geometric_mean() -> None:
    batch = single([-1.0, -1.0], [-1.5, -1.1], 1.0)
    terms = tbpo_loss(batch, 0.2, 0.3)
    torch.testing.assert_close(terms.weight, torch.full((1, 2), math.exp(0.3), dtype=torch.float64))
    terms.loss.backward()
    torch.testing.assert_close(batch.logprobs.grad, torch.full((1, 2), -math.exp(0.3) / 2, dtype=torch.float64))


def test_numerical_gradient() -> None:
    batch = token_batch(3, spread=0.05, moved=0.01)
    assert torch.autograd.gradcheck(
        lambda x: tbpo_loss(replace(batch, logprobs=x), 0.3, 0.4).loss, (batch.logprobs,), eps=1e-6
    )


def test_a_response_without_sampled_tokens_counts_for_nothing() -> None:
    batch = token_batch(0)
    mask = batch.mask.clone()
    mask[2] = False
    terms = tbpo_loss(replace(batch, mask=mask), LOW, HIGH)
    terms.loss.backward()
    assert int(terms.sums["tbpo/dropped_share"][1]) == B - 1
    assert (batch.logprobs.grad[2] == 0).all()
    keep = [0, 1, 3, 4, 5]
    rest = TokenBatch(
        *(x[keep] for x in (batch.logprobs, batch.old_logprobs, batch.rollout_logprobs)),
        batch.advantages[keep],
        mask[keep],
    )
    assert terms.loss.item() == pytest.approx(tbpo_loss(rest, LOW, HIGH).loss.item(), rel=1e-12)
