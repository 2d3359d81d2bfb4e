"""Weights of earlier steps, for rollouts that lag by a fixed number of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

_PREFIX = "past."


class PastWeights:
    """The newest weights and those of the ``lag`` versions before."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._held: dict[int, dict[str, Tensor]] = {}

    def add(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps copies, since the trainer changes its own tensors in place."""
        self._held[version] = {name: w.detach().clone() for name, w in weights}
        for old in [v for v in self._held if v < version - self.lag]:
            del self._held[old]

    def oldest(self) -> tuple[int, dict[str, Tensor]]:
        """(version, weights) of what a rollout runs under."""
        version = min(self._held)
        return version, self._held[version]

    def tensors(self, newest: int) -> dict[str, Tensor]:
        """What a state must hold: all but the newest version, which are the trainer's own weights."""
        return {f"{_PREFIX}{v}.{n}": w for v, held in self._held.items() if v != newest for n, w in held.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of ``tensors``; others in the dict are left alone."""
        self._held = {}
        for key, w in tensors.items():
            if key.startswith(_PREFIX):
                version, _, name = key.removeprefix(_PREFIX).partition(".")
                self._held.setdefault(int(version), {})[name] = w
