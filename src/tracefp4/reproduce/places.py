"""Places for processes: of one command, or shared by all commands on a machine that name the same folder.

A shared place is a file that is locked while a process runs in it, by its command and by itself: one that is killed
frees its places as soon as its processes have ended, which they do by themselves. Each place belongs to one of the
visible GPUs, in turn.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tracefp4.files import StorageError, storage_errors
from tracefp4.report import ensure_dir


@dataclass
class Hold:
    """A claim on a locked file, until ``release`` or the end of every process that has it; None: nobody else asks."""

    descriptor: int | None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """For the process that it is for: the claim then lasts even where the command is killed."""
        return () if self.descriptor is None else (self.descriptor,)

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


@dataclass
class Place(Hold):
    """gpu: as CUDA_VISIBLE_DEVICES names it; None where there is no choice to make."""

    index: int
    gpu: str | None


class Places:
    """``jobs`` places. folder: where they are shared, None to share them with nobody. gpus: the visible ones."""

    def __init__(self, jobs: int, folder: Path | None = None, gpus: Sequence[str] = ()) -> None:
        self._jobs, self._folder, self._gpus = jobs, folder, list(gpus)
        self._taken: set[int] = set()
        self.full = f"a place in {folder}: other commands hold all {jobs}"
        if folder is not None:
            ensure_dir(folder)

    def take(self) -> Place | None:
        """A free place, on the GPU with the fewest taken ones; None where all are taken.

        Raises StorageError where the folder cannot be written.
        """
        with self._free() as free:
            if not free:
                return None
            busy = Counter(self._gpu(i) for i in range(self._jobs) if i not in free)
            index = min(free, key=lambda i: (busy[self._gpu(i)], i))
            self._taken.add(index)
            return Place(free.pop(index), index, self._gpu(index) if len(self._gpus) > 1 else None)

    def release(self, place: Place) -> None:
        """Gives a place back."""
        self._taken.discard(place.index)
        place.release()

    def hold(self, what: str) -> Hold | None:
        """Claims what only one of the commands is to do; None where another one has claimed it."""
        if self._folder is None:
            return Hold(None)
        descriptor = try_lock(self._folder / f"{what}.lock")
        return None if descriptor is None else Hold(descriptor)

    def _gpu(self, index: int) -> str | None:
        return self._gpus[index % len(self._gpus)] if self._gpus else None

    @contextmanager
    def _free(self) -> Iterator[dict[int, int | None]]:
        """Free places and their locks, which end with the block but for those that were taken out."""
        free: dict[int, int | None] = {}
        try:
            for index in range(self._jobs):
                if index in self._taken:
                    continue
                if self._folder is None:
                    free[index] = None
                elif (descriptor := try_lock(self._folder / f"place{index}")) is not None:
                    free[index] = descriptor
            yield free
        finally:
            for descriptor in free.values():
                if descriptor is not None:
                    os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """The descriptor of a locked file, made where it is not there; None where it is locked already.

    Raises StorageError where it cannot be written, or lies on a file system without locks: it would never be free.
    """
    with storage_errors(str(path)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise StorageError(f"{path} cannot be locked ({error.strerror}): choose another folder for --places") from error
    return descriptor
