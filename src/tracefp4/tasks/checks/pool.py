"""Worker processes for checks that can hang: started once, reused, killed and replaced at a time limit."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tracefp4.tasks.checks.base import Check, CheckError, usable_cores

T = TypeVar("T")
R = TypeVar("R")

START_SECONDS = 300.0
"""How long a worker may take to import what it runs: a user's module may import torch."""


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Fields:
        kind: ``value`` (``value`` holds it), ``raised`` (``value`` is what the worker says of the exception),
            ``timeout``, or ``died`` (``value`` says how the process ended).
    """

    kind: str
    value: Any = None


class OrderedPool:
    """Threads that map a function over items; results come in order, the first error of the lowest index wins."""

    def __init__(self, workers: int, name: str) -> None:
        self.workers = workers or usable_cores()
        # Persistent threads: a worker process dies with the thread that started it.
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix=f"check-{name}")

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        futures: list[Future[R]] = [self._threads.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


class WorkerPool:
    """Processes that each run one handler of ``tracefp4.tasks.checks.worker`` on one job at a time.

    The processes are started by exec, not forked: the trainer's threads and its torch stay out of them.
    """

    def __init__(self, handler: str, setup: dict[str, Any], workers: int, timeout: float) -> None:
        self._handler, self._setup, self._timeout = handler, setup, timeout
        self._pool = OrderedPool(workers, handler)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._alive: set[_Worker] = set()
        self._closed = False

    def run(self, jobs: Sequence[Any], accept: Callable[[Any, Outcome], None] | None = None) -> list[Outcome]:
        """One outcome a job, in order.

        Args:
            accept: called with each job and its outcome; what it raises ends the batch before its other jobs start.

        Raises:
            CheckError: the pool is closed, or a worker cannot start (e.g. a user's module does not import).
        """
        if self._closed:
            raise CheckError("this check is closed")

        def run_one(job: Any) -> Outcome:
            outcome = self._run_one(job)
            if accept is not None:
                accept(job, outcome)
            return outcome

        try:
            return self._pool.map(run_one, jobs)
        except CheckError:
            raise
        except BaseException:
            self.close()  # e.g. Ctrl-C: no thread may wait for a slow worker
            raise

    def start(self) -> None:
        """Starts one worker now, so that what cannot be imported shows at once."""
        self._pool.map(lambda _: self._worker(), [None])

    def close(self) -> None:
        """Kills the workers and waits for the threads."""
        with self._lock:
            self._closed = True
            for worker in self._alive:
                worker.kill()
        self._pool.close()
        while self._alive:  # no thread is left that could use them
            self._alive.pop().reap()

    def _run_one(self, job: Any) -> Outcome:
        worker = self._worker()
        outcome = worker.ask(job, self._timeout)
        if outcome.kind in ("timeout", "died"):
            self._drop(worker)
        return outcome

    def _worker(self) -> _Worker:
        """This thread's worker, started where there is none."""
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            with self._lock:
                if self._closed:
                    raise CheckError("this check is closed")
                worker = _Worker()
                self._alive.add(worker)
            self._local.worker = worker
            ready = worker.ask({"handler": self._handler, "setup": self._setup}, START_SECONDS)
            if ready.kind != "value":
                self._drop(worker)
                raise CheckError(_start_problem(self._handler, ready))
        return worker

    def _drop(self, worker: _Worker) -> None:
        self._local.worker = None
        with self._lock:
            self._alive.discard(worker)
        worker.kill()
        worker.reap()


def _start_problem(handler: str, outcome: Outcome) -> str:
    if outcome.kind == "raised":
        return str(outcome.value["message"])
    what = f"did not start within {START_SECONDS:g} s" if outcome.kind == "timeout" else str(outcome.value)
    return f"the worker process of the check ({handler}) {what} while it imported what it needs"


class YesNoCheck(Check):
    """A check whose workers answer True or False; a subclass makes ``_pool``."""

    _pool: WorkerPool

    def close(self) -> None:
        self._pool.close()

    def judge(self, jobs: Sequence[Any | None]) -> list[float]:
        """1.0 where a worker says True, else 0.0. None is a response without an answer, which no worker sees."""
        outcomes = iter(self._pool.run([job for job in jobs if job is not None]))
        scores = []
        for job in jobs:
            outcome = None if job is None else next(outcomes)
            if outcome is not None and outcome.kind != "value":
                self.counts["timeouts" if outcome.kind == "timeout" else "errors"] += 1
            scores.append(float(outcome is not None and outcome.value is True))
        return scores


class _Worker:
    """One process; ``kill`` may be called from any thread, the rest from the one that made it."""

    def __init__(self) -> None:
        job_read, self._write = os.pipe()
        self._read, reply_write = os.pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from tracefp4.tasks.checks.worker import main; "
            f"main({job_read}, {reply_write}, {os.getpid()})"
        )
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a user's function prints must not mix with what this command writes
                pass_fds=[job_read, reply_write],
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._write)
            os.close(self._read)
            raise CheckError(f"a worker process of the check could not be started: {error.strerror}") from None
        finally:
            os.close(job_read)
            os.close(reply_write)
        os.set_blocking(self._write, False)

    def ask(self, job: Any, seconds: float) -> Outcome:
        """Sends a job and waits for its reply."""
        data = pickle.dumps(job)
        deadline = time.monotonic() + seconds
        try:
            self._send(struct.pack("<Q", len(data)) + data, deadline)
            reply = self._receive(struct.unpack("<Q", self._receive(8, deadline))[0], deadline)
        except TimeoutError:
            return Outcome("timeout")
        except (EOFError, BrokenPipeError):
            return Outcome("died", self._death())
        kind, value = json.loads(reply)
        return Outcome(kind, value)

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait([], [self._write], deadline)
            view = view[os.write(self._write, view[:65536]) :]

    def _receive(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait([self._read], [], deadline)
            chunk = os.read(self._read, count - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def _wait(self, reads: list[int], writes: list[int], deadline: float) -> None:
        poll = select.poll()  # select.select refuses descriptors above 1023
        for fd in reads:
            poll.register(fd, select.POLLIN)
        for fd in writes:
            poll.register(fd, select.POLLOUT)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError

    def _death(self) -> str:
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended its process with exit code {code}"

    def kill(self) -> None:
        """Kills the process and all that it started in its session's group."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def reap(self) -> None:
        self.process.wait()
        for fd in (self._read, self._write):
            os.close(fd)
