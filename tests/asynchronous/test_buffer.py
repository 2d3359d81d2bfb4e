"""Staleness: what is admitted, what is handed out, what is dropped."""

from __future__ import annotations

import random

import pytest

from fake_workers import trajectory
from tracefp4.asynchronous.buffer import Group, GroupBuffer, OnStale


def group(index: int, *versions: int) -> Group:
    return Group(index, [trajectory(index, list(versions) or [0])])


def test_a_groups_lag_is_that_of_its_oldest_sampled_token() -> None:
    g = Group(0, [trajectory(0, [4, 5]), trajectory(0, [3, -1, 5])])
    g.trajectories[1].sampled = g.trajectories[1].versions >= 0  # a tool's token has version -1
    assert g.oldest_version == 3


def test_admission_grows_with_the_version_and_with_what_was_dropped() -> None:
    buffer = GroupBuffer(4, 3)
    assert [buffer.admitted(v) for v in range(3)] == [16, 20, 24]
    for i in range(5):
        buffer.put(group(i, 0))
    buffer.on_stale = "drop"
    assert buffer.take(4) is None
    assert buffer.dropped == 5
    assert buffer.admitted(4) == 32 + 5


def test_oldest_first_and_only_whole_steps() -> None:
    buffer = GroupBuffer(2, 3)
    for index, version in ((3, 1), (0, 2), (1, 1)):
        buffer.put(group(index, version))
    taken = buffer.take(2)
    assert taken is not None
    assert [g.index for g in taken] == [1, 3]
    assert buffer.take(2) is None
    assert len(buffer) == 1


def test_wait_holds_the_step_for_a_group_that_would_be_too_old() -> None:
    buffer = GroupBuffer(1, 1)
    buffer.started(0, 0)
    buffer.put(group(1, 1))
    assert buffer.take(1) is None  # group 0 started at version 0 and must be part of the step at version 1
    buffer.put(group(0, 0, 1))
    taken = buffer.take(1)
    assert taken is not None
    assert [g.index for g in taken] == [0]


def test_without_unfinished_groups_no_step_waits() -> None:
    buffer = GroupBuffer(1, 1)
    for index in range(3):  # one more than is admitted
        buffer.put(group(index, 0))
    assert buffer.take(0) is not None


def test_drop_takes_what_is_there() -> None:
    buffer = GroupBuffer(1, 1, "drop")
    buffer.started(0, 0)
    buffer.put(group(1, 1))
    assert buffer.take(1) is not None
    buffer.put(group(0, 0, 1))
    buffer.put(group(2, 2))
    taken = buffer.take(2)
    assert taken is not None
    assert [g.index for g in taken] == [2]
    assert buffer.dropped == 1


def test_an_aborted_group_counts_once_and_makes_room_for_another() -> None:
    buffer = GroupBuffer(1, 1, "drop")
    buffer.started(0, 0)
    buffer.started(1, 0)
    buffer.aborted(0, 7)
    buffer.aborted(0, 7)
    assert (buffer.dropped, buffer.wasted_tokens, buffer.unfinished()) == (1, 7, [1])
    assert buffer.admitted(0) == 2 + 1
    buffer.put(group(1, 0, 0, 0))
    assert buffer.take(2) is None  # finished, and too old by now
    assert (buffer.dropped, buffer.wasted_tokens) == (2, 10)


def test_a_group_made_twice_counts_once() -> None:
    buffer = GroupBuffer(2, 3)
    buffer.put(group(0, 0))
    buffer.put(group(0, 1))
    assert len(buffer) == 1
    assert buffer.take(0) is None


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize("max_version_diff", [0, 1, 3])
def test_no_schedule_exceeds_the_bound_and_waiting_drops_nothing(on_stale: OnStale, max_version_diff: int) -> None:
    """Random durations and restarts: the lag of everything taken stays within the bound, and the run never stalls."""
    for seed in range(8):
        chance = random.Random(seed)
        buffer = GroupBuffer(3, max_version_diff, on_stale)
        version, nxt, running = 0, 0, {}
        for _ in range(1000):
            while len(running) < 5 and nxt < buffer.admitted(version):
                running[nxt] = (version, chance.choice([1, 2, 3, 30]))
                buffer.started(nxt, version)
                nxt += 1
            for index, (began, left) in list(running.items()):
                running[index] = (began, left - 1)
                if left == 1:
                    buffer.put(group(index, began, version))
                    del running[index]
            if chance.random() < 0.6:
                taken = buffer.take(version)
                if taken is not None:
                    assert len(taken) == 3
                    assert all(0 <= version - g.oldest_version <= max_version_diff for g in taken)
                    version += 1
        assert version > 20
        assert buffer.dropped == 0 or on_stale == "drop"
