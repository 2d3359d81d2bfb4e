"""When a child counts as hung, without waiting for it: seconds are told, not spent."""

from __future__ import annotations

import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_workers
from fake_workers import FakeRun
from tracefp4.asynchronous import child, process
from tracefp4.asynchronous.channel import Channel
from tracefp4.asynchronous.messages import Alive, Evaluated, Failed, Finished, Published, Want, Weights
from tracefp4.asynchronous.process import TURN_SECONDS, Child, Patience
from tracefp4.asynchronous.supervisor import Supervisor
from tracefp4.loop import RunConfig


class Pair:
    """A child, and the end of its channel that its process would have."""

    def __init__(self, patience: Patience) -> None:
        here, there = multiprocessing.Pipe()
        self.child, self.process_side = Child("rollout", None, Channel(here), patience), Channel(there)  # type: ignore[arg-type]

    def says(self, message: Any, owes: bool = True) -> None:
        self.process_side.send(message)
        assert self.child.receive(owes) == message


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(Patience(start=100, hang=10))
    yield pair
    pair.child.channel.close()
    pair.process_side.close()


def test_the_first_work_may_take_longer(pair: Pair) -> None:
    pair.child.wait_on(100)
    assert pair.child.hangs is None
    pair.child.wait_on(1)
    assert pair.child.hangs == "showed no progress for 100 s (run.start_seconds)"
    pair.says(Want(0))  # the trainer is there, and has trained nothing yet
    pair.child.wait_on(100)
    assert pair.child.hangs is None


@pytest.mark.parametrize(
    "work", [Alive(), Finished(fake_workers.Group(0, [])), Evaluated("start", 0.5), Published(Weights(1, ""))]
)
def test_after_work_the_shorter_limit_holds_and_every_sign_starts_it_anew(pair: Pair, work: Any) -> None:
    pair.says(work)
    for _ in range(5):
        pair.child.wait_on(9)
        assert pair.child.hangs is None
        pair.says(Alive())
    pair.child.wait_on(11)
    assert pair.child.hangs == "showed no progress for 10 s (run.hang_seconds)"


def test_to_be_idle_is_progress_only_where_nobody_waits(pair: Pair) -> None:
    pair.says(Alive())
    pair.child.wait_on(9)
    pair.says(Alive(idle=True), owes=True)
    pair.child.wait_on(2)
    assert pair.child.hangs
    pair.says(Alive(idle=True), owes=False)
    assert pair.child.hangs is None


def test_a_child_that_nobody_waits_for_does_not_hang(pair: Pair) -> None:
    pair.child.wait_on(1000)
    pair.child.forgive()
    assert pair.child.hangs is None


def test_a_message_that_does_not_end_is_the_end_of_its_child(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender was stopped within it."""
    monkeypatch.setattr(process, "MESSAGE_SECONDS", 0.1)
    os.write(pair.process_side.connection.fileno(), struct.pack("!i", 1 << 20) + bytes(100))
    with pytest.raises(ConnectionError, match="does not end"):
        pair.child.receive(owes=True)
    pair.process_side.close()  # what a kill does


class Killed:
    """A process that is no more."""

    def is_alive(self) -> bool:
        return False

    def join(self) -> None: ...


def test_a_child_killed_in_mid_message_is_ended_though_another_process_holds_its_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "MESSAGE_SECONDS", 0.1)
    here, there = multiprocessing.Pipe()
    killed = Child("rollout", Killed(), Channel(here))  # type: ignore[arg-type]
    os.write(there.fileno(), struct.pack("!i", 1 << 20) + bytes(100))
    with pytest.raises(ConnectionError, match="does not end"):
        killed.receive(owes=True)
    ending = threading.Thread(target=killed.end, args=(0.0,), daemon=True)
    ending.start()
    ending.join(30)
    ended = not ending.is_alive()
    there.close()
    assert ended


def test_no_limit() -> None:
    pair = Pair(Patience(0, 0))
    pair.child.wait_on(1e9)
    assert pair.child.hangs is None
    pair.says(Alive())
    pair.child.wait_on(1e9)
    assert pair.child.hangs is None


def test_time_in_which_the_supervisor_itself_was_stopped_does_not_count(pair: Pair) -> None:
    """Ctrl-Z, or a laptop that slept for a night."""
    boss = Supervisor(fake_workers.rollout, fake_workers.trainer, FakeRun(""), 2, 2)
    boss._trainer = pair.child
    pair.says(Alive())
    boss._turn_began = time.monotonic() - 10_000
    boss._replace_hung()
    assert pair.child.hangs is None
    assert pair.child._silent == 2 * TURN_SECONDS


def test_a_connection_lost_within_the_work_is_an_error_and_no_lost_supervisor(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "SIGNALS", ())
    monkeypatch.setattr(child, "_die_with_supervisor", lambda: None)
    monkeypatch.setattr(child.faulthandler, "register", lambda number: None)
    monkeypatch.setattr(child.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(child.os, "_exit", lambda code: None)
    payload = child.Payload(RunConfig(), Path(), False)
    with child.child(pair.process_side.connection, payload):
        raise ConnectionResetError("the judge hung up")
    message = pair.child.receive(owes=True)
    assert isinstance(message, Failed)
    assert "the judge hung up" in message.text
    with child.child(pair.process_side.connection, payload) as channel:
        channel.receive()  # closed by now: nobody is left to be told
