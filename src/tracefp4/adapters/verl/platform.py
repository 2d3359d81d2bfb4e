"""A CPU platform for verl, which has none: chosen by ``VERL_PLATFORM=cpu``, never by itself.

Ray hands out "GPU" slots, which a CPU run declares: ``+ray_kwargs.ray_init.num_gpus=N`` for N ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import distributed

NAME = "cpu"


class _CpuModule(ModuleType):
    """``torch.cpu`` with what verl asks of an accelerator beyond it; memory figures are 0."""

    def __getattr__(self, name: str) -> Any:
        if name in _NO_MEMORY:
            return lambda *args, **kwargs: 0
        if name == "get_device_name":
            return lambda *args, **kwargs: "CPU"
        if name in ("get_rng_state", "set_rng_state"):
            return getattr(torch, name)
        if name == "mem_get_info":
            return lambda *args, **kwargs: (0, 0)
        if name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect"):
            return lambda *args, **kwargs: None
        return getattr(torch.cpu, name)


_NO_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class CpuPlatform(PlatformBase):
    """Every method as verl's base class documents it."""

    @property
    def device_name(self) -> str:
        return NAME

    @property
    def vendor_name(self) -> str:
        return NAME

    @property
    def device_module(self) -> ModuleType:
        return _CpuModule("tracefp4_cpu")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # other people's runs on a node without GPU must not become CPU runs

    def current_device(self) -> Any:
        return NAME  # verl passes it to Tensor.to, where an index would mean a CUDA device

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def install() -> None:
    """Registers the platform, and mends the one function of verl that cannot work with it.

    ``initialize_global_process_group_ray`` asks torch for "cpu:gloo,cpu:gloo", which torch refuses.
    """
    PlatformRegistry.register(platform=NAME)(CpuPlatform)
    stock = distributed.initialize_global_process_group_ray
    if getattr(stock, "tracefp4", False):
        return

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        from verl.utils.device import get_device_name

        stock(timeout_second, backend or ("cpu:gloo" if get_device_name() == NAME else None))

    initialize.tracefp4 = True  # type: ignore[attr-defined]
    distributed.initialize_global_process_group_ray = initialize
