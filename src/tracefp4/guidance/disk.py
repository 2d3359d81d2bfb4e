"""Guidance on a disk or an object store: shards written by a thread, found and read by any process."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from tracefp4.errors import TracefpError
from tracefp4.guidance.config import GuidanceStoreConfig
from tracefp4.guidance.files import open_files
from tracefp4.guidance.index import ShardIndex
from tracefp4.guidance.schema import GuidanceError
from tracefp4.guidance.shards import (
    Shard,
    build_shard,
    check_record,
    oldest_beyond,
    parse_header,
    read_sample,
    shard_name,
)
from tracefp4.guidance.store import GuidanceStore, MemoryStore, TrajectoryGuidance, check_handle, handle_of
from tracefp4.guidance.writer import BackgroundWriter, Group
from tracefp4.types import GuidanceHandle

_LOOK_FOR_REMOVED_SECONDS = 30.0
_log = logging.getLogger("tracefp4.guidance")


def make_store(config: GuidanceStoreConfig) -> GuidanceStore:
    """The store that a config describes. Raises TracefpError where its folder cannot be made."""
    if config.url == "memory":
        return MemoryStore()
    return ShardStore(
        config.url,
        queue_bytes=config.queue_mb << 20,
        wait_seconds=config.wait_seconds,
        keep_bytes=int(config.keep_gb * 2**30),
        fsync=config.fsync,
    )


class ShardStore:
    """A GuidanceStore over a folder or an fsspec URL; each process that writes or reads opens its own.

    ``put`` queues and returns at once; see `BackgroundWriter` for queue_bytes, shard_bytes and commit_seconds.
    wait_seconds: how long ``get`` waits for a record that is not there yet. keep_bytes: the oldest shards are removed
    beyond it; 0 keeps all. create: make the folder; without it the store is for reading, and the folder must exist.
    """

    def __init__(
        self,
        url: str,
        *,
        queue_bytes: int = 512 << 20,
        shard_bytes: int = 256 << 20,
        commit_seconds: float = 0.2,
        wait_seconds: float = 0.2,
        keep_bytes: int = 0,
        fsync: bool = False,
        create: bool = True,
    ) -> None:
        self.url = url
        self._files = open_files(url, fsync)
        self._index = ShardIndex(self._files)
        try:
            if create:
                self._files.create()
            self._index.refresh()
        except OSError as error:
            reason = error.strerror or error
            raise TracefpError(f"the guidance store at {url} cannot be opened: {reason} (guidance.url)") from None
        self._writer = BackgroundWriter(self._publish, url, queue_bytes, shard_bytes, commit_seconds)
        self._writer_id = secrets.token_hex(5)
        self._last_microsecond = 0
        self._wait_seconds, self._keep_bytes = wait_seconds, keep_bytes
        self._waiting_is_vain = False
        self._looked_for_removed = time.monotonic()
        self._retention_failing = False

    # -- the rollout's side -----------------------------------------------------------------------------------

    def put(self, sample_id: str, record: TrajectoryGuidance) -> GuidanceHandle | None:
        """Queues a record and returns at once; None where it was dropped, because the queue is full or the disk fails.

        The record's tensors must not change afterwards. Raises GuidanceError for a sample id that is already there.
        """
        check_record(sample_id, record)
        if sample_id in self:
            raise GuidanceError(f"guidance of sample {sample_id} is already in the store")
        return None if self._writer.offer(sample_id, record) else handle_of(sample_id, record)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until what was put so far is published; False where that takes longer than timeout seconds."""
        return self._writer.flush(timeout)

    def close(self, timeout: float | None = 30.0) -> bool:
        """Flushes and ends the writer thread; what cannot be written in time is dropped, and False returned."""
        return self._writer.close(timeout)

    def stats(self) -> dict[str, float]:
        """Counters of this process for the step's metrics.

        guidance/written_bytes (headers and checksums included), written_records, dropped/full and dropped/error
        (records since the start), queue_bytes (now), last_write_seconds (of the last shard).
        """
        return self._writer.stats()

    def _publish(self, group: Group) -> int:
        """On the writer's thread: one shard of a group, then retention."""
        shard = build_shard(group)
        name = self._new_name(shard)
        self._files.publish(name, shard.parts)
        self._index.add(parse_header(name, shard.header, shard.nbytes))
        with self._retention():
            # What was discarded while it was being written.
            self._remove(self._index.discard([i for i, _ in group if i not in self._writer]))
            if self._keep_bytes:
                self.prune(self._keep_bytes)
            if time.monotonic() - self._looked_for_removed > _LOOK_FOR_REMOVED_SECONDS:
                self._looked_for_removed = time.monotonic()
                self._index.refresh(read_new=False)  # other processes remove shards too
        return shard.nbytes

    def _new_name(self, shard: Shard) -> str:
        self._last_microsecond = max(self._last_microsecond + 1, time.time_ns() // 1000)
        return shard_name(self._last_microsecond, self._writer_id, shard)

    @contextmanager
    def _retention(self) -> Iterator[None]:
        """Shards that cannot be removed are no reason to stop a run: one warning per episode."""
        try:
            yield
        except OSError as error:
            if not self._retention_failing:
                _log.warning("guidance store %s: old shards cannot be removed (%s)", self.url, error.strerror or error)
            self._retention_failing = True
        else:
            self._retention_failing = False

    # -- the trainer's side -----------------------------------------------------------------------------------

    def get(
        self, handle: GuidanceHandle, layers: Sequence[int] | None = None, rows: tuple[int, int] | None = None
    ) -> TrajectoryGuidance:
        """A record, or some layers (by number) and rows [start, stop) of it, reading and checking no more than needed.

        Its tensors may be views. A record that is not there is waited for, wait_seconds at most; after a wait in vain
        others do not wait until a new shard has come. Raises GuidanceError: "missing", "rows", "layers", "recipe" or
        "checksum" first in its text.
        """
        sample_id = handle.sample_id
        deadline = time.monotonic() + self._wait_seconds
        problem, vanished = "", 0
        while True:
            queued = self._writer.get(sample_id)
            if queued is not None:
                check_handle(handle, queued.rows, queued.recipe_hash)
                return queued.select(layers, rows)
            found = self._index.find(sample_id)
            if found is not None:
                name, entry = found
                check_handle(handle, entry.rows, entry.recipe_hash)
                try:
                    return read_sample(self._files, name, entry, layers, rows)
                except FileNotFoundError:  # removed since it was listed
                    self._index.forget(name)
                    vanished += 1
                except OSError as error:
                    raise GuidanceError(
                        f"missing: shard {name} of sample {sample_id} cannot be read: {error.strerror or error}"
                    ) from None
            try:
                if self._index.refresh() and vanished < 3:
                    self._waiting_is_vain = False
                    continue
            except OSError as error:
                problem = f" ({error.strerror or error})"
            left = deadline - time.monotonic()
            if left <= 0 or self._waiting_is_vain:
                break
            time.sleep(min(left, 0.02))
        self._waiting_is_vain = True
        if damaged := self._index.damaged():
            raise GuidanceError(
                f"checksum: no guidance of sample {sample_id}, and the header of shard {min(damaged)} is damaged"
            )
        raise GuidanceError(f"missing: no guidance of sample {sample_id}{problem}")

    def __contains__(self, sample_id: str) -> bool:
        """Whether a record is queued, or published as far as this process has seen; does no input or output."""
        return sample_id in self._writer or sample_id in self._index

    def refresh(self) -> None:
        """Takes note of the shards that other processes wrote or removed. Raises OSError where that fails."""
        self._index.refresh()

    # -- retention --------------------------------------------------------------------------------------------

    def discard(self, handles: Sequence[GuidanceHandle]) -> None:
        """Forgets records; a shard goes once this process discarded all of its records.

        Where a shard cannot be removed there is a warning, and it stays for retention or `tracefp4 guidance prune`.
        """
        ids = {handle.sample_id for handle in handles}
        self._writer.discard(ids)
        with self._retention():
            self._index.refresh()  # other processes may have written records of the same ids
            self._remove(self._index.discard(ids))

    def drop_below(self, version: int) -> int:
        """Removes shards all of whose rows ran under policy versions below `version`; returns how many.

        Where that fails there is a warning, and the run goes on.
        """
        removed = 0
        with self._retention():
            self._index.refresh()
            removed = self._remove([h.name for h in self._index.headers() if h.max_version < version])
        return removed

    def prune(self, keep_bytes: int) -> int:
        """Removes the oldest shards until at most keep_bytes are left, the newest shard always; returns how many.

        Raises OSError where a shard cannot be removed.
        """
        return self._remove(oldest_beyond(self._files.sizes(), keep_bytes))

    def clear(self) -> int:
        """Removes every published shard, e.g. before a run is resumed whose samples will have the same ids, and what
        writers that are gone left half-written. Returns how many shards."""
        self._files.remove_temps()
        self._index.refresh()
        return self._remove([*(h.name for h in self._index.headers()), *self._index.damaged()])

    def _remove(self, names: Sequence[str]) -> int:
        for name in names:
            self._files.remove(name)
            self._index.forget(name)
        return len(names)

    def __enter__(self) -> ShardStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
