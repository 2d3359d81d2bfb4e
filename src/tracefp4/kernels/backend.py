"""The explicit choice between the plain torch reference and the Triton kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType

from torch import Tensor

from tracefp4.kernels.errors import KernelError

BACKENDS = ("torch", "triton")


def kernel_module(backend: str, op: str, *tensors: Tensor) -> ModuleType | None:
    """The Triton module of an op, or None for the torch reference.

    Args:
        backend: "torch" or "triton"; nothing else decides, so two processes of one recipe compute alike.
        op: folder below tracefp4.kernels.
        tensors: operands, which must lie on a GPU unless Triton runs under its interpreter.

    Raises:
        KernelError: unknown backend, Triton missing, or operands on the CPU.
    """
    if backend == "torch":
        return None
    if backend != "triton":
        raise KernelError(f"unknown kernel backend {backend!r}; one of {', '.join(BACKENDS)}")
    if (why := triton_missing(t.device.type for t in tensors)) is not None:
        raise KernelError(f"backend 'triton' needs {why}, or choose backend 'torch'")
    return importlib.import_module(f"tracefp4.kernels.{op}.triton")


def triton_missing(devices: Iterable[str]) -> str | None:
    """What Triton's kernels need and lack for operands on these types of device, with the remedy; None for nothing."""
    try:
        import triton
    except ImportError:
        return "the package triton, which is not installed: pip install triton"
    if not triton.knobs.runtime.interpret and any(device != "cuda" for device in devices):
        return "tensors on a GPU: set the device to cuda"
    return None
