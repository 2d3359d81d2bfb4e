"""Read memory is used again, and never while somebody still holds a view of it."""

from __future__ import annotations

import gc

import numpy as np
import torch

from tracefp4.guidance.memory import PagePool

MIB = 1 << 20


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_its_last_view_is_gone() -> None:
    pool = PagePool()
    first = pool.allocate(5 * MIB)
    where = address(first)
    view = torch.from_numpy(first.reshape(5, MIB))[2, 10:20]  # a tensor over a view of a view
    view.fill_(7)
    del first
    gc.collect()
    other = pool.allocate(5 * MIB)
    assert address(other) != where
    other.fill(1)
    assert view.eq(7).all()
    del view
    gc.collect()
    again = pool.allocate(5 * MIB - 100)
    assert address(again) == where
    assert len(again) == 5 * MIB - 100


def test_no_more_is_kept_than_allowed_and_much_larger_pieces_are_left_alone() -> None:
    pool = PagePool(kept_bytes=20 * MIB)
    held = [pool.allocate(8 * MIB) for _ in range(4)]
    del held
    gc.collect()
    assert len(pool._free) == 2
    assert len(pool.allocate(100)) == 100
    small = pool.allocate(4 * MIB)
    assert len(pool._free) == 1  # 8 MiB are not twice too large for 4
    big = pool.allocate(30 * MIB)
    assert len(pool._free) == 1
    del small, big
    gc.collect()
    assert sum(len(p) for p in pool._free) <= 20 * MIB
