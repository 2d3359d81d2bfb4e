"""Intervals of paired pass rates cover the truth at their rate or better, and the gate's errors hold."""

from __future__ import annotations

import numpy as np
import pytest

from tracefp4.errors import TracefpError
from tracefp4.gap.gate import Gate, Verdict, decide, parse_share
from tracefp4.gap.statistics import (
    BOOTSTRAP,
    ENOUGH,
    PER_INQUIRY,
    SCORE,
    bootstrap_interval,
    inquiries_needed,
    mcnemar,
    normal_quantile,
    paired,
    planned_inquiries,
    score_interval,
)

Z95 = normal_quantile(0.95)


def log_factorials(n: int) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])


def exact_misses(n: int, gain: float, loss: float, confidence: float) -> tuple[float, float]:
    """(probability that the interval lies above the truth, below it): summed over all outcomes."""
    spread = [7 * np.sqrt(n * p * (1 - p)) + 8 for p in (gain, loss)]
    b, c = np.meshgrid(
        *(
            np.arange(max(0, int(n * p - s)), min(n, int(n * p + s)) + 1)
            for p, s in zip((gain, loss), spread, strict=True)
        )
    )
    b, c = b[b + c <= n], c[b + c <= n]
    logs = log_factorials(n)
    likelihood = logs[n] - logs[b] - logs[c] - logs[n - b - c] + (n - b - c) * np.log1p(-gain - loss)
    for count, p in ((b, gain), (c, loss)):
        likelihood = likelihood + (count * np.log(p) if p > 0 else np.where(count > 0, -np.inf, 0.0))
    weight = np.exp(likelihood)
    assert weight.sum() == pytest.approx(1, abs=1e-6)
    keep = weight > 1e-9
    low, high = score_interval(b[keep], c[keep], n, normal_quantile(confidence))
    truth = gain - loss
    return float(weight[keep][low > truth + 1e-9].sum()), float(weight[keep][high < truth - 1e-9].sum())


@pytest.mark.parametrize("n", [50, 100, 500, 5000])
@pytest.mark.parametrize("drop", [0.0, 0.01, 0.05, 0.2])
def test_score_interval_covers_at_its_stated_rate(n: int, drop: float) -> None:
    for gain in (0.0, 0.005, 0.02, 0.1):
        if gain + drop and not (n == 5000 and gain + drop > 0.2):
            above, below = exact_misses(n, gain, gain + drop, 0.95)
            assert above + below <= 0.05 + 1e-6
            assert max(above, below) <= 0.025  # each of the gate's two errors, with the limit at the truth


def test_score_interval_covers_at_other_confidences() -> None:
    for confidence in (0.8, 0.9, 0.99):
        for n, gain, loss in ((50, 0.02, 0.07), (200, 0.01, 0.02), (200, 0.003, 0.053), (1000, 0.0, 0.02)):
            assert sum(exact_misses(n, gain, loss, confidence)) <= 1 - confidence + 1e-6


def test_score_interval_at_its_ends() -> None:
    low, high = score_interval(0, 0, 100, Z95)
    assert low == pytest.approx(-high)
    assert 0.03 < high < 0.06  # z^2 / (n + z^2), and the correction
    low, high = score_interval(0, 10, 10, Z95)
    assert low == -1
    assert -0.8 < high < 0
    fewer, more = score_interval([3.0, 30.0], [5.0, 50.0], [100, 1000], Z95)
    assert more[0] - fewer[0] > 2 * (more[1] - fewer[1])


def test_mcnemar_is_the_binomial_test() -> None:
    assert mcnemar(0, 0) == 1
    assert mcnemar(1, 5) == pytest.approx(2 * 7 / 64)
    assert mcnemar(4, 4) == 1
    assert mcnemar(700, 800) == pytest.approx(0.0106, abs=3e-4)  # beyond what integers sum quickly


def clusters(rng: np.random.Generator, n: int, k: int, drop: float, ambiguous: float) -> tuple[np.ndarray, np.ndarray]:
    """Passed [n, k] of two forms: a share of inquiries passes by chance, the serving form's chance lower there."""
    chance = np.where(rng.random(n) < ambiguous, rng.uniform(0.3, 0.95, n), 1.0)
    lower = np.where(chance < 1, chance - drop / ambiguous, 1.0)
    return rng.random((n, k)) < chance[:, None], rng.random((n, k)) < lower[:, None]


@pytest.mark.parametrize(
    ("n", "drop", "ambiguous"),
    [
        (50, 0, 0.1),
        (50, 0.05, 0.3),
        (100, 0.01, 0.1),
        (200, 0.05, 0.3),
        (500, 0.01, 0.1),
        (500, 0.2, 0.9),
        (2000, 0, 0.05),
    ],
)
def test_interval_of_several_samples_covers(n: int, drop: float, ambiguous: float) -> None:
    rng = np.random.default_rng(n + int(1000 * drop))
    trials, hits, methods = 200, 0, set()
    for _ in range(trials):
        train, serve = clusters(rng, n, 4, drop, ambiguous)
        found = paired(train, serve, 0.95)
        methods.add(found.method)
        hits += found.low <= -drop <= found.high
    assert hits / trials >= 0.95 - 2 * np.sqrt(0.95 * 0.05 / trials)
    assert methods <= {BOOTSTRAP, PER_INQUIRY}


