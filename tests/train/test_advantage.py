"""Group-relative advantages."""

import math

import pytest
import torch

from tracefp4.train.advantage import assign_advantages
from tracefp4.types import Trajectory


def trajectory(name: str, group: int, reward: float) -> Trajectory:
    none = torch.zeros(1)
    return Trajectory(name, (1,), (2,), none, none, none, None, "stop", reward=reward, group=group)


def batch(*groups: tuple[float, ...]) -> list[Trajectory]:
    """Trajectories of several groups, interleaved."""
    out = [trajectory(f"g{g}/{i}", g, reward) for g, rewards in enumerate(groups) for i, reward in enumerate(rewards)]
    return out[::2] + out[1::2]


def test_values() -> None:
    """(R - mean) / (std + eps), std over the n samples: of (0, 0, 1, 3) the mean is 1 and the variance 1.5."""
    group = batch((0.0, 0.0, 1.0, 3.0))
    assert assign_advantages(group, eps=0.5) == group
    for t in group:
        assert t.advantage == pytest.approx((t.reward - 1) / (math.sqrt(1.5) + 0.5), rel=1e-12)


def test_groups_do_not_mix() -> None:
    alone = batch((0.0, 1.0, 1.0))
    together = batch((0.0, 1.0, 1.0), (5.0, 7.0))
    assign_advantages(alone)
    assign_advantages(together)
    by_name = {t.request_id: t.advantage for t in together}
    for t in alone:
        assert by_name[t.request_id] == t.advantage
    assert by_name["g1/0"] == pytest.approx(-1, rel=1e-5)
    assert by_name["g1/1"] == pytest.approx(1, rel=1e-5)


def test_groups_without_a_signal_are_skipped() -> None:
    """Equal rewards whose mean is not exactly them (.1 + .1 + .1 is not .3) are still equal."""
    trajectories = batch((0.1, 0.1, 0.1), (0.0, 1.0), (1.0,), (0.0, 0.0))
    kept = assign_advantages(trajectories)
    assert sorted(t.request_id for t in kept) == ["g1/0", "g1/1"]
    assert all(math.isfinite(t.advantage) for t in trajectories)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_raises(reward: float) -> None:
    with pytest.raises(ValueError, match=r"reward of g0/1 is (nan|inf|-inf)"):
        assign_advantages(batch((1.0, reward)))
