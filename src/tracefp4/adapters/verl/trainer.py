"""verl's trainers with this package's metrics, under ``trainer.v1.trainer_mode=tracefp4_sync`` and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import open_dict
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from tracefp4.adapters.verl.figures import rename_figures
from tracefp4.adapters.verl.losses import select_loss
from tracefp4.adapters.verl.settings import KEY, read_settings
from tracefp4.align.metrics import importance_metrics, mismatch_metrics
from tracefp4.errors import TracefpError


class _Figures(PPOTrainer):
    """What a mode adds: METHODS' metrics, and a check of the settings before anything is started."""

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
        super().__init__(config)

    def fit(self, agent_loop_manager: Any) -> None:
        """Raises TracefpError, naming the replica, where verl stopped because a rollout server had died."""
        try:
            super().fit(agent_loop_manager)
        except Exception as error:
            managers = self._rollout_server_managers()
            if dead := dead_servers([server for m in managers for server in m.server_handles]):
                raise TracefpError(
                    f"{dead} of the rollout servers of rollout.name=tracefp4 died (the node's Ray logs say why; often "
                    "it is memory): start again with trainer.resume_mode=auto"
                ) from error
            raise

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        wanted = self.config.data.train_batch_size // self.parameter_sync_step * self.config.actor_rollout_ref.rollout.n
        metrics["rollout/missing_responses"] = float(max(0, wanted - len(batch.keys)))  # verl pads them with nothing
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)
        correction = self.config.algorithm.rollout_correction
        if correction.get("bypass_mode", False):
            return batch  # old log-probs are the rollout's: there is no distance to see
        fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        old, rollout = (_flat(data[name]) for name in fields[:2])
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


def register() -> None:
    if "tracefp4_sync" not in TRAINER_REGISTRY:
        register_trainer("tracefp4_sync")(TracefpTrainerSync)
