"""Score Centering: zero mean under the rollout, the formula by hand, and the estimators it reduces to."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tracefp4.train.losses import TokenBatch, score_centering_loss

V, CAP = 12, 2.0


def distributions(seed: int = 0, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """(trainer's logits with gradient [V], the rollout's log-probs [V]), FP64, ratios on both sides of the cap."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=g, dtype=torch.float64)
    rollout = torch.log_softmax(logits + spread * torch.randn(V, generator=g, dtype=torch.float64), -1)
    return logits.requires_grad_(), rollout


def batch_of(logits: Tensor, rollout: Tensor, token: int, k: int, advantage: float = 1.0) -> TokenBatch:
    log_p = torch.log_softmax(logits, -1)
    top, ids = rollout.topk(k)
    p_y, q_y = (x[token].reshape(1, 1) for x in (log_p, rollout))
    mask = torch.ones(1, 1, dtype=torch.bool)
    A = torch.tensor([advantage], dtype=torch.float64)
    return TokenBatch(p_y, p_y.detach(), q_y, A, mask, log_p[ids].reshape(1, 1, k), top.reshape(1, 1, k))


def gradient(logits: Tensor, rollout: Tensor, token: int, k: int, cap: float, advantage: float = 1.0) -> Tensor:
    loss = score_centering_loss(batch_of(logits, rollout, token, k, advantage), cap).loss
    return torch.autograd.grad(loss, logits)[0]


def expected_gradient(logits: Tensor, rollout: Tensor, k: int, cap: float) -> Tensor:
    """Over y drawn from the rollout."""
    q = rollout.exp()
    return torch.stack([q[y] * gradient(logits, rollout, y, k, cap) for y in range(V)]).sum(0)


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_is_zero_with_the_whole_vocabulary(seed: int) -> None:
    logits, rollout = distributions(seed)
    mean = expected_gradient(logits, rollout, V, CAP)
    torch.testing.assert_close(mean, torch.zeros(V, dtype=torch.float64), rtol=0, atol=1e-12)


def test_truncation_alone_has_a_mean() -> None:
    """The control: without the centre the same expectation is far from zero."""
    logits, rollout = distributions()
    p, q = torch.log_softmax(logits, -1), rollout.exp()
    plain = -(q * (p.detach() - rollout).exp().clamp(max=CAP) * p).sum()
    assert torch.autograd.grad(plain, logits)[0].abs().max() > 0.05


