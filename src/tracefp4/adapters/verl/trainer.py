"""verl's trainers with this package's metrics, under ``trainer.v1.trainer_mode=tracefp4_sync`` and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import open_dict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.device import get_device_name

from tracefp4.adapters.verl.figures import rename_figures, segment_metrics
from tracefp4.adapters.verl.losses import select_loss
from tracefp4.adapters.verl.rows import note_of
from tracefp4.adapters.verl.settings import KEY, read_settings
from tracefp4.align.metrics import importance_metrics, mismatch_metrics
from tracefp4.errors import TracefpError

MANAGER = "tracefp4.adapters.verl.agent_loop.GuidedAgentLoopManager"
"""Value of ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``."""

# A Ray worker that unpickles a class of ours imports that class's module first, the module imports verl, and verl
# loads the plugin, which imports this module: so what Ray pickles (clients, workers) is imported where it is used.


class _Figures(PPOTrainer):
    """What a mode adds: metrics, a check of the settings before anything is started, and the agent-loop
    manager that carries the handles, unless the config names one."""

    stock_mode: str

    def __init__(self, config: Any) -> None:
        settings = read_settings(config.actor_rollout_ref.model.override_config)
        if settings is None:
            raise TracefpError(f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode} needs {KEY}.method")
        if not config.actor_rollout_ref.rollout.calculate_log_probs:
            raise TracefpError("set actor_rollout_ref.rollout.calculate_log_probs=True: the distance needs log-probs")
        with open_dict(config):
            if chosen := select_loss(config, settings.mode):
                print(f"tracefp4: method {settings.method} sets actor_rollout_ref.actor: {chosen}")
            config.trainer.v1.trainer_mode = self.stock_mode  # verl compares it with its own names
            agent = config.actor_rollout_ref.rollout.agent
            agent.agent_loop_manager_class = agent.get("agent_loop_manager_class") or MANAGER
        super().__init__(config)

    def fit(self, agent_loop_manager: Any) -> None:
        """Raises TracefpError where verl stopped because a rollout server had died."""
        try:
            super().fit(agent_loop_manager)
        except Exception as error:
            self._check_servers(error)
            raise

    def _add_prompts_to_generate(self, num_prompts: int) -> Any:
        self._check_servers()  # of a dead server every prompt fails, and verl would replace them for ever
        return super()._add_prompts_to_generate(num_prompts)

    def _check_servers(self, error: Exception | None = None) -> None:
        """Raises TracefpError where rollout servers died, because of ``error``."""
        servers = [server for manager in self._rollout_server_managers() for server in manager.server_handles]
        if dead := dead_servers(servers):
            raise TracefpError(
                f"{dead} of {len(servers)} rollout servers of rollout.name=tracefp4 died (the node's Ray logs say why; "
                "often it is memory): start again with trainer.resume_mode=auto"
            ) from error

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        wanted = self.config.data.train_batch_size // self.parameter_sync_step * self.config.actor_rollout_ref.rollout.n
        metrics["rollout/missing_responses"] = float(max(0, wanted - len(batch.keys)))  # verl pads them with nothing
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)
        correction = self.config.algorithm.rollout_correction
        bypass = correction.get("bypass_mode", False)  # old log-probs are the rollout's: there is no distance to see
        fields = ["extra_fields", *([] if bypass else ["old_log_probs", "rollout_log_probs", "response_mask"])]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        if notes := [note for extra in data["extra_fields"] if (note := note_of(extra)) is not None]:
            metrics.update(segment_metrics(notes, self.global_steps - 1))
        if bypass:
            return batch
        old, rollout = _flat(data["old_log_probs"]), _flat(data["rollout_log_probs"])
        mask = _flat(data["response_mask"]).bool()
        metrics.update(mismatch_metrics(old[mask], rollout[mask]))
        cap = correction.get("rollout_is_threshold") or 5.0
        upper = float(str(cap).rpartition("_")[2])  # verl also takes "lower_upper"
        metrics.update(importance_metrics(old[mask] - rollout[mask], upper))
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._update_actor(batch, metrics)
        rename_figures(metrics)
        return batch


def dead_servers(servers: Sequence[Any], seconds: float = 10.0) -> int:
    """How many of these rollout servers (actor handles) have died; one that only takes long has not."""
    dead = 0
    for server in servers:
        try:
            ray.get(server.recipe_hash.remote(), timeout=seconds)
        except ray.exceptions.RayActorError:
            dead += 1
        except ray.exceptions.GetTimeoutError:
            pass
    return dead


def _flat(nested: Any) -> torch.Tensor:
    return nested.values() if nested.is_nested else nested.reshape(-1)


class TracefpTrainerSync(_Figures, PPOTrainerSync):
    stock_mode = "sync"

    def get_llm_client(self) -> Any:
        from tracefp4.adapters.verl.agent_loop import GuidedClient

        return self.llm_server_manager.get_client(client_cls=GuidedClient)


class TracefpTrainerColocateAsync(_Figures, PPOTrainerColocateAsync):
    stock_mode = "colocate_async"

    def get_llm_client(self) -> Any:
        from tracefp4.adapters.verl.agent_loop import PartialRolloutClient

        return self.llm_server_manager.get_client(client_cls=PartialRolloutClient)


class TracefpTrainerSeparateAsync(_Figures, PPOTrainerSeparateAsync):
    stock_mode = "separate_async"

    def get_llm_client(self) -> Any:
        from tracefp4.adapters.verl.agent_loop import PartialRolloutClient

        return self.standalone_server_manager.get_client(client_cls=PartialRolloutClient)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if get_device_name() == "cpu":
            from tracefp4.adapters.verl.detached import CopyingActorWorker

            copying = ray.remote(CopyingActorWorker)
            for role, worker in self.role_worker_mapping.items():
                if worker.__ray_actor_class__ is DetachActorWorker:
                    self.role_worker_mapping[role] = copying


def register() -> None:
    for trainer in (TracefpTrainerSync, TracefpTrainerColocateAsync, TracefpTrainerSeparateAsync):
        name = f"tracefp4_{trainer.stock_mode}"
        if name not in TRAINER_REGISTRY:
            register_trainer(name)(trainer)
