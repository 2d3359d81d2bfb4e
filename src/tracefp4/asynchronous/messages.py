"""What the processes of an asynchronous run tell each other.

Rollout and trainer talk to the supervisor only, each over its own channel: a killed process then breaks one pipe and no
lock that others hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tracefp4.asynchronous.buffer import Group


@dataclass(frozen=True)
class Weights:
    """A published policy: safetensors file at ``path``, whole by the time this message is sent."""

    version: int
    path: str


# Trainer -> supervisor


@dataclass(frozen=True)
class Ready:
    """The trainer stands at ``weights.version``, from scratch or from a state."""

    weights: Weights


@dataclass(frozen=True)
class Want:
    """The trainer waits for the groups of the step at ``version``."""

    version: int


@dataclass(frozen=True)
class Published:
    weights: Weights


@dataclass(frozen=True)
class Done:
    """The trainer has finished; ``summary`` goes to final.json."""

    summary: dict[str, Any]


# Supervisor -> trainer


@dataclass(frozen=True)
class Groups:
    """The groups of a step; ``counts``: figures of the buffer for the step's metrics."""

    groups: list[Group]
    counts: dict[str, float] = field(default_factory=dict)


# Rollout -> supervisor


@dataclass(frozen=True)
class Started:
    index: int
    version: int


@dataclass(frozen=True)
class Skipped:
    """The prompt of this group does not fit; another group may be started in its place."""

    index: int


@dataclass(frozen=True)
class Finished:
    group: Group


@dataclass(frozen=True)
class Loaded:
    """The rollout samples under this version from now on; older files may go."""

    version: int


@dataclass(frozen=True)
class Alive:
    """Nothing new, but decoding."""


# Supervisor -> rollout


@dataclass(frozen=True)
class Admit:
    """How many groups may have been started in all."""

    total: int


# Both ways through the supervisor: the trainer asks, the rollout answers


@dataclass(frozen=True)
class Evaluate:
    """Held-out pass rate, asked for under a tag. Under the weights that the rollout holds when it begins."""

    tag: str


@dataclass(frozen=True)
class Evaluated:
    tag: str
    pass_rate: float


# Any child -> supervisor, and the supervisor -> any child


@dataclass(frozen=True)
class Failed:
    """A child ends on purpose with an error. user_error: one sentence that the user can act on; else a traceback."""

    text: str
    user_error: bool
    exit_code: int = 1


@dataclass(frozen=True)
class Stop:
    """Finish: the trainer saves a state first."""
