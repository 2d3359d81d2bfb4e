"""Where a weight update waits for its receivers. Apart from ``transfer``, so that the actor's process loads no verl."""

from __future__ import annotations

import asyncio
from typing import Any


class Mailbox:
    """An actor between the trainer's first rank and every rollout worker. It holds references, never weights, and at
    most two buckets that a receiver has not fetched yet."""

    def __init__(self) -> None:
        self._queues: list[asyncio.Queue[Any]] = []

    async def open(self, receivers: int) -> None:
        """A new update: whatever an earlier one left is dropped."""
        self._queues = [asyncio.Queue(maxsize=2) for _ in range(receivers)]

    async def put(self, message: Any) -> None:
        for queue in self._queues:
            await queue.put(message)

    async def get(self, receiver: int) -> Any:
        return await self._queues[receiver].get()
