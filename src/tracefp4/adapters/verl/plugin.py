"""What verl loads: entry point ``verl.plugins``, or ``VERL_USE_EXTERNAL_MODULES=tracefp4.adapters.verl.plugin``.

verl logs a failing entry point at DEBUG and goes on without it, so that a refused version would surface as an unknown
rollout; named as an external module, the same failure ends the run with its own words.
"""

from __future__ import annotations

import verl

from tracefp4.adapters.verl.versions import check_verl_version

ROLLOUT_NAME = "tracefp4"


def register() -> None:
    """Registers platform, replica, server adapter, FSDP engine, checkpoint engine, losses and trainers.

    Raises TracefpError for another verl.
    """
    check_verl_version(verl.__version__)  # before anything of verl's that another version may lack
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from tracefp4.adapters.verl import platform

    platform.install()
    RolloutReplicaRegistry.register(ROLLOUT_NAME, _load_replica)
    _ROLLOUT_REGISTRY[ROLLOUT_NAME, "async"] = "tracefp4.adapters.verl.server_adapter.ServerAdapter"
    from tracefp4.adapters.verl import engine, losses, trainer, transfer

    engine.register()
    losses.register()
    transfer.register()
    trainer.register()


def _load_replica() -> type:
    from tracefp4.adapters.verl.replica import TracefpReplica

    return TracefpReplica


def _register_megatron() -> None:
    """Registers the Megatron engine where verl found megatron-core. After the platform, which verl's engines need."""
    from verl.workers import engine

    if engine.MegatronEngineWithLMHead is not None:
        from tracefp4.adapters.verl import megatron

        megatron.register()


register()
_register_megatron()