def test_the_method_follows_the_data() -> None:
    rng = np.random.default_rng(0)
    train, serve = clusters(rng, 400, 4, 0.0, 0.9)
    assert paired(train, serve, 0.95).method == BOOTSTRAP
    assert paired(train[:, :1], serve[:, :1], 0.95).method == SCORE
    few = train.copy()
    few[: ENOUGH - 1, 0] ^= True
    assert paired(train, few, 0.95).method == PER_INQUIRY
    few[: ENOUGH + 1, 0] = ~train[: ENOUGH + 1, 0]
    assert paired(train, few, 0.95).method == BOOTSTRAP


def test_fallback_is_as_wide_as_one_sample_and_centred_on_all() -> None:
    train = np.ones((100, 4), dtype=bool)
    serve = train.copy()
    serve[:6, :2] = False
    found = paired(train, serve, 0.95)
    assert found.method == PER_INQUIRY
    assert found.value == pytest.approx(-0.03)
    assert (found.low, found.high) == pytest.approx(tuple(map(float, score_interval(0, 3, 100, Z95))))


def test_bootstrap_interval_grows_with_confidence_and_is_reproducible() -> None:
    each = np.random.default_rng(1).choice([-0.5, 0, 0.5], 300)
    narrow, wide = bootstrap_interval(each, 2, 0.8), bootstrap_interval(each, 2, 0.99)
    assert wide[0] < narrow[0] < each.mean() < narrow[1] < wide[1]
    assert bootstrap_interval(each, 2, 0.8) == narrow


def test_unequal_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="both forms"):
        paired(np.ones((3, 1), bool), np.ones((2, 1), bool), 0.95)


# -- the gate ---------------------------------------------------------------------------------------------------------


def outcomes(n: int, gained: int, lost: int) -> tuple[np.ndarray, np.ndarray]:
    train, serve = np.ones((n, 1), bool), np.ones((n, 1), bool)
    train[:gained], serve[gained : gained + lost] = False, False
    return train, serve


def test_gate_passes_fails_and_says_when_it_cannot_tell() -> None:
    gate = Gate(0.02)
    passed = decide(gate, *outcomes(2000, 10, 12), 0)
    assert passed.verdict is Verdict.PASS
    assert "at worst a drop of" in passed.reason
    failed = decide(gate, *outcomes(500, 0, 50), 0)
    assert failed.verdict is Verdict.FAIL
    undecided = decide(gate, *outcomes(50, 0, 0), 0)
    assert undecided.verdict is Verdict.UNDECIDED
    assert undecided.needed is not None
    assert 200 <= undecided.needed <= 700
    assert f"{undecided.needed:,}" in undecided.reason
    assert [int(v) for v in Verdict] == [0, 1, 2]


def test_needed_number_decides_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    gain, loss, gate = 0.03, 0.035, Gate(0.02)
    needed = inquiries_needed(*outcomes(1000, 30, 35), gate.max_drop, gate.confidence)
    assert needed is not None
    counts = rng.multinomial(needed, [gain, loss, 1 - gain - loss], 4000)
    low, high = score_interval(counts[:, 0], counts[:, 1], needed, Z95)
    decided = ((low > -gate.max_drop) | (high < -gate.max_drop)).mean()
    assert 0.77 <= decided <= 0.88


def test_a_drop_at_the_limit_can_never_be_decided() -> None:
    found = decide(Gate(0.02), *outcomes(100, 0, 2), 0)
    assert found.verdict is Verdict.UNDECIDED
    assert found.needed is None
    assert "no number would do" in found.reason


def test_planned_inquiries_grow_with_flips_and_shrink_with_the_limit() -> None:
    assert (
        planned_inquiries(0.02, 0.95, 0.0) < planned_inquiries(0.02, 0.95, 0.05) < planned_inquiries(0.01, 0.95, 0.05)
    )


@pytest.mark.parametrize(("drop", "right"), [(0.0, Verdict.PASS), (0.2, Verdict.FAIL)])
def test_gate_finds_clear_cases_at_several_samples(drop: float, right: Verdict) -> None:
    train, serve = clusters(np.random.default_rng(3), 2000, 4, drop, 0.8)
    assert decide(Gate(0.05), train, serve, 0).verdict is right


def test_missing_answers_that_could_turn_the_verdict_leave_it_open() -> None:
    pair = outcomes(2000, 10, 12)
    assert decide(Gate(0.02), *pair, missing=5).verdict is Verdict.PASS
    many = decide(Gate(0.02), *pair, missing=60)
    assert many.verdict is Verdict.UNDECIDED
    assert "60 inquiries lack" in many.reason
    bad = outcomes(500, 0, 50)
    assert decide(Gate(0.02), *bad, missing=5).verdict is Verdict.FAIL
    assert decide(Gate(0.02), *bad, missing=100).verdict is Verdict.UNDECIDED
    nothing = np.ones((0, 1), bool)
    assert decide(Gate(0.02), nothing, nothing, missing=3).verdict is Verdict.UNDECIDED


def test_shares_are_read_with_and_without_percent() -> None:
    assert parse_share("--max-drop", "2%", 0, 1) == parse_share("--max-drop", " 0.02 ", 0, 1) == 0.02
    for text in ("2", "two", "", "-1%", "nan"):
        with pytest.raises(TracefpError, match="--max-drop"):
            parse_share("--max-drop", text, 0, 1)
    with pytest.raises(TracefpError, match=r"did you mean 2%\?"):
        parse_share("--max-drop", "2", 0, 1)
