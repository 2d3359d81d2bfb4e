"""Who owns which page of the KV cache."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from tracefp4.rollout.sequence import Sequence

_Prefix = tuple[int, tuple[int, ...]]
"""The page before, or the root of a chain, and a page's own tokens."""


class BlockManager:
    """Hands out pages of ``page_size`` slots.

    A page has one owner, or as many as begin with the same tokens up to its end: with ``prefix_caching`` pages that a
    prompt fills are known by their tokens as long as a sequence holds them. Nobody writes to such a page any more.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_caching: bool = False) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"need at least one page and one slot, got {num_pages} pages of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._free: deque[int] = deque(range(num_pages))
        self._owners = [0] * num_pages
        self._known: dict[_Prefix, int] = {}
        self._prefix_of: dict[int, _Prefix] = {}

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
            self._take(seq)

    def reserve(self, seq: Sequence, num_rows: int) -> None:
        """Gives the sequence pages for rows [0, num_rows) as far as some are free."""
        for _ in range(min(self.num_free, self.pages_for(num_rows) - len(seq.block_table))):
            self._take(seq)

    def _take(self, seq: Sequence) -> None:
        page = self._free.popleft()
        self._owners[page] = 1
        seq.block_table.append(page)

    def release(self, seq: Sequence) -> None:
        """Gives up the sequence's pages; those that no other holds are free."""
        for page in seq.block_table:
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
                if (prefix := self._prefix_of.pop(page, None)) is not None:
                    del self._known[prefix]
        seq.block_table.clear()
        seq.num_shared = seq.num_old = 0

    def share(self, seq: Sequence) -> None:
        """Gives a sequence without pages those that begin as it does, all but the last row of its tokens at most."""
        if not self.prefix_caching:
            return
        parent = self._root(seq)
        for start in range(0, len(seq.tokens) - self.page_size, self.page_size):
            page = self._known.get((parent, tuple(seq.tokens[start : start + self.page_size])))
            if page is None:
                break
            self._owners[page] += 1
            seq.block_table.append(page)
            parent = page
        seq.num_shared = len(seq.block_table) * self.page_size

    def publish(self, seq: Sequence, num_rows: int) -> None:
        """Makes pages known that rows [0, num_rows) of the prompt fill, once those rows are about to be computed."""
        if not self.prefix_caching or seq.num_old:
            return
        parent = self._root(seq)
        for i in range(min(num_rows, seq.num_prompt) // self.page_size):
            page = seq.block_table[i]
            prefix = parent, tuple(seq.tokens[i * self.page_size : (i + 1) * self.page_size])
            if page not in self._prefix_of and self._known.setdefault(prefix, page) == page:
                self._prefix_of[page] = prefix
            parent = page

    @staticmethod
    def _root(seq: Sequence) -> int:
        # A probe's pages hold records that others lack.
        return -2 if seq.request.probe else -1

    def forget(self) -> None:
        """What is in the cache is of older weights: no page is shared from now on that has been known so far."""
        self._known.clear()
        self._prefix_of.clear()

    def slots(self, seq: Sequence, start: int, stop: int) -> Tensor:
        """Slots of rows [start, stop), int64: page * page_size + offset."""
        return slots_of(seq.block_table, start, stop, self.page_size)


def slots_of(table: list[int], start: int, stop: int, page_size: int) -> Tensor:
    first = torch.tensor(table[: -(-stop // page_size)], dtype=torch.int64) * page_size
    return (first[:, None] + torch.arange(page_size)).view(-1)[start:stop]
