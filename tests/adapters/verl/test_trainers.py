"""The trainers of the plugin before anything is started. Skipped where verl is not installed."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.import_utils import load_class_from_fqn

import tracefp4.adapters.verl.plugin  # noqa: F401
from tracefp4.adapters.verl.agent_loop import GuidedAgentLoopManager, GuidedClient, PartialRolloutClient
from tracefp4.errors import TracefpError

MODES = ("sync", "colocate_async", "separate_async")


def make_trainer(mode: str, monkeypatch: pytest.MonkeyPatch, **agent: Any) -> tuple[Any, DictConfig]:
    """(trainer, its config) as far as the checks go: verl's own start is left out."""
    settings = {"model_config": {}, "tracefp4": {"method": "qat"}}
    rollout = {"calculate_log_probs": True, "nnodes": 1, "n_gpus_per_node": 1,
               "checkpoint_engine": {"backend": "tracefp4"}, "agent": agent}  # fmt: skip
    config = OmegaConf.create(
        {
            "data": {"train_batch_size": 8},
            "reward": {"reward_model": {"enable": False}},
            "actor_rollout_ref": {
                "model": {"override_config": settings},
                "actor": {"ppo_mini_batch_size": 2, "policy_loss": {"loss_mode": "vanilla"}},
                "rollout": rollout,
            },
            "trainer": {"v1": {"trainer_mode": f"tracefp4_{mode}", "separate_async": {"parameter_sync_step": 4,
                        "hybrid_rollout": {}}}},
        }
    )  # fmt: skip
    OmegaConf.set_struct(config, True)

    def start(self: Any, config: DictConfig) -> None:
        self.config = config

    monkeypatch.setattr(PPOTrainer, "__init__", start)
    monkeypatch.setattr(
        "verl.trainer.ppo.v1.trainer_separate_async.omega_conf_to_dataclass",
        lambda c: SimpleNamespace(enable_switch=False),
    )
    return get_trainer_cls(f"tracefp4_{mode}")(config), config


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_brings_the_manager_and_the_client_that_carry_handles(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, config = make_trainer(mode, monkeypatch)
    assert config.trainer.v1.trainer_mode == mode
    manager = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    assert load_class_from_fqn(manager, "AgentLoopManager") is GuidedAgentLoopManager
    servers = SimpleNamespace(get_client=lambda client_cls: client_cls)
    trainer.llm_server_manager = trainer.standalone_server_manager = servers
    assert trainer.get_llm_client() is (GuidedClient if mode == "sync" else PartialRolloutClient)


def test_a_manager_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _, config = make_trainer("sync", monkeypatch, agent_loop_manager_class="my.Manager")
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == "my.Manager"


def test_a_trainer_mode_of_ours_needs_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    _, config = make_trainer("colocate_async", monkeypatch)
    config.actor_rollout_ref.model.override_config = {"model_config": {}}
    config.trainer.v1.trainer_mode = "tracefp4_colocate_async"
    with pytest.raises(TracefpError, match=r"trainer_mode=tracefp4_colocate_async needs .*tracefp4\.method"):
        get_trainer_cls("tracefp4_colocate_async")(config)
