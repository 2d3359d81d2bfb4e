"""GRPO with TIS against a loop over tokens in FP64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tracefp4.train.losses import LossTerms, grpo_loss

LOW, HIGH, CAP = 0.2, 0.28, 5.0
B, T = 6, 9


def inputs(seed: int = 0) -> dict[str, Any]:
    """Log-probs far enough apart that every branch occurs, FP64."""
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(B, T, generator=g, dtype=torch.float64) * 5 - 0.1
    old = rollout + torch.randn(B, T, generator=g, dtype=torch.float64)
    new = old + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64)
    return {
        "logprobs": new.requires_grad_(),
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "advantages": torch.randn(B, generator=g, dtype=torch.float64),
        "mask": torch.rand(B, T, generator=g) < 0.6,
    }


def loss_of(given: dict[str, Any], bypass: bool = False) -> LossTerms:
    return grpo_loss(**given, clip_low=LOW, clip_high=HIGH, tis_cap=CAP, bypass=bypass)


def by_hand(given: dict[str, Any], bypass: bool) -> tuple[float, Tensor, int]:
    """(loss, gradient, clipped tokens), one token at a time; the gradient from the formula, not from autograd."""
    loss, gradient, clipped = 0.0, torch.zeros(B, T, dtype=torch.float64), 0
    for b in range(B):
        A = float(given["advantages"][b])
        for t in range(T):
            if not given["mask"][b, t]:
                continue
            new, old, mu = (given[k][b, t].item() for k in ("logprobs", "old_logprobs", "rollout_logprobs"))
            w = 1.0 if bypass else min(math.exp(old - mu), CAP)
            r = math.exp(new - (mu if bypass else old))
            beyond = r > 1 + HIGH if A > 0 else r < 1 - LOW
            if beyond:
                clipped += 1
                loss -= w * A * (1 + HIGH if A > 0 else 1 - LOW)
            else:
                loss -= w * A * r
                gradient[b, t] = -w * A * r
    return loss, gradient, clipped


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient(seed: int, bypass: bool) -> None:
    given = inputs(seed)
    terms = loss_of(given, bypass)
    terms.loss.backward()
    loss, gradient, clipped = by_hand(given, bypass)
    assert terms.loss.item() == pytest.approx(loss, rel=1e-10)
    torch.testing.assert_close(given["logprobs"].grad, gradient, rtol=1e-10, atol=1e-12)
    assert int(terms.clipped.sum()) == clipped > 0
    assert not (terms.clipped & ~given["mask"]).any()
    assert (gradient != 0).sum() > 0


def one(A: float, ratio: float, weight: float = 1.0) -> tuple[float, float]:
    """(loss, gradient) of a single token."""
    new = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    rollout = torch.tensor([[-1.0 - math.log(weight)]])
    terms = grpo_loss(new, torch.tensor([[-1.0]]), rollout, torch.tensor([A]), mask, LOW, HIGH, CAP)
    terms.loss.backward()
    return terms.loss.item(), new.grad.item()


@pytest.mark.parametrize(
    ("A", "ratio", "loss", "gradient"),
    [
        (2.0, 1.1, -2.2, -2.2),
        (2.0, 1.5, -2.56, 0.0),  # above the band and wanted: clipped
        (2.0, 0.5, -1.0, -1.0),  # below the band and wanted: not clipped
        (-2.0, 0.9, 1.8, 1.8),
        (-2.0, 0.5, 1.6, 0.0),  # below the band and unwanted: clipped
        (-2.0, 3.0, 6.0, 6.0),  # above the band and unwanted: not clipped
        (0.0, 3.0, 0.0, 0.0),
    ],
)
def test_clip_branches(A: float, ratio: float, loss: float, gradient: float) -> None:
    assert one(A, ratio) == pytest.approx((loss, gradient), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("weight", "used"), [(0.5, 0.5), (4.9, 4.9), (5.1, 5.0), (1000.0, 5.0)])
def test_importance_weight_is_truncated_above_only(weight: float, used: float) -> None:
    assert one(1.0, 1.0, weight) == pytest.approx((-used, -used), rel=1e-4)


@pytest.mark.parametrize("bypass", [False, True])
def test_no_gradient_through_the_other_log_probs(bypass: bool) -> None:
    given = inputs()
    others = [given[k].requires_grad_() for k in ("old_logprobs", "rollout_logprobs")]
    terms = loss_of(given, bypass)
    assert not any(x.requires_grad for x in (terms.weight, terms.ratio, terms.clipped))
    # In the trainer these carry no graph; the weight must be constant even where they would.
    terms.loss.backward()
    reference = others[1] if bypass else others[0]
    assert reference.grad is not None
    torch.testing.assert_close(reference.grad, -given["logprobs"].grad)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bypass", [False, True])
def test_masked_tokens_have_no_influence(poison: float, bypass: bool) -> None:
    clean, dirty = inputs(), inputs()
    for name in ("logprobs", "old_logprobs", "rollout_logprobs"):
        dirty[name] = torch.where(dirty["mask"], dirty[name].detach(), poison)
    dirty["logprobs"].requires_grad_()
    terms = [loss_of(clean, bypass), loss_of(dirty, bypass)]
    for t in terms:
        t.loss.backward()
    assert torch.equal(terms[0].loss, terms[1].loss)
    assert torch.equal(clean["logprobs"].grad, dirty["logprobs"].grad)
    assert (dirty["logprobs"].grad[~dirty["mask"]] == 0).all()
    for field in ("ratio", "weight"):
        assert torch.isfinite(getattr(terms[1], field)).all()


def test_nothing_masked_in_is_zero_with_zero_gradient() -> None:
    given = inputs()
    given["mask"] = torch.zeros(B, T, dtype=torch.bool)
    terms = loss_of(given)
    terms.loss.backward()
    assert terms.loss.item() == 0
    assert (given["logprobs"].grad == 0).all()
