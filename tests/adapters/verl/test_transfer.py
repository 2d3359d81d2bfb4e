"""Weights from a trainer to replicas of their own, without Ray's processes. Skipped where verl is not installed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")

import verl  # noqa: F401
from verl.checkpoint_engine import CheckpointEngineRegistry

from tracefp4.adapters.verl import engine, transfer
from tracefp4.adapters.verl.mailbox import Mailbox
from tracefp4.adapters.verl.server_adapter import ServerAdapter
from tracefp4.adapters.verl.transfer import RayCheckpointEngine, in_buckets
from tracefp4.errors import TracefpError

WEIGHTS = {"a": torch.arange(6.0), "b": torch.ones(2, 3), "c": torch.arange(40.0), "d": torch.zeros(1)}


def remote(mailbox: Mailbox) -> Any:
    """The mailbox as a Ray handle shows it."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=getattr(mailbox, name)) for name in ("open", "put", "get")})


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """ray.put gives something to await, as a reference is."""

    def put(value: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(value)
        return future

    monkeypatch.setattr(transfer.ray, "put", put)
    monkeypatch.setattr(engine, "recipe_hash", "feed")
    monkeypatch.setattr(engine, "published_version", None)
    monkeypatch.setattr(transfer, "sender_recipe_hash", None)


async def collect(weights: AsyncIterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: w async for name, w in weights}


async def send(receivers: int, version: int = 3, expected: int = 3) -> list[dict[str, Tensor]]:
    """What each of the receivers gets of WEIGHTS, two trainer ranks sending."""
    mailbox = Mailbox()
    await mailbox.open(receivers)
    engines = [CheckpointEngineRegistry.new("tracefp4", bucket_size=48, is_master=rank == 0) for rank in (0, 1)]
    receiving = [CheckpointEngineRegistry.new("tracefp4", bucket_size=48) for _ in range(receivers)]
    for e in engines:
        e.init_process_group(remote(mailbox), -1)
    for i, e in enumerate(receiving):
        e.init_process_group(remote(mailbox), i)
    results = await asyncio.gather(
        *(e.send_weights(iter(WEIGHTS.items()), global_steps=version) for e in engines),
        *(collect(e.receive_weights(global_steps=expected)) for e in receiving),
    )
    for e in engines + receiving:
        e.finalize()
    return list(results[2:])


def test_every_replica_gets_all_weights_and_the_trainers_recipe() -> None:
    for got in asyncio.run(send(3)):
        assert got.keys() == WEIGHTS.keys()
        assert all(torch.equal(got[name], WEIGHTS[name]) for name in WEIGHTS)
    assert transfer.sender_recipe_hash == "feed"
    assert engine.published_version == 3


def test_weights_of_another_version_are_refused() -> None:
    with pytest.raises(TracefpError, match="waits for weights of version 4 and got"):
        asyncio.run(send(1, version=3, expected=4))


def test_a_trainer_without_the_guided_forward_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "recipe_hash", None)
    with pytest.raises(TracefpError, match="this worker's model was not prepared by it"):
        asyncio.run(send(1))


def test_buckets_hold_what_fits_and_are_copies() -> None:
    async def run() -> list[dict[str, Tensor]]:
        return [bucket async for bucket in in_buckets(WEIGHTS.items(), 48, torch.float32)]

    buckets = asyncio.run(run())
    assert [list(b) for b in buckets] == [["a", "b"], ["c"], ["d"]]
    assert buckets[0]["a"].data_ptr() != WEIGHTS["a"].data_ptr()


def test_the_driver_opens_one_mailbox_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    async def open_(receivers: int) -> None:
        opened.append(receivers)

    monkeypatch.setattr(RayCheckpointEngine, "_mailbox", SimpleNamespace(open=SimpleNamespace(remote=open_)))
    monkeypatch.setattr(transfer.ray, "get", asyncio.run)
    actor, rollout = RayCheckpointEngine.build_topology(2, 3, [{}] * 5)
    assert opened == [3]
    assert actor["receiver"] == [-1, -1]
    assert rollout["receiver"] == [0, 1, 2]
    assert len(actor["mailbox"]) == 2


def test_a_separate_replica_commits_under_the_hash_that_came_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    committed = []

    async def receive(bucket: dict[str, Tensor]) -> None:
        assert all(w.dtype is torch.bfloat16 for w in bucket.values())

    async def commit(version: int, recipe_hash: str) -> None:
        committed.append((version, recipe_hash))

    async def weights() -> AsyncIterator[tuple[str, Tensor]]:
        for item in WEIGHTS.items():
            yield item
        transfer.sender_recipe_hash = "beef"

    monkeypatch.setattr(engine, "recipe_hash", None)
    adapter: Any = ServerAdapter.__new__(ServerAdapter)
    adapter.config = SimpleNamespace(
        dtype="bfloat16", checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1)
    )
    settings = {"model_config": {}, "tracefp4": {"method": "qat"}}
    adapter.model_config = SimpleNamespace(override_config=settings)
    adapter.device_mesh = None
    adapter._server = SimpleNamespace(
        receive_weights=SimpleNamespace(remote=receive), commit_weights=SimpleNamespace(remote=commit)
    )
    asyncio.run(adapter.update_weights(weights(), global_steps=5))
    assert committed == [(5, "beef")]
