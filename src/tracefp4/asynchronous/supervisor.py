"""Runs a rollout process and a trainer process, passes messages between them, and replaces the one that dies.

A killed rollout costs its unfinished groups, which the next one makes again. A killed trainer costs the steps since its
last state: it goes on from there, and the rollout is replaced too, since its weights are of a future that is gone.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tracefp4.asynchronous.buffer import GroupBuffer, OnStale
from tracefp4.asynchronous.channel import Channel
from tracefp4.asynchronous.messages import (
    Admit,
    Done,
    Evaluate,
    Evaluated,
    Failed,
    Finished,
    Groups,
    Loaded,
    Published,
    Ready,
    Skipped,
    Started,
    Stop,
    Want,
    Weights,
)
from tracefp4.errors import TracefpError
from tracefp4.signals import deferred

STOP_SECONDS = 5.0
"""How long a child may take to end after it was asked to."""
START_SECONDS = 600.0
"""How long a child may take to say its first word: it imports torch and loads a model."""


@dataclass(frozen=True)
class RolloutStart:
    """Where a rollout process begins. redo: groups that an earlier process started and did not deliver."""

    weights: Weights
    next_index: int
    redo: tuple[int, ...]
    admitted: int
    incarnation: int


TrainerMain = Callable[[Connection, Any, int], None]
"""(channel's connection, payload, how many trainers died before it) of the trainer process; a module-level function,
since processes are spawned."""
RolloutMain = Callable[[Connection, Any, RolloutStart], None]


class ChildError(TracefpError):
    """A child process ended for a reason that another try would meet again."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass
class _Child:
    """sender: a message goes out whole on its thread, whatever signal interrupts the wait; the next one comes after."""

    name: str
    process: BaseProcess
    channel: Channel
    heard: float
    sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def end(self, seconds: float | None) -> None:
        """Waits for the process, with None as long as it takes, then ends it."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.sender.shutdown()
        self.channel.close()


class Supervisor:
    """``run`` returns the trainer's summary. payload: picklable, given to both mains (config, run folder).

    max_restarts: children that die without an error of their own (killed, out of memory) are replaced so often in a
    row; a step that was never reached before sets the count back. hang_seconds: a rollout that owes groups or an
    evaluation and says nothing for so long is replaced. notify: told of every event in one sentence.
    """

    def __init__(
        self,
        rollout_main: RolloutMain,
        trainer_main: TrainerMain,
        payload: Any,
        groups_per_step: int,
        max_version_diff: int,
        on_stale: OnStale = "wait",
        max_restarts: int = 3,
        hang_seconds: float = 600.0,
        notify: Callable[[str], None] = print,
    ) -> None:
        self._rollout_main, self._trainer_main, self._payload = rollout_main, trainer_main, payload
        self._settings = (groups_per_step, max_version_diff, on_stale)
        self._buffer = GroupBuffer(*self._settings)
        self._max_restarts, self._hang_seconds, self._notify = max_restarts, hang_seconds, notify
        self._context = multiprocessing.get_context("spawn")
        self._trainer: _Child | None = None
        self._rollout: _Child | None = None
        self._weights: Weights | None = None
        self._want: int | None = None
        self._evaluation: Evaluate | None = None
        self._next_index = 0
        self._incarnation = 0
        self._restarts = self._lost_trainers = 0
        self._furthest = -1
        self._summary: dict[str, Any] | None = None

    @property
    def processes(self) -> dict[str, int | None]:
        """Process ids by name, of those that run."""
        children = [c for c in (self._trainer, self._rollout) if c is not None]
        return {c.name: c.process.pid for c in children}

    def run(self) -> dict[str, Any]:
        """Until the trainer is done. Raises TracefpError where a child failed for good; both are ended then."""
        try:
            resource_tracker.ensure_running()  # the first start would do it, and unblock signals on the way
            self._start_trainer()
            while self._summary is None:
                self._turn()
            return self._summary
        except BaseException:
            self._stop_all(save=True)
            raise
        finally:
            self._stop_all(save=False)

    # -- children -----------------------------------------------------------------------------------------------

    def _spawn(self, name: str, main: Callable[..., None], *arguments: Any) -> _Child:
        here, there = self._context.Pipe()
        process = self._context.Process(target=main, args=(there, self._payload, *arguments), name=f"tracefp4-{name}")
        process.start()
        there.close()  # ours; with it open a dead child would not read as the end of the pipe
        return _Child(name, process, Channel(here), time.monotonic() + START_SECONDS)

    def _start_trainer(self) -> None:
        with deferred():
            self._trainer = self._spawn("trainer", self._trainer_main, self._lost_trainers)

    def _start_rollout(self) -> None:
        assert self._weights is not None
        self._incarnation += 1
        redo = tuple(self._buffer.unfinished())
        admitted = self._buffer.admitted(self._weights.version)
        start = RolloutStart(self._weights, self._next_index, redo, admitted, self._incarnation)
        with deferred():
            self._rollout = self._spawn("rollout", self._rollout_main, start)
        if self._evaluation is not None:
            self._tell_rollout(self._evaluation)

    def _lost(self, child: _Child, why: str) -> None:
        """Replaces a child that is gone. Raises ChildError after too many in a row."""
        child.end(0.0)
        self._restarts += 1
        if self._restarts > self._max_restarts:
            raise ChildError(
                f"the {child.name} process {why}; {self._restarts} processes in a row ended so, and the run stops: "
                "look for the cause (memory?), then go on with --resume"
            )
        if child is self._rollout:
            self._rollout = None
            self._notify(f"the rollout process {why}; a new one takes over its unfinished groups")
            self._start_rollout()
            return
        self._notify(f"the trainer process {why}; it goes on from its last state, with a new rollout process")
        self._lost_trainers += 1
        self._trainer, self._want, self._evaluation = None, None, None
        if self._rollout is not None:
            self._rollout.process.kill()
            self._rollout.end(0.0)
            self._rollout = None
        self._start_trainer()

    def _stop_all(self, save: bool) -> None:
        """Ends both children, by force where a second signal arrives.

        save: the trainer may finish its update and write a state first, which takes what it takes.
        """
        children = [(self._rollout, STOP_SECONDS), (self._trainer, None if save else STOP_SECONDS)]
        self._tell_rollout(Stop())
        self._tell_trainer(Stop())
        self._trainer = self._rollout = None
        try:
            for child, seconds in children:
                if child is not None:
                    child.end(seconds)
        except BaseException:
            for child, _ in children:
                if child is not None:
                    child.process.kill()
            raise

    # -- messages -----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Waits for the next messages and handles them."""
        children = [c for c in (self._rollout, self._trainer) if c is not None]
        ready = wait([c.channel.connection for c in children], timeout=1.0)
        for child in children:
            if child.channel.connection not in ready or child not in (self._rollout, self._trainer):
                continue
            try:
                message = child.channel.receive()
            except ConnectionError:
                child.process.join(5.0)
                self._lost(child, _exit_reason(child.process.exitcode))
                continue
            child.heard = time.monotonic()
            self._handle(child, message)
        rollout = self._rollout
        owes = self._buffer.unfinished() or self._evaluation is not None or self._want is not None
        if rollout and owes and time.monotonic() - rollout.heard > self._hang_seconds:
            rollout.process.kill()
            self._lost(rollout, f"said nothing for {self._hang_seconds:.0f} s and was ended")

    def _handle(self, child: _Child, message: Any) -> None:
        if isinstance(message, Failed):
            child.end(5.0)
            if message.user_error:
                raise ChildError(message.text, message.exit_code)
            self._notify(message.text)
            raise ChildError(f"the {child.name} process failed: {message.text.strip().splitlines()[-1]}")
        if child is self._trainer:
            self._from_trainer(message)
        else:
            self._from_rollout(message)
        self._serve()

    def _from_trainer(self, message: Any) -> None:
        match message:
            case Ready(weights):
                # Whatever was made before is of another history of the policy.
                before, self._buffer, self._weights = self._buffer, GroupBuffer(*self._settings), weights
                self._buffer.dropped, self._buffer.skipped = before.dropped, before.skipped
                self._next_index = weights.version * self._settings[0] + before.dropped + before.skipped
                self._start_rollout()
            case Want(version):
                self._want = version
            case Published(weights):
                self._weights = weights
                if weights.version > self._furthest:  # progress; steps done again after a crash are none
                    self._furthest, self._restarts = weights.version, 0
                self._tell_rollout(weights)
                self._admit()
            case Evaluate():
                self._evaluation = message
                self._tell_rollout(message)
            case Done(summary):
                self._summary = summary
            case _:
                raise AssertionError(f"the trainer sent {type(message).__name__}")

    def _from_rollout(self, message: Any) -> None:
        match message:
            case Started(index, version):
                self._next_index = max(self._next_index, index + 1)
                self._buffer.started(index, version)
            case Skipped(index):
                self._next_index = max(self._next_index, index + 1)
                self._buffer.skipped += 1
                self._admit()
            case Finished(group):
                self._buffer.put(group)
            case Evaluated():
                self._evaluation = None
                self._tell_trainer(message)
            case Loaded(version):
                self._remove_weights_before(version)
            case _:
                pass  # Alive

    def _serve(self) -> None:
        """Gives the trainer its groups once they are there."""
        if self._want is None or self._weights is None:
            return
        dropped = self._buffer.dropped
        groups = self._buffer.take(self._want)
        if self._buffer.dropped > dropped:
            self._admit()
        if groups is None:
            return
        self._want = None
        counts = {
            "async/dropped_groups": float(self._buffer.dropped),
            "async/skipped_prompts": float(self._buffer.skipped),
            "async/ready_groups": float(len(self._buffer)),
        }
        self._tell_trainer(Groups(groups, counts))

    def _admit(self) -> None:
        assert self._weights is not None
        self._tell_rollout(Admit(self._buffer.admitted(self._weights.version)))

    def _tell_rollout(self, message: Any) -> None:
        self._tell(self._rollout, message)

    def _tell_trainer(self, message: Any) -> None:
        self._tell(self._trainer, message)

    @staticmethod
    def _tell(child: _Child | None, message: Any) -> None:
        """A child that is gone is noticed, and replaced, when its channel is read next."""
        if child is None or not child.process.is_alive():
            return
        try:
            child.sender.submit(child.channel.send, message).result()
        except ConnectionError:
            return

    def _remove_weights_before(self, version: int) -> None:
        assert self._weights is not None
        for path in Path(self._weights.path).parent.glob("v*.safetensors"):
            number = path.stem.removeprefix("v")
            if number.isdigit() and int(number) < version:
                path.unlink(missing_ok=True)


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "closed its channel"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
