"""Runs a rollout process and a trainer process, passes messages between them, and replaces the one that dies or hangs.

A lost rollout costs its unfinished groups, which the next one makes again. A lost trainer costs the steps since its
last state: it goes on from there, and the rollout is replaced too, since its weights are of a future that is gone.

A process hangs where others wait for it and no sign of progress comes for a time. Signs are sent from within the work,
not by a thread that would beat on: the rollout's after rows were computed, the trainer's after a layer ran.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from tracefp4.asynchronous.buffer import GroupBuffer, OnStale
from tracefp4.asynchronous.channel import Channel
from tracefp4.asynchronous.messages import (
    Aborted,
    Admit,
    Alive,
    Counted,
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
from tracefp4.asynchronous.process import TURN_SECONDS, Child, Patience
from tracefp4.errors import TracefpError
from tracefp4.signals import deferred

STOP_SECONDS = 5.0
"""How long a child may take to end after it was asked to."""
BUFFER_TOTALS = {
    "async/dropped_groups": "dropped",
    "async/skipped_prompts": "skipped",
    "async/wasted_tokens": "wasted_tokens",
}
"""Metric -> the count of a GroupBuffer."""
REPLACED = ("async/replaced_rollouts", "async/replaced_trainers")


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


class Supervisor:
    """``run`` returns the trainer's summary. payload: picklable, given to both mains (config, run folder).

    max_restarts: children that die without an error of their own (killed, out of memory) or hang are replaced so often
    in a row; a step that was never reached before sets the count back. patience: when a child counts as hung. notify:
    told of every event in one sentence. start_method: of multiprocessing; forked children would share locks of torch.
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
        patience: Patience | None = None,
        notify: Callable[[str], None] = print,
        start_method: Literal["spawn", "forkserver"] = "spawn",
    ) -> None:
        self._rollout_main, self._trainer_main, self._payload = rollout_main, trainer_main, payload
        self._settings = (groups_per_step, max_version_diff, on_stale)
        self._buffer = GroupBuffer(*self._settings)
        self._max_restarts, self._patience, self._notify = max_restarts, patience or Patience(), notify
        self._context: Any = multiprocessing.get_context(start_method)
        self._trainer: Child | None = None
        self._rollout: Child | None = None
        self._weights: Weights | None = None
        self._want: int | None = None
        self._evaluation: Evaluate | None = None
        self._next_index = 0
        self._incarnation = 0
        self._restarts = self._lost_trainers = 0
        self._furthest = -1
        self._totals: Counter[str] = Counter()  # besides the buffer's
        self._replaced: list[tuple[int | None, str]] = []  # (step that was told of it, sentence)
        self._turn_began = time.monotonic()
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

    def _spawn(self, name: str, main: Callable[..., None], *arguments: Any) -> Child:
        here, there = self._context.Pipe()
        process = self._context.Process(target=main, args=(there, self._payload, *arguments), name=f"tracefp4-{name}")
        process.start()
        there.close()  # ours; with it open a dead child would not read as the end of the pipe
        return Child(name, process, Channel(here), self._patience)

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

    def _lost(self, child: Child, why: str) -> None:
        """Replaces a child that is gone. Raises ChildError after too many in a row."""
        child.end(0.0)
        self._restarts += 1
        if self._restarts > self._max_restarts:
            raise ChildError(
                f"the {child.name} process {why}; {self._restarts} processes in a row ended so, and the run stops: "
                "look for the cause (memory?), then go on with --resume"
            )
        self._totals[f"async/replaced_{child.name}s"] += 1
        if child is self._rollout:
            self._rollout = None
            self._say_replaced(f"the rollout process {why}; a new one takes over its unfinished groups")
            self._start_rollout()
            return
        self._say_replaced(f"the trainer process {why}; it goes on from its last state, with a new rollout process")
        self._lost_trainers += 1
        self._trainer, self._want, self._evaluation = None, None, None
        if self._rollout is not None:
            self._rollout.kill()
            self._rollout.end(0.0)
            self._rollout = None
        self._start_trainer()

    def _say_replaced(self, sentence: str) -> None:
        self._notify(sentence)
        self._replaced.append((None, sentence))

    def _stop_all(self, save: bool) -> None:
        """Ends both children, by force where a second signal arrives.

        save: the trainer may finish its update and write a state first, which takes what it takes while it makes
        progress.
        """
        children = [(self._rollout, STOP_SECONDS), (self._trainer, None if save else STOP_SECONDS)]
        self._tell_rollout(Stop())
        self._tell_trainer(Stop())
        self._trainer = self._rollout = None
        try:
            for child, seconds in children:
                if child is not None and (why := child.end(seconds, self._hear_last)):
                    self._notify(f"the {child.name} process {why} while it was to stop, and was ended")
        except BaseException:
            for child, _ in children:
                if child is not None:
                    child.kill()
            raise

    def _hear_last(self, message: Any) -> None:
        if isinstance(message, Failed):
            self._notify(message.text)

    # -- messages -----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Waits for the next messages and handles them; replaces a child that hangs."""
        children = [c for c in (self._rollout, self._trainer) if c is not None]
        ready = wait([c.channel.connection for c in children], timeout=TURN_SECONDS)
        for child in children:
            if child.channel.connection not in ready or child not in (self._rollout, self._trainer):
                continue
            try:
                message = child.receive(self._owes(child))
            except ConnectionError:
                child.process.join(5.0)
                self._lost(child, _exit_reason(child.process.exitcode))
                continue
            self._handle(child, message)
        for child in children:
            if child in (self._rollout, self._trainer) and child.is_gone:
                self._lost(child, _exit_reason(child.process.exitcode))
        self._replace_hung()

    def _owes(self, child: Child) -> bool:
        """Whether others wait for the work of this child."""
        if child is self._trainer:
            return self._want is None and self._evaluation is None
        return bool(self._buffer.unfinished()) or self._evaluation is not None or self._want is not None

    def _replace_hung(self) -> None:
        # A turn counts for little however long it was: where this process too was stopped (Ctrl-Z, a laptop asleep),
        # its children had no time either.
        before, self._turn_began = self._turn_began, time.monotonic()
        passed = min(self._turn_began - before, 2 * TURN_SECONDS)
        for child in (self._rollout, self._trainer):
            if child is None or child not in (self._rollout, self._trainer):
                continue
            if self._owes(child):
                child.wait_on(passed)
            else:
                child.forgive()
            if why := child.hangs:
                child.kill(stacks=True)
                self._lost(child, f"{why} and was ended")

    def _handle(self, child: Child, message: Any) -> None:
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
            case Ready(weights, totals):
                self._begin(weights, totals)
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
            case Alive():
                pass
            case _:
                raise AssertionError(f"the trainer sent {type(message).__name__}")

    def _begin(self, weights: Weights, totals: dict[str, float]) -> None:
        """The trainer stands at these weights. What was made before is of another history of the policy, and its counts
        go on; those of a run that is resumed were in its state."""
        before, self._buffer = self._buffer, GroupBuffer(*self._settings)
        if self._weights is None:
            self._totals.update({name: n for name, n in totals.items() if name not in BUFFER_TOTALS})
        for name, field in BUFFER_TOTALS.items():
            count = int(totals.get(name, 0)) if self._weights is None else getattr(before, field)
            setattr(self._buffer, field, count)
        self._weights = weights
        self._next_index = weights.version * self._settings[0] + self._buffer.dropped + self._buffer.skipped
        # The files are cut back to this step: what they said of later ones is told again.
        told = [(None if step is not None and step >= weights.version else step, text) for step, text in self._replaced]
        self._replaced = told
        self._start_rollout()

    def _from_rollout(self, message: Any) -> None:
        match message:
            case Started(index, version):
                self._next_index = max(self._next_index, index + 1)
                self._buffer.started(index, version)
            case Aborted(index, tokens):
                self._buffer.aborted(index, tokens)
                self._admit()
            case Counted(figures):
                self._totals.update(figures)
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
            case Alive():
                pass
            case _:
                raise AssertionError(f"the rollout sent {type(message).__name__}")

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
        version, self._want = self._want, None
        untold = [sentence for step, sentence in self._replaced if step is None]
        self._replaced = [(version if step is None else step, sentence) for step, sentence in self._replaced]
        self._tell_trainer(Groups(groups, len(self._buffer), self._all_totals(), untold))

    def _all_totals(self) -> dict[str, float]:
        counted = {name: float(getattr(self._buffer, field)) for name, field in BUFFER_TOTALS.items()}
        return dict.fromkeys(REPLACED, 0.0) | {name: float(n) for name, n in self._totals.items()} | counted

    def _admit(self) -> None:
        assert self._weights is not None
        self._tell_rollout(Admit(self._buffer.admitted(self._weights.version)))

    def _tell_rollout(self, message: Any) -> None:
        if self._rollout is not None:
            self._rollout.tell(message)

    def _tell_trainer(self, message: Any) -> None:
        if self._trainer is not None:
            self._trainer.tell(message)

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
