"""The distance between two policies, on numbers worked out by hand."""

import math

import pytest
import torch

from tracefp4.align.metrics import importance_metrics, mismatch_metrics


def test_mismatch_values_and_aliases() -> None:
    """delta = ln 2.5, -ln 4, 0: ratios 5/2, 1/4, 1."""
    rollout = torch.tensor([-3.0, -2.0, -1.0], dtype=torch.float64)
    delta = torch.tensor([math.log(2.5), -math.log(4), 0.0], dtype=torch.float64)
    k1 = -(math.log(2.5) - math.log(4)) / 3
    k3 = (2.5 + 0.25 + 1) / 3 + k1 - 1
    size = (math.log(2.5) + math.log(4)) / 3
    want = {
        "mismatch/logprob_abs_diff_mean": size,
        "mismatch/logprob_abs_diff_max": math.log(4),
        "mismatch/kl_k1": k1,
        "mismatch/kl_k3": k3,
        "mismatch/mult_prob_error": (2.5 + 4 + 1) / 3,
        "mismatch/extreme_token_frac": 2 / 3,
        "rollout_corr/kl": k1,
        "rollout_corr/k3_kl": k3,
        "train_rollout_logprob_abs_diff": size,
        "token_mult_prob_error": (2.5 + 4 + 1) / 3,
    }
    assert mismatch_metrics(rollout + delta, rollout) == pytest.approx(want, rel=1e-12)


def test_direction_is_train_minus_rollout() -> None:
    """KL(rollout || train) on rollout's samples is positive where the trainer finds them less likely."""
    m = mismatch_metrics(torch.tensor([-2.0]), torch.tensor([-1.5]))
    assert m["mismatch/kl_k1"] == 0.5
    assert m["mismatch/kl_k3"] == pytest.approx(math.exp(-0.5) + 0.5 - 1, rel=1e-12)


def test_extreme_is_beyond_a_factor_of_two() -> None:
    ratios = torch.tensor([1.99, 2.01, 1 / 1.99, 1 / 2.01], dtype=torch.float64)
    assert mismatch_metrics(ratios.log(), torch.zeros(4))["mismatch/extreme_token_frac"] == 0.5


def test_small_differences_keep_their_digits() -> None:
    """k3 of 1e-4 is 5e-9: FP32 arithmetic would return 0 or noise."""
    delta = torch.full((1000,), 1e-4)
    m = mismatch_metrics(delta, torch.zeros(1000))
    assert m["mismatch/kl_k3"] == pytest.approx(5e-9, rel=1e-3)


def test_equal_policies() -> None:
    x = torch.randn(50)
    m = mismatch_metrics(x, x)
    assert m.pop("mismatch/mult_prob_error") == m.pop("token_mult_prob_error") == 1
    assert set(m.values()) == {0.0}


def test_shapes() -> None:
    assert mismatch_metrics(torch.zeros(0), torch.zeros(0)) == {}
    assert importance_metrics(torch.zeros(0), 5.0) == {}
    with pytest.raises(ValueError, match=r"\(3,\), \(2,\)"):
        mismatch_metrics(torch.zeros(3), torch.zeros(2))


def test_importance_values() -> None:
    """w = 1, 2, 10; truncated 1, 2, 5: ess 8^2 / (3 * 30) and 13^2 / (3 * 105)."""
    m = importance_metrics(torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64).log(), cap=5.0)
    want = {
        "tis/mean": 8 / 3,
        "tis/max": 5.0,
        "tis/max_untruncated": 10.0,
        "tis/clip_frac": 1 / 3,
        "tis/ess": 64 / 90,
        "tis/ess_untruncated": 169 / 315,
    }
    assert m == pytest.approx(want, rel=1e-12)


def test_ess_of_equal_and_of_degenerate_weights() -> None:
    assert importance_metrics(torch.full((7,), 0.3), 5.0)["tis/ess_untruncated"] == pytest.approx(1, rel=1e-12)
    one_rules = torch.tensor([50.0] + [0.0] * 9)
    assert importance_metrics(one_rules, 5.0)["tis/ess_untruncated"] == pytest.approx(0.1, rel=1e-6)


def test_where_extreme_tokens_are() -> None:
    """Three in one response, or one in each of three; a token just below 2x is none."""
    rollout = torch.zeros(9)

    def where(train: list[float], tokens: list[int]) -> tuple[float, float]:
        facts = mismatch_metrics(torch.tensor(train), rollout, tokens)
        return facts["mismatch/extreme_response_frac"], facts["mismatch/extreme_tokens_max"]

    assert where([0, 3.0, -2, 9, 0, 0, 0, 0, 0.693], [1, 3, 0, 2, 3]) == (1 / 5, 3)
    assert where([-1.0, 0, 0, 1, 0, 0, 0, 0, 1], [1, 3, 2, 3]) == (3 / 4, 1)
    assert mismatch_metrics(rollout[:0], rollout[:0], [0, 0]) == {}
    assert "mismatch/extreme_tokens_max" not in mismatch_metrics(rollout, rollout)
    with pytest.raises(ValueError, match="9 log-probs of responses with 8 tokens"):
        mismatch_metrics(rollout, rollout, [8])
