"""Group-relative advantages (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from tracefp4.types import Trajectory


def assign_advantages(trajectories: Sequence[Trajectory], eps: float = 1e-6) -> list[Trajectory]:
    """Sets ``advantage = (R - mean) / (std + eps)`` over each group; std over the group's n samples (population).

    Returns the trajectories of groups that carry a signal: a group whose rewards are all equal has no advantage and
    is skipped. Raises ValueError for a reward that is not finite or a trajectory without a group, naming the request.
    """
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for t in trajectories:
        if not math.isfinite(t.reward):
            raise ValueError(f"reward of {t.request_id} is {t.reward}; the verifier must return a finite number")
        if t.group < 0:
            raise ValueError(f"trajectory {t.request_id} belongs to no group; set its group before the update")
        groups[t.group].append(t)
    kept: list[Trajectory] = []
    for members in groups.values():
        rewards = [t.reward for t in members]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        for t in members:
            t.advantage = (t.reward - mean) / (std + eps)
        if max(rewards) > min(rewards):
            kept.extend(members)
    return kept
