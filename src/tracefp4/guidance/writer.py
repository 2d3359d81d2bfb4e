"""The queue between the rollout and the disk, bounded in bytes, and the thread that empties it.

``offer`` never waits: it takes the record or says why not. A failing disk is tried again with growing pauses; what was
queued stays queued, what comes meanwhile is dropped.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tracefp4.guidance.store import TrajectoryGuidance

Drop = Literal["full", "error"]
Group = Sequence[tuple[str, TrajectoryGuidance]]

_FIRST_PAUSE, _LAST_PAUSE = 0.1, 5.0
_log = logging.getLogger("tracefp4.guidance")


@dataclass(eq=False)
class _Queued:
    sample_id: str
    record: TrajectoryGuidance
    nbytes: int
    since: float


class BackgroundWriter:
    """Hands queued records in groups to ``publish`` on a thread of its own, which starts with the first record.

    publish: writes a group and returns its bytes in the store; raises OSError where that fails. where: names the store
    in warnings. queue_bytes: most bytes held, those being written included. shard_bytes: most bytes of a group (one
    record may be larger). commit_seconds: how long the oldest queued record waits for company.
    """

    def __init__(
        self, publish: Callable[[Group], int], where: str, queue_bytes: int, shard_bytes: int, commit_seconds: float
    ) -> None:
        self._publish, self._where = publish, where
        self._queue_bytes, self._shard_bytes, self._commit_seconds = queue_bytes, shard_bytes, commit_seconds
        self._changed = threading.Condition()
        self._queue: dict[str, _Queued] = {}
        self._held = 0
        self._thread: threading.Thread | None = None
        self._closing = False
        self._flushing = 0
        self._failing = False
        self._full = False
        self._broken: Exception | None = None
        self._dropped: Counter[str] = Counter()
        self._written_bytes = self._written_records = 0
        self._last_write_seconds = 0.0

    def offer(self, sample_id: str, record: TrajectoryGuidance) -> Drop | None:
        """Queues a record, whose tensors must not change any more; else returns the reason why it was dropped."""
        nbytes = record.nbytes
        with self._changed:
            reason: Drop | None = None
            if self._failing or self._closing or self._broken:
                reason = "error"
            elif self._held + nbytes > self._queue_bytes:
                reason = "full"
                self._say_full(nbytes)
            if reason is None:
                self._queue[sample_id] = _Queued(sample_id, record, nbytes, time.monotonic())
                self._held += nbytes
                self._start()
                self._changed.notify_all()
                return None
            self._dropped[reason] += 1
        if record.staged is not None:
            record.staged.release()
        return reason

    def get(self, sample_id: str) -> TrajectoryGuidance | None:
        """A record that is queued or being written, in memory that stays the reader's."""
        with self._changed:
            queued = self._queue.get(sample_id)
            if queued is None:
                return None
            if queued.record.staged is not None:
                queued.record.staged.retain()
        return queued.record.settled()

    def __contains__(self, sample_id: str) -> bool:
        with self._changed:
            return sample_id in self._queue

    def discard(self, sample_ids: Iterable[str]) -> set[str]:
        """Takes records out of the queue; returns those that were in it. One being written may be published still."""
        with self._changed:
            found = {i for i in sample_ids if i in self._queue}
            for sample_id in found:
                self._remove(self._queue[sample_id])
            self._changed.notify_all()
        return found

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything queued so far is written or discarded; False where the timeout (seconds) ran out.

        Raises what ended the writer thread, where a bug did.
        """
        with self._changed:
            waiting = list(self._queue.values())
            self._flushing += 1
            self._changed.notify_all()
            try:
                done = self._changed.wait_for(
                    lambda: self._broken or not any(self._queue.get(q.sample_id) is q for q in waiting), timeout
                )
            finally:
                self._flushing -= 1
            if self._broken is not None:
                raise self._broken
            return bool(done)

    def close(self, timeout: float | None = 30.0) -> bool:
        """Flushes, then ends the thread. What could not be written in time is dropped ("error"); False then."""
        atexit.unregister(self.close)
        try:
            self.flush(timeout)
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
                thread = self._thread
            if thread is not None:
                thread.join(timeout)
            left = self._abandon()
        return not left

    def _abandon(self) -> int:
        """Drops what is still queued; returns how many records."""
        with self._changed:
            left = list(self._queue.values())
            for queued in left:
                self._remove(queued)
            self._dropped["error"] += len(left)
        if left:
            _log.warning("guidance store %s: %d records could not be written before it closed", self._where, len(left))
        return len(left)

    def stats(self) -> dict[str, float]:
        """Counters since the start, and the queue as it is: see `ShardStore.stats`."""
        with self._changed:
            return {
                "guidance/written_bytes": float(self._written_bytes),
                "guidance/written_records": float(self._written_records),
                "guidance/dropped/full": float(self._dropped["full"]),
                "guidance/dropped/error": float(self._dropped["error"]),
                "guidance/queue_bytes": float(self._held),
                "guidance/last_write_seconds": self._last_write_seconds,
            }

    # -- the thread -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="guidance-writer", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _run(self) -> None:
        try:
            while group := self._next_group():
                try:
                    self._write(group)
                finally:
                    for queued in group:
                        if queued.record.staged is not None:
                            queued.record.staged.release()
        except Exception as error:  # a bug; the rollout goes on, flush and close raise it
            with self._changed:
                self._broken = error
                self._changed.notify_all()
            _log.exception("guidance store %s: the writer ended; no more guidance is written", self._where)

    def _next_group(self) -> list[_Queued]:
        """Records for a shard, once there are enough or the oldest waited long enough; [] where the store closes."""
        with self._changed:
            while not self._closing:
                if self._queue:
                    oldest = next(iter(self._queue.values()))
                    pause = oldest.since + self._commit_seconds - time.monotonic()
                    if pause <= 0 or self._held >= self._shard_bytes or self._flushing:
                        return self._oldest()
                    self._changed.wait(pause)
                else:
                    self._changed.wait()
            return []

    def _oldest(self) -> list[_Queued]:
        """As many of the oldest records as fit into a shard, one at least; their staging memory is held."""
        group: list[_Queued] = []
        total = 0
        for queued in self._queue.values():
            if group and total + queued.nbytes > self._shard_bytes:
                break
            if queued.record.staged is not None:
                queued.record.staged.retain()  # also a record that is discarded now must not change under the writer
            group.append(queued)
            total += queued.nbytes
        return group

    def _write(self, group: list[_Queued]) -> None:
        """Publishes a group, trying again until it works, all of it is discarded, or the store closes."""
        pause = _FIRST_PAUSE
        for queued in group:
            if queued.record.staged is not None:
                queued.record.staged.wait()
        while True:
            with self._changed:
                group = [q for q in group if self._queue.get(q.sample_id) is q]
            if not group:
                return
            started = time.monotonic()
            try:
                nbytes = self._publish([(q.sample_id, q.record) for q in group])
            except OSError as error:
                if not self._wait_after(error, pause):
                    return
                pause = min(2 * pause, _LAST_PAUSE)
            else:
                self._settle(group, nbytes, time.monotonic() - started)
                return

    def _wait_after(self, error: OSError, pause: float) -> bool:
        """False where the store closes: then the group is given up."""
        with self._changed:
            if not self._failing:
                self._failing = True
                _log.warning(
                    "guidance store %s cannot be written (%s): rollouts go on without guidance until it can",
                    self._where,
                    error.strerror or error,
                )
            self._changed.wait_for(lambda: self._closing, pause)
            return not self._closing

    def _settle(self, group: list[_Queued], nbytes: int, seconds: float) -> None:
        with self._changed:
            if self._failing:
                self._failing = False
                _log.warning("guidance store %s can be written again", self._where)
            for queued in group:
                if self._queue.get(queued.sample_id) is queued:
                    self._remove(queued)
            self._written_bytes += nbytes
            self._written_records += len(group)
            self._last_write_seconds = seconds
            self._full = self._full and self._held > self._queue_bytes // 2
            self._changed.notify_all()

    def _remove(self, queued: _Queued) -> None:
        del self._queue[queued.sample_id]
        self._held -= queued.nbytes
        if queued.record.staged is not None:
            queued.record.staged.release()

    def _say_full(self, nbytes: int) -> None:
        if self._full:
            return
        self._full = True
        if nbytes > self._queue_bytes:
            _log.warning(
                "guidance of %d bytes is larger than guidance.queue_mb allows (%d bytes) and is dropped; raise it",
                nbytes,
                self._queue_bytes,
            )
        else:
            _log.warning(
                "guidance store %s is slower than the rollout: its queue is full and new guidance is dropped; "
                "raise guidance.queue_mb or use a faster disk",
                self._where,
            )
