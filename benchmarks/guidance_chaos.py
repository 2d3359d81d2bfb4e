"""Kills writers and readers of a guidance store at random moments (SIGKILL) and checks what is left after each.

python benchmarks/guidance_chaos.py --dir DIR [--kills 200] [--seed 0]

Held: no torn record is ever accepted (every sample that the index knows is read whole and compared with what was put);
every record whose put and flush had returned before the kill is readable; no reader fails, those that run beside the
kills included; once the temp files of the dead are removed, nothing but shards is left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from tracefp4.guidance import GuidanceError
from tracefp4.guidance.disk import ShardStore
from tracefp4.guidance.store import SiteRows, TrajectoryGuidance
from tracefp4.types import GuidanceHandle


def make_record(seed: int) -> TrajectoryGuidance:
    """A function of the seed alone; of 1 to 3000 rows, so that a write takes a while to interrupt."""
    g = torch.Generator().manual_seed(seed)
    rows, layers = int(torch.randint(1, 3000, (1,), generator=g)), (0, 2, 3)
    payload = torch.randint(0, 2**62, (len(layers), rows, 36), generator=g).view(torch.uint8)
    scale = torch.exp2(torch.randint(0, 8, (len(layers), rows), generator=g).float())
    ids = torch.randint(0, 1000, (rows,), dtype=torch.int32, generator=g)
    valid = torch.ones(rows, dtype=torch.bool)
    return TrajectoryGuidance("r", 1.125, layers, {"expert_input": SiteRows(payload, scale)}, ids, ids * 0, valid)


def sample_seed(sample_id: str) -> int:
    return int(sample_id.removeprefix("s"))


def write_forever(folder: Path, first: int, acknowledged: Path) -> None:
    """Notes an id only once its put and a flush have returned."""
    rng = random.Random(first)
    # With fsync a shard is longer under its temporary name.
    store = ShardStore(str(folder), commit_seconds=0.002, fsync=rng.random() < 0.7)
    at = first
    with open(acknowledged, "a", buffering=1) as log:
        while True:
            ids = [f"s{at + i}" for i in range(rng.randint(1, 4))]
            at += len(ids)
            for sample_id in ids:
                if store.put(sample_id, make_record(sample_seed(sample_id))) is None:
                    raise AssertionError(f"{sample_id} was dropped")
            if not store.flush(60):
                raise AssertionError("a flush timed out")
            log.write("".join(f"{i}\n" for i in ids))


def check_sample(store: ShardStore, sample_id: str) -> None:
    want = make_record(sample_seed(sample_id))
    got = store.get(GuidanceHandle(sample_id, want.rows, "r"))
    if got.checksum() != want.checksum():
        raise AssertionError(f"{sample_id} is not what was put")


def read_forever(folder: Path, stop: Path) -> None:
    """Reads whatever is there, newest first, until told to stop; any error but "missing" ends it."""
    store = ShardStore(str(folder), create=False, wait_seconds=0)
    rng = random.Random(os.getpid())
    while not stop.exists():
        store.refresh()
        known = [entry.sample_id for _, entry in store._index.samples()]
        for sample_id in rng.sample(known, min(3, len(known))):
            check_sample(store, sample_id)
        try:
            store.get(GuidanceHandle("never", 1, "r"))
        except GuidanceError as error:
            if not str(error).startswith("missing: "):
                raise


def fork(job: Callable[..., None], *arguments: object) -> int:
    """A child process; it exits 1 where the job raises."""
    pid = os.fork()
    if pid:
        return pid
    try:
        job(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def wait_for_size(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size):
        if time.monotonic() > deadline:
            raise AssertionError(f"no writer reached {path}")
        time.sleep(0.002)


def acknowledged_ids(folder: Path) -> list[str]:
    """Ids in the logs; a last line without its end was being written by the killed process and does not count."""
    return [line[:-1] for p in sorted(folder.glob("*.ack")) for line in open(p) if line.endswith("\n")]


def run(base: Path, kills: int, seed: int) -> dict[str, int]:
    """Returns what happened; raises AssertionError where a promise is broken."""
    folder, stop = base / "store", base / "stop"
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    steady = fork(read_forever, folder, stop)
    counts = {"writers killed": 0, "readers killed": 0, "killed in a write": 0}
    checked = 0
    for n in range(kills):
        is_writer = rng.random() < 0.7
        if is_writer:
            victim = fork(write_forever, folder, 1_000_000 * n, base / f"{n}.ack")
        else:
            victim = fork(read_forever, folder, stop)
        if is_writer and rng.random() < 0.5:  # once it has acknowledged something; else possibly before its first write
            wait_for_size(base / f"{n}.ack")
        time.sleep(rng.uniform(0.0, 0.1))
        os.kill(victim, signal.SIGKILL)
        _, status = os.waitpid(victim, 0)
        if not os.WIFSIGNALED(status):
            raise AssertionError("a process ended by itself before it was killed")
        counts["writers killed" if is_writer else "readers killed"] += 1
        counts["killed in a write"] = len(list(folder.glob(".tmp*")))
        promised = acknowledged_ids(base)
        reader = ShardStore(str(folder), create=False, wait_seconds=0)
        for sample_id in promised[checked:]:
            check_sample(reader, sample_id)
        if reader._index.damaged():
            raise AssertionError(f"a torn shard was published: {reader._index.damaged()}")
        checked = len(promised)
    stop.touch()
    _, status = os.waitpid(steady, 0)
    if status:
        raise AssertionError("the reader beside the kills failed")
    store = ShardStore(str(folder), wait_seconds=0)
    known = [entry.sample_id for _, entry in store._index.samples()]
    for sample_id in known:
        check_sample(store, sample_id)
    lost = set(acknowledged_ids(base)) - set(known)
    if lost:
        raise AssertionError(f"acknowledged records are gone: {sorted(lost)[:5]}")
    store._files.remove_temps()
    left = [p.name for p in folder.iterdir() if not p.name.endswith(".safetensors")]
    if left:
        raise AssertionError(f"left behind: {left}")
    return counts | {"acknowledged": checked, "readable": len(known), "shards": len(store._index.headers())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True, help="an empty or absent folder")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    counts = run(args.dir, args.kills, args.seed)
    print(", ".join(f"{name} {count}" for name, count in counts.items()), f"in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
