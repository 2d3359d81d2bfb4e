"""The store on a disk: what was put is found by any process, and nothing that goes wrong there stops a rollout."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stored import equal, make_record
from tracefp4.errors import TracefpError
from tracefp4.guidance import GuidanceError
from tracefp4.guidance.disk import GuidanceStoreConfig, ShardStore, make_store
from tracefp4.guidance.store import MemoryStore
from tracefp4.types import GuidanceHandle

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "guidance"


@pytest.fixture
def store(folder: Path) -> Iterator[ShardStore]:
    with ShardStore(str(folder), commit_seconds=0.01, wait_seconds=0.0) as opened:
        yield opened


def put_all(store: ShardStore, count: int, first: int = 0, **sizes: Any) -> list[GuidanceHandle]:
    """Records s<i> of seed i; every one must be taken."""
    handles = [store.put(f"s{i}", make_record(i, **sizes)) for i in range(first, first + count)]
    assert all(handles)
    return [h for h in handles if h is not None]


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def is_missing(store: ShardStore, handle: GuidanceHandle) -> bool:
    with pytest.raises(GuidanceError) as caught:
        store.get(handle)
    return str(caught.value).startswith("missing: ")


# -- found again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_what_was_put_is_read_by_its_process_and_by_others(kind: str, folder: Path) -> None:
    url = str(folder) if kind == "folder" else f"memory://{folder}"
    with ShardStore(url) as store, ShardStore(url, create=kind == "memory", wait_seconds=0) as reader:
        handles = put_all(store, 6)
        assert equal(store.get(handles[3], layers=[3], rows=(1, 4)), make_record(3).select([3], (1, 4)))  # still queued
        assert store.flush(10)
        for other in (store, reader):
            for i, handle in enumerate(handles):
                assert equal(other.get(handle), make_record(i))
                assert equal(other.get(handle, layers=[3], rows=(1, 4)), make_record(i).select([3], (1, 4)))
                assert handle.sample_id in other
        assert handles[0].nbytes == make_record().payload_nbytes
        put_all(store, 2, first=6)  # a new shard: the reader learns of it by itself
        assert store.flush(10)
        assert equal(reader.get(GuidanceHandle("s7", 5, "abc")), make_record(7))
        assert store.stats()["guidance/written_records"] == 8
        assert store.stats()["guidance/queue_bytes"] == 0


def test_a_handle_must_describe_the_record(store: ShardStore) -> None:
    put_all(store, 1)
    for _ in "queued", "written":
        with pytest.raises(GuidanceError, match=r"^rows: sample s0 has 5 rows, its handle says 6"):
            store.get(GuidanceHandle("s0", 6, "abc"))
        with pytest.raises(GuidanceError, match=r"^recipe: sample s0 was recorded under abc, its handle says abd"):
            store.get(GuidanceHandle("s0", 5, "abd"))
        with pytest.raises(GuidanceError, match=r"guidance of sample s0 is already in the store"):
            store.put("s0", make_record())
        assert store.flush(10)


def test_a_reader_waits_for_a_late_record_and_only_once_in_vain(folder: Path) -> None:
    handle = GuidanceHandle("s0", 5, "abc")
    with ShardStore(str(folder)) as writer, ShardStore(str(folder), create=False, wait_seconds=5) as reader:
        timer = threading.Timer(0.1, lambda: put_all(writer, 1))
        timer.start()
        assert equal(reader.get(handle), make_record(0))
        timer.join()
    with ShardStore(str(folder), create=False, wait_seconds=0.2) as reader:
        lost = GuidanceHandle("lost", 5, "abc")
        started = time.monotonic()
        assert is_missing(reader, lost)
        assert time.monotonic() - started >= 0.2
        started = time.monotonic()
        assert all(is_missing(reader, lost) for _ in range(20))
        assert time.monotonic() - started < 0.2


def _write_some(url: str, writer: int) -> None:
    with ShardStore(url, commit_seconds=0.005) as store:
        for i in range(12):
            store.put(f"w{writer}/{i}", make_record(100 * writer + i))
            time.sleep(0.004)


def _read_all(url: str, writers: int) -> None:
    store = ShardStore(url, wait_seconds=30)
    for i in range(12):
        for w in range(writers):
            assert equal(store.get(GuidanceHandle(f"w{w}/{i}", 5, "abc")), make_record(100 * w + i))


def test_several_writers_and_readers_in_several_processes(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    folder.mkdir()
    jobs = [context.Process(target=_write_some, args=(str(folder), w)) for w in range(3)]
    jobs += [context.Process(target=_read_all, args=(str(folder), 3)) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0] * 5


def test_of_two_records_of_one_sample_the_newer_counts(folder: Path) -> None:
    """A run that was killed and resumed samples under the same ids again."""
    handle = GuidanceHandle("s0", 5, "abc")
    with ShardStore(str(folder)) as first, ShardStore(str(folder)) as second:
        put_all(first, 1)
        assert first.flush(10)
        assert second.put("s0", make_record(9))
        assert second.flush(10)
        first.refresh()
        assert equal(first.get(handle), make_record(9))
        assert equal(second.get(handle), make_record(9))
        second.discard([handle])
        assert is_missing(second, handle)
        assert shard_files(folder) == []
    with ShardStore(str(folder)) as again:
        put_all(again, 3)
        again.flush(10)
        assert again.clear() == 1
        assert "s0" not in again


# -- retention ----------------------------------------------------------------------------------------------------


def test_a_shard_goes_when_all_of_its_records_are_discarded(store: ShardStore, folder: Path) -> None:
    handles = put_all(store, 3)
    assert store.flush(10)
    store.discard(handles[:2])
    assert [is_missing(store, h) for h in handles[:2]] == [True, True]
    assert equal(store.get(handles[2]), make_record(2))
    assert len(shard_files(folder)) == 1
    store.discard(handles)
    assert shard_files(folder) == []
    store.discard([GuidanceHandle("never", 0, "abc")])


def test_what_is_discarded_before_or_while_it_is_written_leaves_nothing(folder: Path) -> None:
    with ShardStore(str(folder), commit_seconds=60, wait_seconds=0) as store:
        queued = put_all(store, 2)
        store.discard(queued)
        assert store.stats()["guidance/queue_bytes"] == 0
        publish, writing, go_on = store._files.publish, threading.Event(), threading.Event()

        def slow(name: str, parts: Sequence[memoryview]) -> None:
            writing.set()
            assert go_on.wait(10)
            publish(name, parts)

        store._files.publish = slow  # type: ignore[method-assign]
        late = put_all(store, 1)
        flushed = threading.Thread(target=store.flush)
        flushed.start()
        assert writing.wait(10)
        store.discard(late)
        go_on.set()
        flushed.join(10)
        assert is_missing(store, late[0])
    assert shard_files(folder) == []


def test_shards_go_by_bytes_and_by_policy_version(folder: Path) -> None:
    with ShardStore(str(folder), wait_seconds=0) as store:
        for version in range(4):
            put_all(store, 1, first=version, version=version)
            assert store.flush(10)
        size = shard_files(folder)[0].stat().st_size
        reader = ShardStore(str(folder), create=False, wait_seconds=0)
        assert store.drop_below(2) == 2
        handles = [GuidanceHandle(f"s{i}", 5, "abc") for i in range(4)]
        for other in (store, reader):  # the reader had seen them: removed under it, not a crash
            assert [is_missing(other, h) for h in handles[:2]] == [True, True]
            assert equal(other.get(handles[2]), make_record(2, version=2))
        assert store.prune(size + 10) == 1
        assert is_missing(reader, handles[2])
        assert store.prune(0) == 0  # the newest stays
    with ShardStore(str(folder), keep_bytes=3 * size + 100) as store:
        for i in range(10, 16):
            put_all(store, 1, first=i)
            assert store.flush(10)
        assert len(shard_files(folder)) == 3


def test_temp_files_of_dead_writers_are_removed_and_only_those(folder: Path) -> None:
    from tracefp4.guidance.files import _HOST, TEMP_PREFIX

    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with ShardStore(str(folder)) as store:
        dead, old, alive, foreign = (
            folder / f"{TEMP_PREFIX}{host}.{pid}.{n}.safetensors"
            for n, (host, pid) in enumerate([(_HOST, child.pid), ("far", 1), (_HOST, os.getpid()), ("far", 1)])
        )
        for path in (dead, old, alive, foreign):
            path.write_bytes(b"x")
        os.utime(old, (time.time() - 7200,) * 2)
        assert store.remove_temps() == sorted([dead.name, old.name])
        assert alive.exists()
        assert foreign.exists()


# -- a disk that fails --------------------------------------------------------------------------------------------


class FailingCall:
    """Stands for an os function: raises OSError(code) while it is told to."""

    def __init__(self, code: int) -> None:
        self.code, self.failing = code, True

    def patch(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.failing and threading.current_thread().name == "guidance-writer":
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("writev", errno.ENOSPC),
        ("open", errno.EROFS),
        ("open", errno.EACCES),
        ("rename", errno.EIO),
        ("close", errno.EDQUOT),
    ],
)
def test_a_run_goes_on_without_guidance_while_the_disk_fails_and_with_it_after(
    call: str,
    code: int,
    store: ShardStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = FailingCall(code)
    failing.patch(monkeypatch, call)
    for episode in (1, 2):
        failing.failing = True
        [first] = put_all(store, 1, first=10 * episode)
        wait_until(lambda n=episode: len(caplog.records) == 2 * n - 1)
        assert [store.put(f"d{i}", make_record()) for i in range(3)] == [None] * 3
        assert store.stats()["guidance/dropped/error"] == 3 * episode
        assert not store.flush(0.01)
        assert equal(store.get(first), make_record(10 * episode))  # from the queue
        assert not list(folder.glob(".tmp*"))
        failing.failing = False
        assert store.flush(10)
        put_all(store, 1, first=10 * episode + 1)
        assert store.flush(10)
        assert equal(store.get(first), make_record(10 * episode))
    said = [r.getMessage() for r in caplog.records]
    assert said[0] == (
        f"guidance store {folder} cannot be written ({os.strerror(code)}): rollouts go on without guidance until it can"
    )
    assert said == [said[0], f"guidance store {folder} can be written again"] * 2


def test_a_vanished_folder_is_not_made_again_and_used_once_it_is_back(
    store: ShardStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handles = put_all(store, 1)
    assert store.flush(10)
    shutil.rmtree(folder)
    assert is_missing(store, handles[0])
    put_all(store, 1, first=1)
    wait_until(lambda: caplog.records)
    assert store.put("s2", make_record()) is None
    assert is_missing(store, handles[0])
    assert not folder.exists()
    folder.mkdir()
    assert store.flush(10)
    assert equal(store.get(GuidanceHandle("s1", 5, "abc")), make_record(1))


def test_a_store_that_closes_on_a_failing_disk_counts_what_it_lost(folder: Path, caplog: Any) -> None:
    store = ShardStore(str(folder), commit_seconds=0)
    shutil.rmtree(folder)
    put_all(store, 1)
    assert store.close(0.2) is False
    assert store.stats()["guidance/dropped/error"] == 1
    assert "1 records could not be written before it closed" in caplog.text


SMALL_DISK = """
import sys, time, torch
from pathlib import Path
from tracefp4.guidance.disk import ShardStore
from stored import equal, make_record
disk = Path(sys.argv[1])
(disk / "ballast").write_bytes(bytes(1 << 20))
store = ShardStore(str(disk / "g"), commit_seconds=0.01)
handles, i = [], 0
while None not in handles:
    handles.append(store.put(f"s{i}", make_record(i, rows=2000)))
    i += 1
    time.sleep(0.02)
