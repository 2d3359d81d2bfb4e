"""Trainer modes in which something breaks while a step is rolled out; verl loads this as an external module.

Faults come from inside the run, whose Ray cluster is the only one that they can reach.
"""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any

import ray
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer

from tracefp4.adapters.verl.trainer import (
    TracefpTrainerColocateAsync,
    TracefpTrainerSeparateAsync,
    TracefpTrainerSync,
)


class _Fault(PPOTrainer):
    step_struck = 2

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        if self.global_steps == self.step_struck:
            self.strike()

    def strike(self) -> None:
        raise NotImplementedError


class _ReplicaDies(_Fault):
    def strike(self) -> None:
        from tracefp4.adapters.verl.replica import (
            server_name,
        )  # not above: the server's process imports verl from there

        ray.kill(ray.get_actor(server_name(0)))


@register_trainer("fault_replica")
class ReplicaDies(_ReplicaDies, TracefpTrainerSync):
    pass


@register_trainer("fault_replica_async")
class ReplicaDiesAsync(_ReplicaDies, TracefpTrainerColocateAsync):
    pass


@register_trainer("fault_worker")
class WorkerDies(_Fault, TracefpTrainerSync):
    def strike(self) -> None:
        self.actor_rollout_wg.workers[0].__ray_call__.remote(_kill_itself)


@register_trainer("fault_store")
class StoreIsRemoved(_Fault, TracefpTrainerSync):
    def strike(self) -> None:
        shutil.rmtree(self.config.actor_rollout_ref.model.override_config.tracefp4.guidance.url)


@register_trainer("fault_trainer_separate")
class TrainerIsKilled(_Fault, TracefpTrainerSeparateAsync):
    step_struck = 4

    def strike(self) -> None:
        _kill_itself(self)


def _kill_itself(worker: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