@pytest.mark.parametrize("k", [1, 4, 8])
def test_the_mean_is_zero_where_the_tail_has_one_ratio(k: int) -> None:
    """The head's part is exact, the tail's by its mass: exact too where p / q is the same for all of it."""
    logits, rollout = distributions(1)
    ids = rollout.topk(k).indices
    head = torch.zeros(V, dtype=torch.bool).scatter(0, ids, True)
    with torch.no_grad():
        p_head = torch.log_softmax(logits, -1).exp()[head]
        tail = rollout.exp()[~head] * (1 - p_head.sum()) / rollout.exp()[~head].sum()
        p = torch.empty(V, dtype=torch.float64)
        p[head], p[~head] = p_head, tail
    own = p.log().requires_grad_()
    for cap in (1.0, 1.3, CAP, 50.0):
        mean = expected_gradient(own, rollout, k, cap)
        torch.testing.assert_close(mean, torch.zeros(V, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_head_leaves_less_of_the_mean_than_none() -> None:
    logits, rollout = distributions(2)
    p, q = torch.log_softmax(logits, -1), rollout.exp()
    plain = -(q * (p.detach() - rollout).exp().clamp(max=CAP) * p).sum()
    without = torch.autograd.grad(plain, logits)[0].norm()
    with_head = [expected_gradient(logits, rollout, k, CAP).norm() for k in (4, 8, V)]
    assert with_head[0] < without
    assert with_head[2] < 1e-12


@pytest.mark.parametrize("k", [V, V - 3])
def test_without_a_cap_it_is_importance_sampled_reinforce(k: int) -> None:
    logits, rollout = distributions()
    for token in range(V):
        log_p = torch.log_softmax(logits, -1)[token]
        weighted = -0.7 * (log_p.detach() - rollout[token]).exp() * log_p
        torch.testing.assert_close(
            gradient(logits, rollout, token, k, 1e6, advantage=0.7), torch.autograd.grad(weighted, logits)[0]
        )


def test_between_equal_policies_it_is_reinforce() -> None:
    logits, _ = distributions()
    own = torch.log_softmax(logits.detach(), -1)
    for token in range(V):
        plain = -torch.log_softmax(logits, -1)[token]
        torch.testing.assert_close(gradient(logits, own, token, V, CAP), torch.autograd.grad(plain, logits)[0])


def test_the_formula_by_hand() -> None:
    """p = (.5, .3, .2), q = (.2, .2, .6), H = {2, 0}, C = 2, y = 0: f = 2, rho = .2 / .3, alpha = 1."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    q[0] += 1e-9  # which of the two is in the head
    batch = batch_of(p.log().requires_grad_(), q.log(), 0, 2, advantage=1.5)
    center = [0.2 - 0.2, 0.4 - 0.5]  # of v = 2 and v = 0
    want = -1.5 * (2 * math.log(0.5) - center[0] * math.log(0.2) - center[1] * math.log(0.5))
    terms = score_centering_loss(batch, CAP)
    assert terms.loss.item() == pytest.approx(want, rel=1e-7)
    shares = {name: float(a / b) for name, (a, b) in terms.sums.items()}
    assert shares["score_centering/truncated_share"] == 1
    assert shares["score_centering/head_mass_rollout"] == pytest.approx(0.8)
    assert shares["score_centering/head_mass_train"] == pytest.approx(0.7)
    assert shares["score_centering/alpha_mean"] == 1
    assert shares["score_centering/center_abs_mean"] == pytest.approx(0.1)


def test_alpha_is_bounded_by_the_tail() -> None:
    """p's tail .6, q's .1: rho = 1 / 6, alpha = 2 / 6."""
    p, q = torch.tensor([0.4, 0.6]).double(), torch.tensor([0.9, 0.1]).double()
    terms = score_centering_loss(batch_of(p.log().requires_grad_(), q.log(), 0, 1), CAP)
    assert float(terms.sums["score_centering/alpha_mean"][0]) == pytest.approx(1 / 3)


def test_masked_and_empty_positions_have_no_influence() -> None:
    logits, rollout = distributions()
    batch = batch_of(logits, rollout, 3, 4)
    poison = torch.full((1, 1), math.nan, dtype=torch.float64)
    empty = torch.full((1, 1, 4), -math.inf, dtype=torch.float64)
    assert batch.head_logprobs is not None
    assert batch.rollout_head_logprobs is not None
    padded = replace(
        batch,
        logprobs=torch.cat([batch.logprobs, poison], 1),
        rollout_logprobs=torch.cat([batch.rollout_logprobs, poison], 1),
        mask=torch.tensor([[True, False]]),
        head_logprobs=torch.cat([batch.head_logprobs, empty], 1),
        rollout_head_logprobs=torch.cat([batch.rollout_head_logprobs, empty], 1),
    )
    want, got = (score_centering_loss(b, CAP).loss for b in (batch, padded))
    assert got.item() == want.item()
    (a,), (b,) = (torch.autograd.grad(x, logits, retain_graph=True) for x in (want, got))
    assert torch.equal(a, b)


def test_a_batch_without_a_head_is_refused() -> None:
    logits, rollout = distributions()
    with pytest.raises(ValueError, match="needs the rollout's head"):
        score_centering_loss(replace(batch_of(logits, rollout, 0, 2), head_logprobs=None), CAP)
