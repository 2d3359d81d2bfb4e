"""Containers for guidance on the same work, beside what the disk does by itself in the same run.

python benchmarks/guidance_store.py --dir DIR [--rows 4096,512] [--layers 20,48] [--mib 256] [--rounds 5] [--fsync]

Records of rows x layers x (288 + 72 + 72) bytes with power-of-two encode scales are written, read whole and read in
slices (every other sample, the middle half of its rows, every fourth layer). Every container checksums chunks of 256
rows with XXH3-64 and checks what it reads. Each round also times, on the same disk and the same bytes: a sequential
copy of a file, a plain write from memory, a plain read into one reused buffer. Ratios are taken within a round; the
table gives medians and [lowest, highest].

"cold": after fsync the file's pages are dropped (posix_fadvise DONTNEED), so bytes come from the device; a virtual
machine's host may still cache them. "cached": from the page cache. Writes start with clean pages (sync).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from tracefp4.guidance.disk import ShardStore
from tracefp4.guidance.shards import CHUNK_ROWS
from tracefp4.guidance.store import SiteRows, TrajectoryGuidance

WIDTHS = {"expert_input": 288, "key": 72, "value": 72}
Records = dict[str, TrajectoryGuidance]
Picked = tuple[list[str], list[int], tuple[int, int]]


def make_records(count: int, rows: int, layers: int) -> Records:
    g = torch.Generator().manual_seed(0)
    out = {}
    for k in range(count):
        sites = {}
        for site, width in WIDTHS.items():
            payload = torch.randint(0, 2**62, (layers, rows, width // 8), generator=g).view(torch.uint8)
            scale = torch.exp2(torch.randint(0, 8, (layers, rows), generator=g).float())
            sites[site] = SiteRows(payload, scale if site == "expert_input" else torch.tensor(1.0))
        ids = torch.arange(rows, dtype=torch.int32)
        valid = torch.ones(rows, dtype=torch.bool)
        out[f"s{k}"] = TrajectoryGuidance("0" * 16, 1.125, tuple(range(layers)), sites, ids, ids, valid)
    return out


# --- the containers: write(folder, records, fsync), read(folder, what) -> bytes delivered -----------------


def chunk_sums(payload: torch.Tensor) -> np.ndarray:
    G, R, W = payload.shape
    data = memoryview(payload.numpy().reshape(-1))
    ends = [(g * R + min(r + CHUNK_ROWS, R)) * W for g in range(G) for r in range(0, R, CHUNK_ROWS)]
    starts = [(g * R + r) * W for g in range(G) for r in range(0, R, CHUNK_ROWS)]
    sums = [xxhash.xxh3_64_intdigest(data[a:b]) for a, b in zip(starts, ends, strict=True)]
    return np.array(sums, np.uint64).reshape(G, -1)


def check(data: memoryview, sums: np.ndarray, width: int) -> None:
    """data: whole chunks of one layer."""
    for k, expected in enumerate(sums.tolist()):
        if xxhash.xxh3_64_intdigest(data[k * CHUNK_ROWS * width : (k + 1) * CHUNK_ROWS * width]) != expected:
            raise SystemExit("a checksum does not match")


def chunks_of(rows: tuple[int, int]) -> tuple[int, int]:
    return rows[0] // CHUNK_ROWS, -(-rows[1] // CHUNK_ROWS)


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_safetensors(folder: Path, records: Records, fsync: bool) -> None:
    for name, record in records.items():
        tensors = {}
        for site, data in record.sites.items():
            tensors[site] = data.payload
            tensors[f"{site}.sums"] = torch.from_numpy(chunk_sums(data.payload).view(np.int64))
        save_file(tensors, folder / f"{name}.safetensors")
        if fsync:
            sync_file(folder / f"{name}.safetensors")


def read_safetensors(folder: Path, picked: Picked) -> int:
    samples, layers, rows = picked
    first, last = chunks_of(rows)
    total = 0
    for name in samples:
        with safe_open(folder / f"{name}.safetensors", "pt") as f:
            for site, width in WIDTHS.items():
                sums = f.get_tensor(f"{site}.sums").numpy().view(np.uint64)
                part = f.get_slice(site)
                for layer in layers:
                    got = part[layer, first * CHUNK_ROWS : last * CHUNK_ROWS]
                    check(memoryview(got.numpy().reshape(-1)), sums[layer, first:last], width)
                    total += got.numel()
    return total


def write_arrow(folder: Path, records: Records, fsync: bool) -> None:
    schema = pa.schema([("payload", pa.large_binary()), ("sums", pa.binary())])
    for name, record in records.items():
        with pa.OSFile(str(folder / f"{name}.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for data in record.sites.values():
                G, layer = len(record.layers), data.payload[0].numel()
                offsets = pa.py_buffer(np.arange(0, (G + 1) * layer, layer, dtype=np.int64))
                values = pa.py_buffer(data.payload.numpy())
                payload = pa.Array.from_buffers(pa.large_binary(), G, [None, offsets, values])
                sums = pa.array([row.tobytes() for row in chunk_sums(data.payload)], pa.binary())
                writer.write_batch(pa.record_batch([payload, sums], schema=schema))
        if fsync:
            sync_file(folder / f"{name}.arrow")


def read_arrow(folder: Path, picked: Picked) -> int:
    samples, layers, rows = picked
    first, last = chunks_of(rows)
    total = 0
    for name in samples:
        with pa.memory_map(str(folder / f"{name}.arrow")) as source:
            reader = pa.ipc.open_file(source)
            for i, width in enumerate(WIDTHS.values()):
                batch = reader.get_batch(i)
                for layer in layers:
                    row = memoryview(batch[0][layer].as_buffer())
                    part = row[first * CHUNK_ROWS * width : last * CHUNK_ROWS * width]
                    check(part, np.frombuffer(batch[1][layer].as_py(), np.uint64)[first:last], width)
                    total += len(torch.frombuffer(bytearray(part), dtype=torch.uint8))  # a tensor outlives the map
    return total


def write_map(folder: Path, records: Records, fsync: bool) -> None:
    for name, record in records.items():
        with open(folder / f"{name}.bin", "wb", buffering=0) as f:
            shapes = {site: list(data.payload.shape) for site, data in record.sites.items()}
            f.write(json.dumps(shapes).encode().ljust(4096))
            for data in record.sites.values():
                f.write(chunk_sums(data.payload))
                f.write(data.payload.numpy())
            if fsync:
                os.fsync(f.fileno())


def read_map(folder: Path, picked: Picked) -> int:
    samples, layers, rows = picked
    first, last = chunks_of(rows)
    total = 0
    for name in samples:
        with open(folder / f"{name}.bin", "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
            at = 4096
            for G, R, W in json.loads(m[:4096]).values():
                n = -(-R // CHUNK_ROWS)
                sums = np.frombuffer(m[at : at + 8 * G * n], np.uint64).reshape(G, n)
                at += 8 * G * n
                for layer in layers:
                    start = at + layer * R * W
                    part = m[start + first * CHUNK_ROWS * W : start + min(last * CHUNK_ROWS, R) * W]
                    check(memoryview(part), sums[layer, first:last], W)
                    total += len(part)
                at += G * R * W
    return total


def write_store(folder: Path, records: Records, fsync: bool) -> None:
    """Through the queue and the thread, as a rollout does."""
    with ShardStore(str(folder), fsync=fsync, queue_bytes=1 << 40) as store:
        for name, record in records.items():
            store.put(name, record)
        if not store.flush(600):
            raise SystemExit("the store could not be flushed")


def read_store(folder: Path, picked: Picked) -> int:
    from tracefp4.types import GuidanceHandle

    samples, layers, rows = picked
    store = ShardStore(str(folder), create=False)
    total = 0
    for name in samples:
        got = store.get(GuidanceHandle(name, ROWS[0], "0" * 16), layers, rows)
        total += sum(data.payload.numel() for data in got.sites.values())
    return total


ROWS = [0]
"""Rows of a record of the present case: what handles say."""

CONTAINERS: dict[str, tuple[Callable[[Path, Records, bool], None], Callable[[Path, Picked], int]]] = {
    "ShardStore": (write_store, read_store),
    "safetensors library": (write_safetensors, read_safetensors),
    "Arrow IPC": (write_arrow, read_arrow),
    "own binary, mapped": (write_map, read_map),
}


# --- what the disk does by itself ------------------------------------------------------------------------


def files_in(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.iterdir()) if p.is_file()]


def drop_pages(folder: Path) -> None:
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm_pages(folder: Path) -> None:
    plain_read(folder)


def plain_write(folder: Path, records: Records, fsync: bool) -> None:
    fd = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT)
    for record in records.values():
        for data in record.sites.values():
            view = memoryview(data.payload.numpy().reshape(-1))
            while len(view):
                view = view[os.write(fd, view) :]
    if fsync:
        os.fsync(fd)
    os.close(fd)


def plain_read(folder: Path) -> None:
    buffer = bytearray(1 << 20)
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        while os.readv(fd, [buffer]):
            pass
        os.close(fd)


def copy_files(source: Path, target: Path, fsync: bool) -> None:
    for path in files_in(source):
        shutil.copyfile(path, target / path.name)
        if fsync:
            sync_file(target / path.name)


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def one_round(folder: Path, records: Records, fsync: bool, turn: int) -> Iterator[tuple[str, str, float, float]]:
    """Yields (container, what, bytes, seconds)."""
    first = next(iter(records.values()))
    rows, layers = first.rows, len(first.layers)
    total = sum(data.payload.numel() for r in records.values() for data in r.sites.values())
    whole: Picked = (list(records), list(range(layers)), (0, rows))
    part: Picked = (list(records)[::2], list(range(0, layers, 4)), (rows // 4, rows - rows // 4))

    def fresh(name: str) -> Path:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        os.sync()
        return folder / name

    plain, copied = fresh("plain"), fresh("copied")
    yield "disk", "write", total, timed(lambda: plain_write(plain, records, fsync))
    drop_pages(plain)
    yield "disk", "copy cold", total, timed(lambda: copy_files(plain, copied, fsync))
    copied = fresh("copied")
    yield "disk", "copy", total, timed(lambda: copy_files(plain, copied, fsync))
    shutil.rmtree(copied)
    drop_pages(plain)
    yield "disk", "read cold", total, timed(lambda: plain_read(plain))
    yield "disk", "read", total, timed(lambda: plain_read(plain))
    shutil.rmtree(plain)
    names = list(CONTAINERS)
    for name in names[turn % len(names) :] + names[: turn % len(names)]:  # the first has the coldest memory
        write, read = CONTAINERS[name]
        at = fresh("container")
        yield name, "write", total, timed(lambda at=at, write=write: write(at, records, fsync))
        for what, picked in (("", whole), ("slice ", part)):
            for state, prepare in (("cold", drop_pages), ("cached", warm_pages)):
                prepare(at)
                got = [0]
                seconds = timed(lambda r=read, a=at, p=picked, g=got: g.__setitem__(0, r(a, p)))
                yield name, f"{what}read {state}", got[0], seconds
        shutil.rmtree(at)


def spread(values: list[float], form: str = ".2f") -> str:
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def report(rounds: list[dict[tuple[str, str], tuple[float, float]]]) -> None:
    def rate(r: dict, key: tuple[str, str]) -> float:
        return r[key][0] / r[key][1] / 1e9

    for what in ("write", "copy", "copy cold", "read cold", "read"):
        print(f"  disk by itself, {what:<10} {spread([rate(r, ('disk', what)) for r in rounds])} GB/s")
    print(f"  {'':<20} {'':<17} {'GB/s':>20} {'over copy':>20} {'over plain':>20}")
    pairs = {"write": ("copy", "write"), "read cold": ("copy cold", "read cold"), "read cached": ("copy", "read")}
    for name in CONTAINERS:
        for what in ("write", "read cold", "read cached", "slice read cold", "slice read cached"):
            own = [rate(r, (name, what)) for r in rounds]
            line = f"  {name:<20} {what:<17} {spread(own):>20}"
            if what in pairs:
                for base in pairs[what]:
                    line += f" {spread([o / rate(r, ('disk', base)) for o, r in zip(own, rounds, strict=True)]):>20}"
            print(line)


def hash_speed() -> None:
    data = memoryview(np.random.default_rng(0).integers(0, 256, 32 << 20, dtype=np.uint8))
    for name, function in (("zlib.crc32", zlib.crc32), ("xxh3_64", xxhash.xxh3_64_intdigest)):
        for width in (72, 288):
            step = CHUNK_ROWS * width
            seconds = [
                timed(lambda f=function, s=step: [f(data[a : a + s]) for a in range(0, len(data), s)]) for _ in "12345"
            ]
            print(f"{name}, chunks of {step} bytes: {len(data) / statistics.median(seconds) / 1e9:.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--rows", default="4096,512")
    parser.add_argument("--layers", default="20,48")
    parser.add_argument("--mib", type=int, default=256, help="about this much per case")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fsync", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}, pyarrow {pa.__version__}; fsync {args.fsync}; {args.rounds} rounds"
    )
    hash_speed()
    for rows in map(int, args.rows.split(",")):
        for layers in map(int, args.layers.split(",")):
            count = max(2, (args.mib << 20) // (rows * layers * sum(WIDTHS.values())))
            ROWS[0] = rows
            records = make_records(count, rows, layers)
            print(
                f"{count} records of {rows} rows x {layers} layers, {count * rows * layers * 432 / 2**20:.0f} MiB",
                flush=True,
            )
            rounds = []
            for turn in range(args.rounds):
                rounds.append(
                    {(c, what): (n, s) for c, what, n, s in one_round(args.dir / "bench", records, args.fsync, turn)}
                )
            shutil.rmtree(args.dir / "bench")
            report(rounds)


if __name__ == "__main__":
    main()