assert store.stats()["guidance/dropped/error"] == 1
(disk / "ballast").unlink()
assert store.flush(20)
for k, handle in enumerate(handles[:-1]):
    assert equal(ShardStore(str(disk / "g")).get(handle), make_record(k, rows=2000))
assert store.put("after", make_record(7)) and store.flush(10)
print("recovered after", len(handles))
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=2m none {tmp_path}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("NOT TESTED: this machine does not let the test mount a small tmpfs (unshare -m, mount)")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1" {tmp_path}', sys.executable, SMALL_DISK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "recovered after" in run.stdout
    assert run.stderr.count("cannot be written (No space left on device)") == 1
    assert run.stderr.count("can be written again") == 1


# -- the queue ----------------------------------------------------------------------------------------------------


def test_put_returns_at_once_on_a_stalled_disk_and_drops_the_newest_when_the_queue_is_full(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_bytes = make_record(rows=1000).nbytes
    go_on = threading.Event()
    with ShardStore(str(folder), queue_bytes=5 * record_bytes + 10, commit_seconds=0) as store:
        publish = store._files.publish

        def stalled(name: str, parts: Sequence[memoryview]) -> None:
            assert go_on.wait(30)
            publish(name, parts)

        store._files.publish = stalled  # type: ignore[method-assign]
        records = [make_record(i, rows=1000) for i in range(9)]
        seconds = []
        handles = []
        for i, record in enumerate(records):
            started = time.perf_counter()
            handles.append(store.put(f"s{i}", record))
            seconds.append(time.perf_counter() - started)
        assert [h is not None for h in handles] == [True] * 5 + [False] * 4  # the newest go, whole
        assert sorted(seconds)[4] < 0.005
        assert store.stats()["guidance/dropped/full"] == 4
        assert store.stats()["guidance/queue_bytes"] == 5 * record_bytes
        assert caplog.text.count("its queue is full") == 1
        for i in range(5):
            assert equal(store.get(handles[i]), records[i])
        go_on.set()
        assert store.flush(10)
        assert store.put("later", records[8]) is not None


def test_a_record_larger_than_the_queue_is_dropped_with_the_key_to_raise(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ShardStore(str(folder), queue_bytes=100) as store:
        assert store.put("s", make_record()) is None
    assert "larger than guidance.queue_mb allows" in caplog.text


def test_records_are_committed_in_groups_of_bounded_size(folder: Path) -> None:
    nbytes = make_record().nbytes
    with ShardStore(str(folder), commit_seconds=60, shard_bytes=4 * nbytes) as store:
        put_all(store, 11)
        assert store.flush(10)
        assert sorted(len(h.samples) for h in store._index.headers()) == [3, 4, 4]


def test_a_bug_in_the_writer_is_raised_by_flush_and_stops_no_rollout(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tracefp4.guidance.disk.build_shard", lambda group: 1 / 0)
    put_all(store, 1)
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError):
        store.flush(10)
    assert store.put("s1", make_record()) is None
    with pytest.raises(ZeroDivisionError):
        store.close(1)
    store._writer._broken = None


def test_what_is_queued_when_the_program_ends_is_written(folder: Path) -> None:
    script = (
        "import sys; from tracefp4.guidance.disk import ShardStore; from stored import make_record; "
        "store = ShardStore(sys.argv[1], commit_seconds=60); assert store.put('s0', make_record(0))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    subprocess.run([sys.executable, "-c", script, str(folder)], env=environment, check=True, timeout=60)
    assert equal(ShardStore(str(folder), create=False).get(GuidanceHandle("s0", 5, "abc")), make_record(0))


# -- damage, settings ---------------------------------------------------------------------------------------------


def test_damage_is_named_and_a_damaged_header_is_not_called_missing(store: ShardStore, folder: Path) -> None:
    handles = put_all(store, 2)
    assert store.flush(10)
    [path] = shard_files(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(GuidanceError, match=r"^checksum: sample s1, value of layer 3, chunk 0 of shard"):
        store.get(handles[1])
    assert equal(store.get(handles[0]), make_record(0))
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    reader = ShardStore(str(folder), create=False, wait_seconds=0)
    with pytest.raises(GuidanceError, match=r"^checksum: no guidance of sample s0, and the header of shard"):
        reader.get(handles[0])


def test_foreign_files_in_the_folder_are_left_alone(store: ShardStore, folder: Path) -> None:
    put_all(store, 1)
    (folder / "notes.txt").write_text("mine")
    (folder / "model.safetensors").write_bytes(b"x")
    assert store.flush(10)
    assert store.clear() == 1
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "notes.txt"]


def test_settings_make_the_store_and_bad_ones_are_named(tmp_path: Path) -> None:
    assert isinstance(make_store(GuidanceStoreConfig()), MemoryStore)
    config = GuidanceStoreConfig(url=str(tmp_path / "a/b"), queue_mb=3, wait_seconds=0.5, keep_gb=0.25, fsync=True)
    store = make_store(config)
    assert isinstance(store, ShardStore)
    assert (store._writer._queue_bytes, store._wait_seconds, store._keep_bytes) == (3 << 20, 0.5, 1 << 28)
    with store:
        put_all(store, 1)
        assert store.flush(10)
    assert len(shard_files(tmp_path / "a/b")) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(TracefpError, match=r"the guidance store at .*/file cannot be opened: .* \(guidance.url\)"):
        make_store(GuidanceStoreConfig(url=str(tmp_path / "file")))
    with pytest.raises(TracefpError, match=r"the guidance store's url nope://x cannot be opened"):
        ShardStore("nope://x")
    with pytest.raises(TracefpError, match="cannot be opened: No such file or directory"):
        ShardStore(str(tmp_path / "absent"), create=False)


def test_memory_store_reads_slices_too() -> None:
    store, record = MemoryStore(), make_record(rows=9)
    handle = store.put("s", record)
    got = store.get(handle, layers=[3], rows=(2, 5))
    assert (got.layers, got.rows) == ((3,), 3)
    assert torch.equal(got.sites["key"].payload, record.sites["key"].payload[1:, 2:5])
    scale = got.sites["expert_input"].encode_scale
    assert scale is not None
    assert torch.equal(scale, record.sites["expert_input"].encode_scale[1:, 2:5])  # type: ignore[index]
    with pytest.raises(GuidanceError, match=r"^layers: "):
        store.get(handle, layers=[2])


# -- kills --------------------------------------------------------------------------------------------------------


def test_kills_of_writers_and_readers_leave_no_torn_record_and_lose_none(tmp_path: Path) -> None:
    """20 of the 200 kills of the benchmark; in a process of its own, as it forks."""
    script = ROOT / "benchmarks" / "guidance_chaos.py"
    run = subprocess.run(
        [sys.executable, str(script), "--dir", str(tmp_path / "chaos"), "--kills", "20", "--seed", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.partition("acknowledged ")[2].partition(",")[0]) > 0
