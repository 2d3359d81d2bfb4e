"""Memory for what is read: large pieces are used again once nobody holds them.

The first touch of fresh pages costs more than copying a record from the page cache into them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref

import numpy as np
import numpy.typing as npt

_HUGE_PAGE = 2 << 20
_KEPT_BYTES = 256 << 20


class PagePool:
    """Gives out arrays of bytes and takes the memory back when the last view of it, NumPy's or torch's, is gone."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._free: list[mmap.mmap] = []
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Uninitialised uint8 [nbytes]; small sizes come from NumPy."""
        if nbytes < 2 * _HUGE_PAGE:
            return np.empty(nbytes, np.uint8)
        pages = self._take(nbytes)
        owner = (ctypes.c_char * nbytes).from_buffer(pages)
        weakref.finalize(owner, self._give_back, pages).atexit = False
        return np.frombuffer(owner, np.uint8)  # type: ignore[call-overload]

    def _take(self, nbytes: int) -> mmap.mmap:
        """The smallest free piece that is large enough and not twice too large, else a new one in huge pages."""
        with self._lock:
            fitting = [p for p in self._free if nbytes <= len(p) <= 2 * nbytes]
            if fitting:
                pages = min(fitting, key=len)
                self._free.remove(pages)
                return pages
        pages = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def _give_back(self, pages: mmap.mmap) -> None:
        with self._lock:
            self._free.append(pages)
            while sum(len(p) for p in self._free) > self._kept_bytes:
                self._free.pop(0)
