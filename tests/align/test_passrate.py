"""Pass rates against closed forms, enumeration and simulation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tracefp4.align import passrate
from tracefp4.align.passrate import cluster_mean, paired_difference, pass_at_k, pass_rates, wilson


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_pass(n: int) -> None:
    for correct in range(n + 1):
        outcome = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(outcome, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased() -> None:
    rng = np.random.default_rng(0)
    p, n, k = 0.3, 6, 3
    draws = (rng.random((20_000, n)) < p).sum(1)
    mean = np.mean([pass_at_k(n, int(c), k) for c in draws])
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=0.01)


@pytest.mark.parametrize(("n", "correct", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_refuses_what_makes_no_sense(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, correct, k)


def test_wilson_is_the_published_interval() -> None:
    """0 of 10, 1 of 10 and 5 of 10 at 95 %: (0, .2775), (.0179, .4042), (.2366, .7634)."""
    for passed, low, high in ((0, 0.0, 0.2775), (1, 0.0179, 0.4042), (5, 0.2366, 0.7634), (10, 0.7225, 1.0)):
        got = wilson(passed, 10)
        assert (got.low, got.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
        assert got.low <= got.value <= got.high


def test_intervals_cover() -> None:
    """The bootstrap over problems covers the true rate in about 95 of 100 experiments, samples being correlated."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        rates = rng.beta(2, 3, 80)  # mean .4
        rewards = (rng.random((80, 4)) < rates[:, None]).astype(float)
        got = pass_rates(rewards).avg
        covered += got.low <= 0.4 <= got.high
    assert 180 <= covered <= 199


def test_samples_of_one_problem_are_no_independent_draws() -> None:
    """Copies of a sample add nothing: the interval stays as wide."""
    rng = np.random.default_rng(2)
    rewards = (rng.random((50, 1)) < 0.5).astype(float)
    once, copied = pass_rates(rewards).avg, pass_rates(np.repeat(rewards, 16, axis=1)).avg
    assert (copied.high - copied.low) == pytest.approx(once.high - once.low, rel=0.15)


def test_rates_of_a_small_table() -> None:
    rewards = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    got = pass_rates(rewards, (1, 2, 4))
    assert (got.problems, got.samples) == (3, 4)
    assert got.avg.value == pytest.approx(0.5)
    assert got.at_k[1].value == pytest.approx(0.5)
    assert got.at_k[2].value == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert got.at_k[4].value == pytest.approx(2 / 3)


def test_partial_credit_counts_in_avg_and_is_no_pass() -> None:
    got = pass_rates(np.array([[0.5], [1.0]]))
    assert got.avg.value == 0.75
    assert got.at_k[1].value == 0.5


def test_a_paired_difference_is_tighter_than_two_intervals() -> None:
    rng = np.random.default_rng(3)
    rates = rng.beta(1, 1, 200)
    a = (rng.random((200, 8)) < rates[:, None]).astype(float)
    b = (rng.random((200, 8)) < np.clip(rates - 0.05, 0, 1)[:, None]).astype(float)
    both = paired_difference(a, b)
    apart = pass_rates(a).avg, pass_rates(b).avg
    assert both.low < 0.05 < both.high
    assert both.high - both.low < 0.7 * sum(e.high - e.low for e in apart)


@pytest.mark.parametrize("bad", [np.zeros((0, 2)), np.zeros(3), np.array([[np.nan]])])
def test_what_is_no_table_of_rewards_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="finite rewards"):
        pass_rates(bad)
    with pytest.raises(ValueError, match="same problems"):
        paired_difference(np.zeros((2, 1)), np.zeros((3, 1)))
    with pytest.raises(ValueError, match="at least one problem"):
        cluster_mean(np.zeros(0))


@pytest.mark.parametrize("problems", [1, 7, 300])
@pytest.mark.parametrize("at_once", [1, 50, 1001, 10**9])
def test_a_bootstrap_in_parts_is_the_same(problems: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory does not grow with the problems, nor do its draws depend on the parts."""
    figures = np.random.default_rng(1).random(problems)
    draws = np.random.default_rng(3).integers(0, problems, (passrate.RESAMPLES, problems))
    low, high = np.quantile(figures[draws].mean(1), [(1 - 0.95) / 2, (1 + 0.95) / 2])
    monkeypatch.setattr(passrate, "DRAWS_AT_ONCE", at_once)
    assert cluster_mean(figures, seed=3) == passrate.Estimate(float(figures.mean()), float(low), float(high))
