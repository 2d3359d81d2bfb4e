"""An engine that writes to a disk and a trainer's side that reads it in another store: the same rows as in memory."""

from __future__ import annotations

from pathlib import Path

from tiny import make_engine, tiny_requests
from tracefp4.guidance.disk import ShardStore
from tracefp4.recipe import QuantRecipe
from tracefp4.train.slices import RowCounts, fetch
from tracefp4.types import Trajectory


def fetched(store: ShardStore, trajectories: list[Trajectory], recipe: QuantRecipe) -> tuple[list[int | None], dict]:
    counts = RowCounts()
    records = [fetch(store, t.guidance, t, recipe, counts) for t in trajectories]
    return [None if r is None else r.checksum() for r in records], dict(counts.reasons)


def test_the_trainer_reads_from_the_disk_what_it_would_read_from_memory(tmp_path: Path) -> None:
    requests = tiny_requests(6, probe_every=3)
    memory = make_engine()
    want = [memory.store.get(t.guidance).checksum() for t in memory.generate(requests) if t.guidance]
    with ShardStore(str(tmp_path)) as store:
        engine = make_engine(store=store)
        trajectories = engine.generate(requests)
        assert store.flush(30)
        reader = ShardStore(str(tmp_path), create=False, wait_seconds=0)
        assert fetched(reader, trajectories, engine.recipe) == (want, {})
        probe = trajectories[0].probe
        assert probe is not None
        assert reader.get(probe).bits == 4.5
        store.discard([h for t in trajectories for h in (t.guidance, t.probe) if h])
        assert list(tmp_path.iterdir()) == []
        _, reasons = fetched(reader, trajectories, engine.recipe)
        assert reasons == {"missing": sum(t.num_rows for t in trajectories)}


def test_dropped_and_damaged_guidance_falls_back_and_is_counted(tmp_path: Path) -> None:
    requests = tiny_requests(2)
    with ShardStore(str(tmp_path / "a"), queue_bytes=1) as store:
        engine = make_engine(store=store)
        trajectories = engine.generate(requests)
        assert [t.guidance for t in trajectories] == [None, None]
        rows = sum(t.num_rows for t in trajectories)
        assert fetched(store, trajectories, engine.recipe) == ([None, None], {"missing": rows})
    with ShardStore(str(tmp_path / "b")) as store:
        engine = make_engine(store=store)
        trajectories = engine.generate(requests)
        assert store.flush(30)
        [path] = (tmp_path / "b").iterdir()
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        records, reasons = fetched(store, trajectories, engine.recipe)
        assert [r is None for r in records] == [False, True]
        assert reasons == {"checksum": trajectories[1].num_rows}
