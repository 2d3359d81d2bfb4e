"""Where tensors lie: the setting `run.device`, and moves to a GPU that the host does not wait for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from tracefp4.errors import TracefpError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DeviceSetting = Literal["auto", "cpu", "cuda"]


def resolve_device(setting: str, key: str = "run.device") -> str:
    """ "cpu" or "cuda" for a setting; "auto" takes a GPU where torch sees one.

    key: how the user writes the setting. Raises TracefpError where a GPU is asked for and there is none.
    """
    import torch  # on use: a recipe names a device before anything runs on it

    if setting == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if torch.device(setting).type == "cuda" and not torch.cuda.is_available():
        built = "is built without CUDA" if torch.version.cuda is None else "sees none"
        raise TracefpError(f"{key} = {setting} needs a GPU, and torch {torch.__version__} {built}: set {key} to cpu")
    return setting


def machine_memory() -> int:
    """Bytes of this machine's memory, of all processes together."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def visible_gpus() -> list[str]:
    """The GPUs that a child may be given, each as CUDA_VISIBLE_DEVICES names it; none without CUDA."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()  # asks the driver, and makes no context in this process
    return [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]


def least_busy(gpus: list[str], busy: Iterable[str | None]) -> str | None:
    """The GPU for one more process: of those with the fewest, the first; None where there is no choice to make.

    busy: the GPU of every process that runs.
    """
    if len(gpus) < 2:
        return None
    load = Counter(busy)
    return min(gpus, key=lambda gpu: load[gpu])


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A host tensor on a device; to a GPU through pinned memory, behind the work already queued there.

    The host goes on at once; torch keeps the pinned copy until the device has read it.
    """
    import torch

    if torch.device(device).type != "cuda" or tensor.is_cuda or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


PLAN_WORTH = 1 << 24
"""Scores of a head (query rows times keys, of all sequences) from which cuDNN's attention is worth a plan."""


@contextmanager
def attention_for(device: torch.device | str, scores: int) -> Iterator[None]:
    """torch's scaled_dot_product_attention without cuDNN, where that would cost more than it saves.

    cuDNN makes a plan for every new shape: 3.6 ms of the host a call on an H200, where batches hardly ever repeat a
    shape; of a small model's update it took .21 of .89 s (docs/LOG.md). scores: query rows times keys, of all
    sequences of a call.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if torch.device(device).type != "cuda" or scores >= PLAN_WORTH:
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield
