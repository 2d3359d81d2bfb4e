"""The rollout as a worker sees it: weights go out under a policy version and the recipe's hash.

The worker trains (sync, colocate_async), or gets the weights from one that does (separate_async).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import BaseRollout

from tracefp4.adapters.verl import engine, transfer
from tracefp4.adapters.verl.replica import server_name
from tracefp4.adapters.verl.settings import KEY, AdapterSettings, read_settings
from tracefp4.adapters.verl.transfer import in_buckets
from tracefp4.errors import TracefpError


class ServerAdapter(BaseRollout):
    """Rank r of the trainer feeds replica r; the worker of a separate replica feeds its own."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, *args: Any, replica_rank: int = -1, **kwargs: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank < 0 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None

    @property
    def server(self) -> Any:
        """Looked up late: servers start after the workers."""
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        if "kv_cache" in tags:
            await self.server.wake_up.remote()

    async def release(self) -> None:
        await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Sends all weights in buckets, then puts them in use as version ``global_steps``.

        Raises TracefpError where this process trains without the guided forward, or verl sends something else than
        whole tensors of a known version.
        """
        if wire_format != "named_tensors" or peft_config is not None or global_steps is None:
            raise TracefpError(
                "rollout.name=tracefp4 takes whole tensors of a known version: use a checkpoint engine that sends "
                "named tensors, and merge adapters (actor_rollout_ref.model.lora.merge=True)"
            )
        settings = read_settings(self.model_config.override_config)
        if settings is None:
            raise TracefpError(f"rollout.name=tracefp4 needs {KEY}.method, such as trace")
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        dtype = getattr(torch, settings.dtype(self.config.dtype))
        async for bucket in in_buckets(weights, limit, dtype):
            await self.server.receive_weights.remote(bucket)
        # Only now: a checkpoint engine brings the sender's hash along with the weights.
        await self.server.commit_weights.remote(global_steps, self._recipe_hash(settings))
        engine.published_version = global_steps

    def _recipe_hash(self, settings: AdapterSettings) -> str:
        """Of the model that was really trained: by this process, or by the one that sent the weights.

        Where neither says (a checkpoint engine of verl), that of the settings.
        """
        known = engine.recipe_hash or transfer.sender_recipe_hash
        if known is not None:
            return known
        if self.device_mesh is not None:  # a trainer worker, whose engine should have been prepared
            raise TracefpError(
                "this worker's model was not prepared for rollout.name=tracefp4: its engine is not tracefp4's (use "
                "actor_rollout_ref.actor.strategy=fsdp2 or megatron, and leave VERL_ENGINE_DEVICE and "
                "VERL_ENGINE_VENDOR unset)"
            )
        return settings.recipe(self.model_config.hf_config.num_hidden_layers).hash
