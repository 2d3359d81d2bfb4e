"""Standard errors, intervals, stability and collapse, against values worked out by hand."""

import numpy as np
import pytest

from tracefp4.reproduce.stats import (
    collapse_step,
    difference,
    mean_and_error,
    ratio,
    score,
    smoothed,
    stability,
    t95,
)


def test_mean_and_error() -> None:
    assert mean_and_error([1.0, 2.0, 3.0]) == {"mean": 2.0, "se": pytest.approx(1 / 3**0.5), "per_seed": [1, 2, 3]}
    assert mean_and_error([4.0]) == {"mean": 4.0, "se": None, "per_seed": [4.0]}


def test_t_quantiles() -> None:
    assert [t95(d) for d in (1, 2, 15, 16, 30, 99)] == [12.706, 4.303, 2.131, 2.120, 2.042, 1.960]
    with pytest.raises(ValueError, match="at least two values, got 1"):
        t95(0)


def test_a_score_of_one_seed_has_the_error_over_problems() -> None:
    rewards = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])  # problem means .5, 1, 0
    found = score([rewards])
    assert found["mean"] == pytest.approx(0.5)
    assert found["se"] == pytest.approx(0.5 / 3**0.5)
    several = score([rewards, rewards + 0.1])
    assert several["se"] == pytest.approx(0.05)
    assert several["se_problems"] == pytest.approx([found["se"], found["se"]])


def test_a_difference_over_seeds_is_students_t() -> None:
    theirs = [np.full((4, 2), 0.5)] * 3
    ours = [np.full((4, 2), 0.5 + d) for d in (0.1, 0.2, 0.3)]
    found = difference(ours, theirs)
    assert found["kind"] == "seeds"
    assert found["value"] == pytest.approx(0.2)
    assert found["high"] - found["value"] == pytest.approx(4.303 * 0.1 / 3**0.5)
    one = difference(ours[:1], theirs[:1])
    assert one["kind"] == "problems"
    assert (one["low"], one["value"], one["high"]) == pytest.approx((0.1, 0.1, 0.1))


def test_the_running_mean_looks_back_and_leaves_gaps_out() -> None:
    assert smoothed(np.array([1.0, 3.0, np.nan, 5.0]), 2).tolist() == [1.0, 2.0, 3.0, 5.0]


def curve(*parts: tuple[float, int]) -> np.ndarray:
    return np.concatenate([np.full(steps, value) for value, steps in parts])


def test_stability_of_a_control() -> None:
    stable = stability(curve((0.3, 50), (0.9, 150)))
    assert stable.stable
    assert stable.rise is not None
    assert 60 <= stable.rise <= 70
    sinks = stability(curve((0.3, 50), (0.9, 100), (0.7, 50)))
    assert not sinks.stable
    assert sinks.fall is not None
    assert 150 < sinks.fall < 170
    assert sinks.low == pytest.approx(0.7)
    assert not stability(curve((0.5, 200))).stable
    assert stability(curve((0.5, 200))).rise is None


def test_collapse_is_a_fall_below_half_of_the_best() -> None:
    assert collapse_step(curve((0.4, 50), (0.8, 100), (0.1, 50))) == 161  # .8 - .7 k / 20 < .4 from k = 12
    assert collapse_step(curve((0.4, 50), (0.8, 100), (0.5, 50))) is None
    assert collapse_step(curve((0.02, 50), (0.0, 50))) is None


def test_a_ratio_is_of_what_both_have() -> None:
    floor = {0: np.full(120, 2.0), 1: np.full(80, 1.0), 2: np.full(9, 1.0)}
    ours = {0: np.concatenate([np.full(60, 2.0), np.full(40, 6.0)]), 1: np.full(200, 3.0), 5: np.full(9, 100.0)}
    found = ratio(ours, floor)
    assert found is not None
    assert found["mean"] == pytest.approx((3.6 + 3.0) / (2.0 + 1.0))  # seed 0 to its step 99, seed 1 to 79
    assert found["worst"] == pytest.approx(3.0)
    ours[0][-50:] = 8.0
    assert ratio(ours, floor)["worst"] == pytest.approx(4.0)  # type: ignore[index]
    short = ratio({0: np.array([1.0, 3.0])}, {0: np.array([1.0, 1.0, 1.0])})
    assert short == {"mean": 2.0, "worst": 2.0}
    assert ratio(ours, {}) is None
    assert ratio({0: np.array([])}, floor) is None
    assert ratio({0: np.array([1.0, np.nan])}, floor) is None
    assert ratio({0: np.ones(2)}, {0: np.array([1.0, 0.0])}) is None
