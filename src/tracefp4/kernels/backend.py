"""The explicit choice between the plain torch reference and the Triton kernels."""

from __future__ import annotations

import importlib
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
    try:
        import triton
    except ImportError as error:
        raise KernelError(
            "backend 'triton' needs the package triton, which is not installed: pip install triton, "
            "or choose backend 'torch'"
        ) from error
    if not triton.knobs.runtime.interpret and any(t.device.type != "cuda" for t in tensors):
        raise KernelError("backend 'triton' needs tensors on a GPU; choose backend 'torch' on the CPU")
    return importlib.import_module(f"tracefp4.kernels.{op}.triton")
