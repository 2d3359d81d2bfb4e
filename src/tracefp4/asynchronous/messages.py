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
    """The trainer stands at ``weights.version``, from scratch or from a state. totals: what that state has counted."""

    weights: Weights
    totals: dict[str, float] = field(default_factory=dict)


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
    """The groups of a step. ready: finished groups that waited when it began. totals: figures that add up over the run,
    resumed ones included. replaced: a sentence for each process that was replaced since the step before."""

    groups: list[Group]
    ready: int = 0
    totals: dict[str, float] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)


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
class Aborted:
    """This unfinished group was ended, since no step can take it any more; tokens: what it had sampled."""

    index: int
    tokens: int


@dataclass(frozen=True)
class Counted:
    """What the rollout's store has written and dropped since it last said so, by the names of ``ShardStore.stats``."""

    figures: dict[str, float]


@dataclass(frozen=True)
class Loaded:
    """The rollout samples under this version from now on; older files may go."""

    version: int


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
class Alive:
    """Nothing to hand over yet. Sent from within the work, where a row or a layer was computed since the last message;
    idle: there was nothing to do."""

    idle: bool = False


@dataclass(frozen=True)
class Stop:
    """Finish: the trainer saves a state first."""
