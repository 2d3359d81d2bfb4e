"""Appends that are synced in groups: what a kill, a power failure and a bad disk leave of them."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tracefp4.files import GroupedAppends, StorageError, jsonl, whole_lines

WRITER = """
import sys
from pathlib import Path
from tracefp4.files import GroupedAppends, jsonl
appends = GroupedAppends(seconds=60)
for number in range(10**9):
    appends.append(Path(sys.argv[1]), jsonl([{"number": number, "text": "x" * 300}]))
    print(number, flush=True)
"""


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """(time, bytes of the file) of every fsync: what a power failure would leave."""
    found: list[tuple[float, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        real(descriptor)
        found.append((time.monotonic(), size))

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_lines_are_synced_together_and_none_waits_long(tmp_path: Path, synced: list[tuple[float, int]]) -> None:
    path, due = tmp_path / "answers.jsonl", []
    appends = GroupedAppends(seconds=0.1)
    for number in range(60):
        appends.append(path, jsonl([{"number": number}]))
        due.append((time.monotonic() + 0.1, path.stat().st_size))
        assert len(whole_lines(path)) == number + 1  # there for a reader, and after a kill, at once
        time.sleep(0.005)
    deadline = time.monotonic() + 10
    while (not synced or synced[-1][1] < path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)  # nothing is appended any more: the last lines do not wait for the next ones
    slack = 2.0  # of a machine that does other things too
    for limit, size in due:
        assert min(when for when, kept in synced if kept >= size) < limit + slack
    assert len(synced) < 30


def test_leaving_the_block_syncs(tmp_path: Path, synced: list[tuple[float, int]]) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    appends = GroupedAppends(seconds=60)
    for path in paths:
        appends.append(path, "one\n")
        appends.append(path, "two\n")
    assert synced == []
    with pytest.raises(KeyboardInterrupt), appends:
        raise KeyboardInterrupt  # a signal
    assert [size for _, size in synced] == [8, 8]


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "200":
            break
    process.kill()
    reported = process.stdout.read().split("\n")[:-1]
    process.wait()
    lines = whole_lines(path)
    assert path.read_bytes().endswith(b"\n")
    assert [json.loads(line)["number"] for line in lines] == list(range(len(lines)))
    assert len(lines) > (int(reported[-1]) if reported else 200)


def test_a_sync_that_fails_is_an_error_of_the_next_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "answers.jsonl"
    appends = GroupedAppends(seconds=0.01)
    monkeypatch.setattr(os, "fsync", fsync)
    appends.append(path, "one\n")
    time.sleep(0.5)
    with pytest.raises(StorageError, match=r"answers\.jsonl cannot be written \(Input/output error\)"):
        appends.append(path, "two\n")
    with pytest.raises(StorageError), appends:
        pass
    with pytest.raises(ValueError, match="the first"), appends:
        raise ValueError("the first error is the one to report")


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with GroupedAppends() as appends:
        appends.append(path, "one\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # a write ends early, and the next one fails
        try:
            with pytest.raises(StorageError, match="File too large"):
                appends.append(path, "a line of which six bytes fit\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        appends.append(path, "three\n")
    assert whole_lines(path) == ["one\n", "three\n"]
