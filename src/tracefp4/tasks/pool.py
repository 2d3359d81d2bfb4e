"""A fixed set of problems, handed out in seeded passes: what every task that reads a file trains on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from random import Random

from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Prompt


def stable_hash(text: str) -> int:
    """64 bits of SHA-256: the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


class EpochPool:
    """Training problems in shuffled passes and held-out ones in a fixed order, disjoint by text.

    train, test: all problems, distinct by text within each; a training problem whose text is held out has been left
    out already. seed: of the order of the passes. what: names the source in errors, e.g. "task.path data.jsonl".

    Step s of n problems takes the (s mod k)-th n of pass s // k, with k = len(train) // n: no problem comes twice in
    a pass, and the fewer than n left over at its end sit that pass out. Any step can be asked for first.
    """

    def __init__(self, train: Sequence[Prompt], test: Sequence[Prompt], seed: int, what: str) -> None:
        self.train, self.test, self.what = tuple(train), tuple(test), what
        self._order = lru_cache(maxsize=2)(lambda epoch: self._shuffled(seed, epoch))

    def take(self, step: int, n: int) -> list[Prompt]:
        """The ``n`` training problems of a step, with distinct texts.

        Raises:
            TracefpError: ``step`` or ``n`` is out of range, or there are fewer than ``n`` problems.
        """
        if step < 0:
            raise TracefpError(f"step must be at least 0, got {step}")
        if not 1 <= n <= len(self.train):
            raise TracefpError(
                f"{self.what} has {len(self.train)} training problems, fewer than the {n} of a step: "
                "add rows, hold out fewer, or lower sampling.prompts_per_step"
            )
        epoch, position = divmod(step, len(self.train) // n)
        return [self.train[i] for i in self._order(epoch)[position * n : (position + 1) * n]]

    def held_out(self, n: int, remedy: str) -> list[Prompt]:
        """The first ``n`` held-out problems.

        Raises:
            TracefpError: there are fewer than ``n``; the message ends with ``remedy``.
        """
        if not 1 <= n <= len(self.test):
            raise TracefpError(f"{self.what} has {len(self.test)} held-out problems, {n} were asked for: {remedy}")
        return list(self.test[:n])

    def _shuffled(self, seed: int, epoch: int) -> list[int]:
        order = list(range(len(self.train)))
        Random(f"epoch {seed} {epoch}").shuffle(order)
        return order


def held_out_flags(keys: Sequence[str], share: float, size: int) -> list[bool]:
    """Which problems are held out, by the hash of each one's key, whatever the order of the rows.

    size: hold out so many, those with the smallest hashes; else share: hold out a problem where its hash lies in the
    lowest ``share``, so that added rows never move an old one across.
    """
    hashes = [stable_hash(key) for key in keys]
    bound = sorted(hashes)[min(size, len(hashes)) - 1] + 1 if size and hashes else int(share * 2**64)
    return [value < bound for value in hashes]
