"""Which sample lies in which shard, learnt from the shards' own headers, each read once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from tracefp4.guidance.files import Files
from tracefp4.guidance.schema import GuidanceError
from tracefp4.guidance.shards import SampleEntry, ShardHeader, is_shard, read_header


class ShardIndex:
    """What a folder of shards holds, as of the last ``refresh``. Safe to use from several threads.

    Where two shards hold the same sample, the newer one counts.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._shards: dict[str, ShardHeader] = {}
        self._damaged: dict[str, GuidanceError] = {}
        self._holders: dict[str, list[str]] = {}  # sample id -> shards that hold it, oldest first
        self._discarded: dict[str, set[str]] = {}  # shard -> samples of it that were discarded

    def refresh(self, read_new: bool = True) -> bool:
        """Looks at the folder: forgets shards that are gone, reads the headers of new ones. True where one was new.

        A header that cannot be read for now is tried again next time. Raises OSError where the folder cannot be listed.
        """
        with self._refreshing:
            sizes = {name: size for name, size in self._files.sizes().items() if is_shard(name)}
            with self._lock:
                known = self._shards.keys() | self._damaged.keys()
                for name in known - sizes.keys():
                    self._forget(name)
            if not read_new:
                return False
            found = False
            for name in sorted(sizes.keys() - known):
                try:
                    self.add(read_header(self._files, name, sizes[name]))
                except GuidanceError as error:
                    with self._lock:
                        self._damaged[name] = error
                except OSError:
                    continue
                found = True
            return found

    def add(self, header: ShardHeader) -> None:
        with self._lock:
            if header.name in self._shards:
                return
            self._shards[header.name] = header
            for sample_id in header.samples:
                holders = self._holders.setdefault(sample_id, [])
                holders.append(header.name)
                holders.sort()

    def forget(self, name: str) -> None:
        with self._lock:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._damaged.pop(name, None)
        self._discarded.pop(name, None)
        header = self._shards.pop(name, None)
        for sample_id in header.samples if header else ():
            self._holders[sample_id].remove(name)
            if not self._holders[sample_id]:
                del self._holders[sample_id]

    def find(self, sample_id: str) -> tuple[str, SampleEntry] | None:
        """(shard, entry) of the newest record of a sample that was not discarded."""
        with self._lock:
            for name in reversed(self._holders.get(sample_id, ())):
                if sample_id not in self._discarded.get(name, ()):
                    return name, self._shards[name].samples[sample_id]
            return None

    def __contains__(self, sample_id: str) -> bool:
        return self.find(sample_id) is not None

    def discard(self, sample_ids: Iterable[str]) -> list[str]:
        """Marks samples as discarded; returns the shards in which nothing else is left."""
        empty = []
        with self._lock:
            for sample_id in sample_ids:
                for name in self._holders.get(sample_id, ()):
                    gone = self._discarded.setdefault(name, set())
                    if sample_id not in gone:
                        gone.add(sample_id)
                        if len(gone) == len(self._shards[name].samples):
                            empty.append(name)
        return empty

    def headers(self) -> list[ShardHeader]:
        """Readable shards, oldest first."""
        with self._lock:
            return [self._shards[name] for name in sorted(self._shards)]

    def damaged(self) -> dict[str, GuidanceError]:
        """Shards whose header is damaged, with the reason."""
        with self._lock:
            return dict(self._damaged)

    def samples(self) -> Iterator[tuple[str, SampleEntry]]:
        """(shard, entry) of every sample, oldest shard first."""
        for header in self.headers():
            for entry in header.samples.values():
                yield header.name, entry
