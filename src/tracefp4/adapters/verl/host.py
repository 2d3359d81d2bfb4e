"""The rollout engine in a thread of its own: requests come from any thread, batches go on continuously."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from tracefp4.errors import TracefpError
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.types import Request, Trajectory

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class EngineHost:
    """Runs ``engine.step`` while there is work; everything else that touches the engine runs between two steps.

    Requests submitted while paused wait until ``resume``, or end at once where ``abort_all`` said so. Where a step
    raises, all unfinished requests get its error and the host refuses further ones: an engine in an unknown state must
    not go on.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._futures: dict[str, Future[Trajectory]] = {}
        self._parked: list[tuple[Request, Future[Trajectory]]] = []
        self._paused = self._rejecting = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tracefp4-rollout", daemon=True)
        self._thread.start()

    # -- from any thread ----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Future[Trajectory]:
        """The trajectory of a request; one that was aborted has finish_reason "abort", and no rows where it never ran.

        Errors arrive in the future.
        """
        future: Future[Trajectory] = Future()
        added = self._call(lambda: self._admit(request, future))
        added.add_done_callback(lambda done: _pass_on_error(done, future))
        return future

    def abort_all(self, reject: bool = False) -> Future[list[str]]:
        """Ends every running request with what it has, and holds back new ones until ``resume``; returns their ids.

        reject: requests that wait or come later end at once, without a token, for others to serve.
        """
        return self._call(lambda: self._abort_all(reject))

    def resume(self) -> Future[None]:
        """Admits requests again, those that waited first."""
        return self._call(self._resume)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Future[None]:
        """Replaces the weights between two steps; running requests go on under them, their rows marked so."""
        return self._call(lambda: self.engine.update_weights(weights, version))

    def run_between_steps(self, work: Callable[[], T]) -> Future[T]:
        return self._call(work)

    def close(self) -> None:
        """Ends the thread after its step; unfinished requests get an error."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        self._fail(TracefpError("the rollout server was closed"))

    @property
    def running(self) -> int:
        """Requests that the engine works on; those held back do not count."""
        return len(self._futures)

    @property
    def rejecting(self) -> bool:
        return self._rejecting

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def _call(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._wake:
            if self._failure is not None or self._closed:
                future.set_exception(self._failure or TracefpError("the rollout server is closed"))
                return future
            self._jobs.append((work, future))
            self._wake.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closed and not self._busy():
                    self._wake.wait()
                if self._closed:
                    return
                jobs = list(self._jobs)
                self._jobs.clear()
            for work, future in jobs:
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            if not self._busy():
                continue
            try:
                for trajectory in self.engine.step():
                    self._futures.pop(trajectory.request_id).set_result(trajectory)
            except BaseException as error:
                self._fail(error)
                return

    def _busy(self) -> bool:
        return self.engine.busy

    def _admit(self, request: Request, future: Future[Trajectory]) -> None:
        if self._rejecting:
            future.set_result(_never_ran(request))
            return
        if self._paused:
            self._parked.append((request, future))
            return
        self.engine.add_request(request)
        self._futures[request.request_id] = future

    def _abort_all(self, reject: bool) -> list[str]:
        self._paused, self._rejecting = True, reject
        ids = list(self._futures)
        for request_id in ids:
            trajectory = self.engine.abort(request_id)
            self._futures.pop(request_id).set_result(trajectory)
        if reject:
            self._readmit()
        return ids

    def _resume(self) -> None:
        self._paused = self._rejecting = False
        self._readmit()

    def _readmit(self) -> None:
        parked, self._parked = self._parked, []
        for request, future in parked:
            try:
                self._admit(request, future)
            except Exception as error:  # belongs to that request alone
                future.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        """Everybody who waits learns of the error; nothing is accepted any more."""
        with self._wake:
            self._failure = self._failure or error
            jobs, futures = list(self._jobs), [*self._futures.values(), *(f for _, f in self._parked)]
            self._jobs.clear()
            self._futures.clear()
            self._parked.clear()
        for future in [*(f for _, f in jobs), *futures]:
            if not future.done():
                future.set_exception(error)


def _never_ran(request: Request) -> Trajectory:
    """What becomes of a request that was turned away: its prompt, no token, no row."""
    nothing = torch.zeros(0, dtype=torch.int32)
    rows = torch.full((len(request.prompt_ids) - 1,), -1, dtype=torch.int32)
    return Trajectory(request.request_id, request.prompt_ids, (), nothing.float(), nothing, rows, None, "abort")


def _pass_on_error(done: Future[None], future: Future[Trajectory]) -> None:
    error = done.exception()
    if error is not None and not future.done():
        future.set_exception(error)
