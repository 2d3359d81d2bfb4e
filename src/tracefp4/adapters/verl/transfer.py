"""Weights from a trainer to rollout replicas of their own, through Ray's object store.

verl's checkpoint engines for a separate rollout (nccl, nixl, ...) need CUDA or NPU devices; this one runs anywhere,
under ``actor_rollout_ref.rollout.checkpoint_engine.backend=tracefp4``. On GPUs verl's nccl is made for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import ray
import torch
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from tracefp4.adapters.verl import engine
from tracefp4.adapters.verl.mailbox import Mailbox
from tracefp4.errors import TracefpError

BACKEND = "tracefp4"

sender_recipe_hash: str | None = None
"""Recipe of the trainer that last sent weights to this process; None where none did."""


async def in_buckets(
    weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
    limit: int,
    dtype: torch.dtype | None = None,
) -> AsyncIterator[dict[str, Tensor]]:
    """Copies on the CPU, as many as fit in ``limit`` bytes at a time; a larger tensor goes alone."""
    bucket: dict[str, Tensor] = {}
    size = 0
    async for name, weight in ensure_async_iterator(weights):
        held = weight.detach().to("cpu", dtype, copy=True)
        if bucket and size + held.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = held
        size += held.nbytes
    if bucket:
        yield bucket


class RayCheckpointEngine(CheckpointEngine):
    """verl's interface; ``is_master`` is the trainer's first rank, which sends.

    All ranks walk through the weights, since gathering a sharded one takes all of them.
    """

    _mailbox: Any = None  # the driver's, kept for all updates

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self.mailbox: Any = None
        self.receiver = -1

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        if cls._mailbox is None:
            cls._mailbox = ray.remote(Mailbox).options(num_cpus=0).remote()
        ray.get(cls._mailbox.open.remote(rollout_world_size))
        actor = {"mailbox": [cls._mailbox] * actor_wg_world_size, "receiver": [-1] * actor_wg_world_size}
        rollout = {"mailbox": [cls._mailbox] * rollout_world_size, "receiver": list(range(rollout_world_size))}
        return actor, rollout

    def init_process_group(self, mailbox: Any, receiver: int) -> None:
        self.mailbox, self.receiver = mailbox, receiver

    def finalize(self) -> None:
        self.mailbox = None

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Raises TracefpError where this process trains without the guided forward."""
        if engine.recipe_hash is None:
            raise TracefpError(
                f"checkpoint_engine.backend={BACKEND} sends weights that tracefp4 trains, and this worker's model was "
                "not prepared by it; set actor_rollout_ref.actor.strategy=fsdp2 or megatron"
            )
        if self.is_master:
            await self.mailbox.put.remote({"recipe": engine.recipe_hash, "version": global_steps})
        async for bucket in in_buckets(weights, self.bucket_size):
            if self.is_master:
                await self.mailbox.put.remote({"bucket": [ray.put(bucket)]})
        if self.is_master:
            await self.mailbox.put.remote({"end": True})
        engine.published_version = global_steps
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Raises TracefpError where another version arrives than was asked for."""
        global sender_recipe_hash
        header = await self.mailbox.get.remote(self.receiver)
        if header.get("version") != global_steps or "recipe" not in header:
            raise TracefpError(f"rollout worker {self.receiver} waits for weights of version {global_steps} and got "
                               f"{header}")  # fmt: skip
        sender_recipe_hash = header["recipe"]
        while "end" not in (message := await self.mailbox.get.remote(self.receiver)):
            (reference,) = message["bucket"]
            for name, weight in (await reference).items():
                yield name, weight


def register() -> None:
    CheckpointEngineRegistry.register(BACKEND)(RayCheckpointEngine)
