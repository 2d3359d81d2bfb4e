"""Groups of trajectories between rollout and trainer, with bounded staleness.

Legend: B groups per trainer step, D = max_version_diff, v the trainer's policy version (steps it has done).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from tracefp4.types import Trajectory

OnStale = Literal["wait", "drop"]


@dataclass
class Group:
    """All responses to one prompt. index: place in the stream of prompts. stats: figures that add up over groups."""

    index: int
    trajectories: list[Trajectory]
    stats: dict[str, float] = field(default_factory=dict)

    @cached_property
    def oldest_version(self) -> int:
        """Policy version of the oldest sampled token: its lag is the group's lag."""
        return min(int(t.versions[t.sampled_mask].min()) for t in self.trajectories if t.num_sampled)


class GroupBuffer:
    """Hands out the oldest groups first and never one whose oldest token lags by more than D versions.

    Admission: at version v at most (v + D + 1) * B groups may have been started, not counting those that were dropped
    or skipped. Groups that start at version v are then due by step v + D: its end consumes the last of (v + D + 1) * B.

    on_stale "wait": a step waits for unfinished groups where going on without them would leave more old groups than the
    steps until their limit can take, so that nothing is dropped. "drop": a step takes what is there; groups that have
    grown too old are dropped and counted, and so are the tokens that were sampled for them.
    """

    def __init__(self, groups_per_step: int, max_version_diff: int, on_stale: OnStale = "wait") -> None:
        self.groups_per_step, self.max_version_diff, self.on_stale = groups_per_step, max_version_diff, on_stale
        self.dropped = 0
        self.skipped = 0
        self.wasted_tokens = 0
        self._ready: dict[int, Group] = {}
        self._started: dict[int, int] = {}  # unfinished groups: index -> version they started at

    def admitted(self, version: int) -> int:
        """How many groups may have been started in all while the trainer is at ``version``."""
        return (version + self.max_version_diff + 1) * self.groups_per_step + self.dropped + self.skipped

    def started(self, index: int, version: int) -> None:
        """A group's generation began under this policy version. A group started again keeps its new version."""
        self._started[index] = version

    def aborted(self, index: int, tokens: int) -> None:
        """An unfinished group was ended after so many sampled tokens, since it had grown too old."""
        if self._started.pop(index, None) is not None:
            self.dropped += 1
            self.wasted_tokens += tokens

    def put(self, group: Group) -> None:
        """Takes a finished group; one that is there already (made again after a crash) is ignored."""
        self._started.pop(group.index, None)
        self._ready.setdefault(group.index, group)

    def take(self, version: int) -> list[Group] | None:
        """B groups for the step at ``version``, oldest first, or None where the step has to wait."""
        oldest = version - self.max_version_diff
        stale = [i for i, g in self._ready.items() if g.oldest_version < oldest]
        for index in stale:
            self.wasted_tokens += sum(t.num_sampled for t in self._ready.pop(index).trajectories)
        self.dropped += len(stale)
        # Without unfinished groups there is nothing to wait for.
        waits = self.on_stale == "wait" and bool(self._started) and self._must_wait(version)
        if len(self._ready) < self.groups_per_step or waits:
            return None
        order = sorted(self._ready.values(), key=lambda g: (g.oldest_version, g.index))
        taken = order[: self.groups_per_step]
        for group in taken:
            del self._ready[group.index]
        return taken

    def _must_wait(self, version: int) -> bool:
        """Whether a step now, oldest groups first, would make some group miss its last step.

        Groups that began at version s or before fit into the steps up to s + D. For every s: those that are left after
        this step must not exceed B for each step from the next one to s + D.
        """
        ready = [g.oldest_version for g in self._ready.values()]
        for s in {*ready, *self._started.values()}:
            old = sum(v <= s for v in ready)
            left = old + sum(v <= s for v in self._started.values()) - min(old, self.groups_per_step)
            if left > self.groups_per_step * max(0, s + self.max_version_diff - version):
                return True
        return False

    def unfinished(self) -> list[int]:
        """Indices of groups that were started and did not come back: what a new rollout process makes again."""
        return sorted(self._started)

    def __len__(self) -> int:
        return len(self._ready)
