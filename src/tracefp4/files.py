"""Writing to disk so that a reader, or the next process, finds the old content or the new, never a half.

What the disk refuses (full, read-only, permissions) is a `StorageError`: one sentence that names the file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tracefp4.errors import TracefpError

LOCK = "run.lock"
_LOOKS, _LOOK_SECONDS = 3, 0.02
"""Times that a lock is tried again: `lock_held` may be looking."""


class StorageError(TracefpError):
    """A file or folder cannot be written; what was there before is still there."""


def reason(error: Exception) -> str | None:
    """'No space left on device' for an error of the operating system, None for any other.

    safetensors and tokenizers are written in Rust and have types of their own for it, the latter plain Exception; what
    they share is the text '(os error 28)'.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(found[1])) if found else None


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turns errors of the disk into a StorageError '{what} cannot be written (No space left on device)'."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageError) or (text := reason(error)) is None:
            raise
        raise StorageError(f"{what} cannot be written ({text})") from error


def write_atomic(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replaces a file by what ``write`` writes. Raises StorageError, and leaves the old file, where that fails."""
    path = Path(path)
    with storage_errors(str(path)):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp makes it private
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_text_atomic(path: str | Path, text: str) -> None:
    """Replaces a file as a whole. Raises StorageError, and leaves the old file, where that fails."""
    write_atomic(path, lambda file: file.write(text.encode()))


def append_text(path: str | Path, text: str, sync: bool = True) -> None:
    """Appends and syncs. Raises StorageError, and cuts the file back to what it was, where that fails."""
    path = Path(path)
    with storage_errors(str(path)), open(path, "ab", buffering=0) as file:
        before, data = file.seek(0, os.SEEK_END), memoryview(text.encode())
        try:
            while data:  # unbuffered, a write may end early: on a nearly full disk it does
                data = data[file.write(data) :]
            if sync:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # the first error is the one to report
                os.ftruncate(file.fileno(), before)
            raise


class GroupedAppends:
    """Appends that are synced together, by a thread, at most ``seconds`` after they were made.

    A process that is killed loses nothing that was appended, a machine that loses power what came after the last sync.
    Both methods raise StorageError, also for an earlier sync of the thread; leaving the block syncs.
    """

    def __init__(self, seconds: float = 0.5) -> None:
        self.seconds = seconds
        self._lock, self._syncing = threading.Lock(), threading.Lock()
        self._unsynced: set[Path] = set()
        self._timer: threading.Timer | None = None
        self._error: StorageError | None = None

    def append(self, path: Path, text: str) -> None:
        """Appends; where that fails the file is cut back to what it was."""
        self._raise()
        append_text(path, text, sync=False)
        with self._lock:
            self._unsynced.add(path)
            if self._timer is None:
                timer = threading.Timer(self.seconds, self._sync)
                timer.daemon = True  # a process that ends without leaving the block does not wait for it
                timer.start()
                self._timer = timer

    def sync(self) -> None:
        """Returns once all that was appended is on disk."""
        self._sync()
        self._raise()

    def __enter__(self) -> GroupedAppends:
        return self

    def __exit__(self, kind: object, error: object, _: object) -> None:
        try:
            self.sync()
        except StorageError:
            if error is None:  # else that is the one to report
                raise

    def _sync(self) -> None:
        with self._syncing:  # whoever comes second also waits for what the first one took
            with self._lock:
                paths, self._unsynced, timer, self._timer = self._unsynced, set(), self._timer, None
            if timer is not None:
                timer.cancel()
            for path in paths:
                try:
                    with storage_errors(str(path)):
                        sync(path)
                except StorageError as error:
                    self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def jsonl(lines: Iterable[Mapping[str, Any]]) -> str:
    """A line of JSON each, text as it is."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def whole_lines(path: Path) -> list[str]:
    """Lines with their line feed; a last one without it was cut off by a kill, and may end within a character."""
    with storage_errors(str(path)):
        whole = path.read_bytes().split(b"\n")[:-1]  # not splitlines(): a response may hold U+2028
    return [line.decode(errors="replace") + "\n" for line in whole]


@contextmanager
def replaced_dir(target: Path) -> Iterator[Path]:
    """Yields an empty folder that takes the place of ``target`` when the block ends well.

    On Linux the two are exchanged in one operation. Elsewhere there is a moment without ``target``;
    ``recover_dir`` mends that if the process is killed in it. Raises StorageError; the old folder then stays.
    """
    with storage_errors(str(target)):
        sweep(target)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            yield staging
            staging.chmod(0o755)  # mkdtemp makes it private
            for path in [*staging.rglob("*"), staging]:
                sync(path)
            if not target.exists():
                staging.rename(target)
            elif not _exchange(staging, target):
                _exchange_in_two(staging, target)
            sync(target.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)  # the failed one, or the old one after an exchange


def recover_dir(target: Path) -> None:
    """Puts back the folder that a kill in ``replaced_dir`` left aside, and removes what was half written."""
    if not target.exists() and _aside(target).exists():
        with storage_errors(str(target)):
            _aside(target).rename(target)
    sweep(target)


def sweep(target: Path) -> None:
    """Removes what killed writers of ``target`` left beside it; the folder moved aside stays if it is the only one."""
    for left_over in target.parent.glob(f".{target.name}-*"):
        if target.exists() or left_over != _aside(target):
            shutil.rmtree(left_over, ignore_errors=True)


def sweep_files(folder: Path) -> None:
    """Removes what killed processes left of ``write_text_atomic``; only for whoever has locked the folder."""
    for pattern in (".*.json.*", ".*.jsonl.*", ".*.md.*"):
        for left_over in folder.glob(pattern):
            left_over.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Free space of the file system that ``path`` is or would be on."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def same_disk(a: Path, b: Path) -> bool:
    """Whether two paths, which need not exist yet, are or would be on one file system."""
    devices = set()
    for path in (a.absolute(), b.absolute()):
        while not path.exists():
            path = path.parent
        devices.add(path.stat().st_dev)
    return len(devices) == 1


def size_of(path: Path) -> int:
    """Bytes of all files below a folder; 0 where there is no folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds ``folder`` for this process; StorageError where another one holds it. A killed holder frees it.

    The lock is flock's on the file run.lock, which is removed at the end. Over NFS it holds between machines if the
    mount supports locks; where locks are not supported at all, one line says so and the run goes on without.
    """
    path = folder / LOCK
    descriptor = _locked(path, folder)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # read-only by now: the lock itself ends with the descriptor
                path.unlink(missing_ok=True)
            os.close(descriptor)


def lock_held(folder: Path) -> bool:
    """Whether a process holds ``folder``; looking takes the lock for an instant, which ``folder_lock`` waits out."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _locked(path: Path, folder: Path) -> int | None:
    looks = 0
    while True:
        with storage_errors(str(path)):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before may have removed the file between open and flock: then this locks nothing.
            if not _same_file(descriptor, path):
                os.close(descriptor)
                continue
            with storage_errors(str(path)):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return descriptor
        except BlockingIOError:
            looks += 1
            if looks <= _LOOKS:
                os.close(descriptor)
                time.sleep(_LOOK_SECONDS)
                continue
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise StorageError(f"{folder} is in use by {holder}: wait for it or choose another --out") from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise StorageError(f"{path} cannot be locked ({reason(error)})") from error
            warn(f"{path.parent} is on a file system without locks: nothing keeps a second run out of it")
            return None
        except BaseException:
            os.close(descriptor)
            raise


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def warn(sentence: str) -> None:
    """One line on standard error. A full disk under a redirected standard error must not end the run."""
    with suppress(OSError):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}-old")


def _exchange_in_two(staging: Path, target: Path) -> None:
    old = _aside(target)
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    try:
        staging.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names in one step; False where the system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    at_cwd, exchange = -100, 2
    if function(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))
