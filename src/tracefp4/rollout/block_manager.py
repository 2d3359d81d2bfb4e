"""Who owns which page of the KV cache."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from tracefp4.rollout.sequence import Sequence


class BlockManager:
    """Hands out pages of ``page_size`` slots. No prefix sharing: a page has one owner at a time."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"need at least one page and one slot, got {num_pages} pages of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: deque[int] = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def can_grow(self, seq: Sequence, num_rows: int) -> bool:
        """Whether the cache has room for rows [0, num_rows) of the sequence."""
        return self.pages_for(num_rows) - len(seq.block_table) <= self.num_free

    def grow(self, seq: Sequence, num_rows: int) -> None:
        """Gives the sequence pages for rows [0, num_rows). Raises RuntimeError when none is free."""
        for _ in range(self.pages_for(num_rows) - len(seq.block_table)):
            if not self._free:
                raise RuntimeError("the KV cache has no free page")
            seq.block_table.append(self._free.popleft())

    def reserve(self, seq: Sequence, num_rows: int) -> None:
        """Gives the sequence pages for rows [0, num_rows) as far as some are free."""
        for _ in range(min(self.num_free, self.pages_for(num_rows) - len(seq.block_table))):
            seq.block_table.append(self._free.popleft())

    def release(self, seq: Sequence) -> None:
        self._free.extend(seq.block_table)
        seq.block_table.clear()

    def slots(self, seq: Sequence, start: int, stop: int) -> Tensor:
        """Slots of rows [start, stop), int64: page * page_size + offset."""
        return slots_of(seq.block_table, start, stop, self.page_size)


def slots_of(table: list[int], start: int, stop: int, page_size: int) -> Tensor:
    first = torch.tensor(table[: -(-stop // page_size)], dtype=torch.int64) * page_size
    return (first[:, None] + torch.arange(page_size)).view(-1)[start:stop]
