"""From device to host without stalling the step: pinned buffers, a stream of their own, an event per record."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGN = 512


class HostCopy:
    """A copy into staging memory that may still be under way. ``wait`` before reading, ``release`` after the last use.

    It is counted: whoever else reads the tensors calls ``retain`` first and ``release`` after.
    """

    def __init__(self, staging: HostStaging, start: int, event: torch.cuda.Event | None) -> None:
        self._staging, self._start, self._event = staging, start, event
        self._users = 1
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Blocks the calling thread, not the device, until the bytes are there."""
        if self._event is not None:
            self._event.synchronize()

    def ready(self) -> bool:
        """Whether the bytes are there; asks without waiting."""
        return self._event is None or self._event.query()

    def hold_back(self) -> None:
        """Lets later work of the current stream wait for the copy: it may overwrite what the copy reads."""
        if self._event is not None:
            torch.cuda.current_stream(self._staging.device).wait_event(self._event)

    def retain(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """The memory may be used again once every user has released it."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._staging.free(self._start)


class HostStaging:
    """Host memory, pinned where the device is CUDA, that records are copied into.

    Copies run on a stream of their own: it waits for the work queued so far on the current stream, so the rows are
    those of the moment of the call, and nothing that comes later waits for the copy. A region that is given back may
    be taken again at once: all copies are in the order of the one stream.

    tests/guidance/test_staging.py takes the CUDA path where there is a GPU (it passed on an H200).
    """

    def __init__(self, device: torch.device | str, nbytes: int = 256 << 20) -> None:
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda)
        self._stream = torch.cuda.Stream(self.device) if cuda else None
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return sum(self._taken.values())

    def copy(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], HostCopy | None]:
        """Host copies of device tensors, and what to wait for.

        Where no room is left the copy is a plain blocking one and there is nothing to wait for (None).
        """
        sizes = [-(-t.numel() * t.element_size() // _ALIGN) * _ALIGN for t in tensors]
        start = self._take(sum(sizes))
        if start is None:
            return [t.to("cpu", copy=True) for t in tensors], None
        out, at = [], start
        for tensor, size in zip(tensors, sizes, strict=True):
            raw = self._buffer[at : at + tensor.numel() * tensor.element_size()]
            out.append(raw.view(tensor.dtype).view(tensor.shape))
            at += size
        return out, HostCopy(self, start, self._start_copy(tensors, out))

    def _start_copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> torch.cuda.Event | None:
        if self._stream is None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)  # the allocator must not hand its memory on before the copy ran
            return self._stream.record_event()

    def _take(self, nbytes: int) -> int | None:
        """First fit among the gaps between taken regions; None where none is large enough."""
        nbytes = max(nbytes, _ALIGN)
        with self._lock:
            at = 0
            for start in sorted(self._taken):
                if start - at >= nbytes:
                    break
                at = start + self._taken[start]
            if at + nbytes > self._buffer.numel():
                return None
            self._taken[at] = nbytes
            return at

    def free(self, start: int) -> None:
        with self._lock:
            del self._taken[start]
