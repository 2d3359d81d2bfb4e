"""What verl finds registered. Skipped where verl is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

import verl
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

from tracefp4.adapters.verl import engine, plugin
from tracefp4.errors import TracefpError


def test_everything_is_registered_under_its_name() -> None:
    assert get_rollout_replica_class("tracefp4").__name__ == "TracefpReplica"
    assert get_rollout_class("tracefp4").__name__ == "ServerAdapter"
    for mode in ("sync", "colocate_async", "separate_async"):
        ours, stock = get_trainer_cls(f"tracefp4_{mode}"), get_trainer_cls(mode)
        assert issubclass(ours, stock)
        assert ours is not stock
    assert CheckpointEngineRegistry.get("tracefp4").__name__ == "RayCheckpointEngine"
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is engine.TracefpFSDPEngine


def test_registering_twice_changes_nothing() -> None:
    plugin.register()
    assert get_trainer_cls("tracefp4_sync").__name__ == "TracefpTrainerSync"


def test_another_version_of_verl_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "__version__", "0.8.1")
    with pytest.raises(TracefpError, match=r"verl 0\.8\.1 is installed; install verl==0\.9\.1"):
        plugin.register()


def test_a_run_under_another_version_ends_with_the_plugins_own_words(tmp_path: Path) -> None:
    (tmp_path / "older_verl.py").write_text("import verl\nverl.__version__ = '0.8.1'\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "older_verl,tracefp4.adapters.verl.plugin",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(
        [sys.executable, "-c", "import verl"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "supports releases of verl from 0.9.1" in done.stderr
    assert "verl 0.8.1 is installed" in done.stderr


def test_the_losses_are_registered() -> None:
    assert get_policy_loss_fn("tracefp4_tbpo")
    assert get_policy_loss_fn("tracefp4_triage")


def test_the_cpu_platform_is_only_chosen_by_name() -> None:
    platform = PlatformRegistry.get("cpu")
    assert platform is not None
    assert not platform().is_platform_available(use_smi_check=True)


def test_the_cpu_platform_answers_what_verl_asks_of_a_device() -> None:
    platform = get_platform()
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"
    module = platform.device_module
    assert module.max_memory_allocated() == module.memory_reserved() == 0
    assert module.mem_get_info() == (0, 0)
    module.empty_cache()
    with pytest.raises(AttributeError):
        module.no_such_function()
