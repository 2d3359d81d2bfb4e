"""verl's worker of a trainer apart from its rollout, where the weights are on the CPU already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker


class CopyingActorWorker(DetachActorWorker):
    """``separate_async`` keeps the weights of the last synchronization aside, to take old log-probs under them. verl
    saves them with ``Tensor.cpu()``, which on the CPU is no copy: the saved weights would move with the updates."""

    @property
    def copy_handler(self) -> Callable[[Any], Any]:
        save = super().copy_handler
        if self.config.actor.strategy != "fsdp2":
            return save

        def copy(module: Any) -> Any:
            state, spec = save(module)
            return {name: (local.clone(), where) for name, (local, where) in state.items()}, spec

        return copy
