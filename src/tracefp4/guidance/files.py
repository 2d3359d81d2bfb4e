"""Where shards lie: a local folder, or any file system that fsspec knows. Whole files in, byte ranges out.

Both publish a file in one step: who lists the folder sees all of it or nothing. Every failure is an OSError.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tracefp4.errors import TracefpError

Range = tuple[int, memoryview]
"""(offset in the file, writable memory of the wanted length)"""

TEMP_PREFIX = ".tmp."
_IOV_MAX = 1024
_BATCH_BYTES = 4 << 20
_DEAD_AFTER_SECONDS = 3600.0  # a temp file lives as long as the write of one shard
_HOST = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())


class Files(Protocol):
    """A flat folder of immutable files."""

    url: str

    def create(self) -> None:
        """Makes the folder where it can be made."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of every published file, by name."""
        ...

    def folders(self) -> list[str]:
        """Names of the folders in it."""
        ...

    def publish(self, name: str, parts: Sequence[memoryview]) -> None:
        """Writes a new file of the concatenated parts."""
        ...

    def fill(self, name: str, ranges: Sequence[Range]) -> Iterator[int]:
        """Reads ranges into their memory; yields the position of each once it is filled.

        Raises EOFError where the file ends before a range does, OSError where it cannot be read.
        """
        ...

    def remove(self, name: str) -> None:
        """Removes a file; one that is gone already is no error."""
        ...

    def remove_temps(self) -> list[str]:
        """Removes what dead writers left half-written; returns the names."""
        ...


def open_files(url: str, fsync: bool = False) -> Files:
    """The files at a path, a file:// URL or any other fsspec URL. Raises TracefpError for an unknown kind of URL."""
    if "://" not in url or url.startswith("file://"):
        return LocalFiles(url.removeprefix("file://"), fsync)
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise TracefpError(f"the guidance store's url {url} cannot be opened: {error}") from None
    return FsspecFiles(url, system, path)


class LocalFiles:
    """A folder. fsync: also survive a power failure, not only the end of the process."""

    def __init__(self, path: str | Path, fsync: bool = False) -> None:
        self.folder, self.fsync = Path(path), fsync
        self.url = str(path)

    def create(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def sizes(self) -> dict[str, int]:
        found = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    if not entry.name.startswith(".") and entry.is_file():
                        found[entry.name] = entry.stat().st_size
                except FileNotFoundError:  # removed since it was listed
                    continue
        return found

    def folders(self) -> list[str]:
        with os.scandir(self.folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def publish(self, name: str, parts: Sequence[memoryview]) -> None:
        # A vanished folder is not made again: it may be an unmounted disk, and its mount point the root disk.
        temp = self.folder / f"{TEMP_PREFIX}{_HOST}.{os.getpid()}.{name}"
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                _write_all(fd, parts, self.fsync)
                if self.fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temp, self.folder / name)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        if self.fsync:
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def fill(self, name: str, ranges: Sequence[Range]) -> Iterator[int]:
        # One read per range: the caller hashes each while it is still in the processor's cache.
        # pread and not mmap: a failing disk then raises an error instead of ending the process with SIGBUS.
        fd = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for i, (offset, memory) in enumerate(ranges):
                done = 0
                while done < len(memory):
                    count = os.preadv(fd, [memory[done:]], offset + done)
                    if count == 0:
                        raise EOFError(name)
                    done += count
                yield i
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def remove_temps(self) -> list[str]:
        removed = []
        for path in sorted(self.folder.glob(f"{TEMP_PREFIX}*")):
            try:
                age = time.time() - path.stat().st_mtime
                if _writer_is_gone(path.name, age):
                    path.unlink()
                    removed.append(path.name)
            except FileNotFoundError:  # published or removed by its writer
                continue
        return removed


def _write_all(fd: int, parts: Sequence[memoryview], to_disk: bool) -> None:
    """Writes all parts. to_disk: the device starts on each piece while the next is copied, before fsync asks for it."""
    start = 0
    for batch in _batches(parts):
        size = 0
        while batch:
            count = os.writev(fd, batch)
            size += count
            while batch and count >= len(batch[0]):
                count -= len(batch.pop(0))
            if count:
                batch[0] = batch[0][count:]
        if to_disk and hasattr(os, "posix_fadvise"):
            # On dirty pages DONTNEED starts their writeback, and drops none of them.
            os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)
        start += size


def _batches(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The parts in order, cut into lists of at most _BATCH_BYTES and _IOV_MAX pieces."""
    batch: list[memoryview] = []
    room = _BATCH_BYTES
    for part in parts:
        while len(part):
            piece, part = part[:room], part[room:]
            batch.append(piece)
            room -= len(piece)
            if not room or len(batch) == _IOV_MAX:
                yield batch
                batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _writer_is_gone(name: str, age: float) -> bool:
    """Whether the writer of a temp file `age` seconds old has ended: on this host its process is looked for, whatever
    the clock says; of another host's, whose clock may differ, only the age speaks."""
    host, _, rest = name.removeprefix(TEMP_PREFIX).partition(".")
    pid = rest.partition(".")[0]
    if host != _HOST or not pid.isdecimal():
        return age > _DEAD_AFTER_SECONDS
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


@dataclass
class FsspecFiles:
    """A folder of an fsspec file system; an object store publishes a file by one put. system: the fsspec one."""

    url: str
    system: Any
    path: str

    def create(self) -> None:
        with _as_os_errors(self.url):
            self.system.makedirs(self.path, exist_ok=True)

    def sizes(self) -> dict[str, int]:
        files = self._entries("file")
        return {name: int(e["size"]) for name, e in files.items() if not name.startswith(".")}

    def folders(self) -> list[str]:
        return sorted(self._entries("directory"))

    def _entries(self, kind: str) -> dict[str, dict[str, Any]]:
        with _as_os_errors(self.url):
            self.system.invalidate_cache()
            try:
                listed = self.system.ls(self.path, detail=True)
            except FileNotFoundError:  # object stores have no empty folders
                return {}
        return {str(e["name"]).rstrip("/").rsplit("/", 1)[-1]: e for e in listed if e["type"] == kind}

    def publish(self, name: str, parts: Sequence[memoryview]) -> None:
        with _as_os_errors(self.url):
            self.system.pipe_file(f"{self.path}/{name}", b"".join(parts))

    def fill(self, name: str, ranges: Sequence[Range]) -> Iterator[int]:
        requests: list[list[int]] = []  # neighbouring ranges are one request
        end = -1
        for i, (offset, memory) in enumerate(ranges):
            if not len(memory):
                yield i
                continue
            if offset != end:
                requests.append([])
            requests[-1].append(i)
            end = offset + len(memory)
        starts = [ranges[r[0]][0] for r in requests]
        stops = [ranges[r[-1]][0] + len(ranges[r[-1]][1]) for r in requests]
        with _as_os_errors(self.url):
            pieces = self.system.cat_ranges([f"{self.path}/{name}"] * len(requests), starts, stops, on_error="raise")
        for piece, which in zip(pieces, requests, strict=True):
            at = 0
            for i in which:
                memory = ranges[i][1]
                if at + len(memory) > len(piece):
                    raise EOFError(name)
                memory[:] = piece[at : at + len(memory)]
                at += len(memory)
                yield i

    def remove(self, name: str) -> None:
        with _as_os_errors(self.url):
            try:
                self.system.rm_file(f"{self.path}/{name}")
            except FileNotFoundError:
                return

    def remove_temps(self) -> list[str]:
        return []  # an unfinished put leaves nothing that can be listed


@contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """Object stores raise exceptions of their own for what a disk reports as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error
