"""The store on a disk: what was put is found by any process, and nothing that goes wrong there stops a rollout."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from stored import equal, is_missing, make_record, put_all, shard_files
from tracefp4.errors import TracefpError
from tracefp4.guidance import GuidanceError
from tracefp4.guidance.disk import GuidanceStoreConfig, ShardStore, make_store
from tracefp4.guidance.store import MemoryStore
from tracefp4.types import GuidanceHandle

ROOT = Path(__file__).parents[2]


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
        for path in (old, alive):  # a clock that is set forward makes files old
            os.utime(path, (time.time() - 7200,) * 2)
        assert store._files.remove_temps() == sorted([dead.name, old.name])
        dead.write_bytes(b"x")
        assert store.clear() == 0
        assert not dead.exists()
        assert alive.exists()
        assert foreign.exists()


# -- damage, settings ---------------------------------------------------------------------------------------------


def test_damage_is_named_and_a_damaged_header_is_not_called_missing(folder: Path) -> None:
    with ShardStore(str(folder), commit_seconds=600) as store:  # both in one shard, however slow the machine is
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
