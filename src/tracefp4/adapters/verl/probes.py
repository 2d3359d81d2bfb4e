"""Responses whose full codes are kept, so that the trainer can report where its slots differ from the rollout's.

A probed request says so in its id, which travels with the response anyway; its codes stand in the store beside its
guidance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tracefp4.nn import SiteObserver
from tracefp4.types import GuidanceHandle, Trajectory

PROBED = "/probed"
"""Ends the id of a probed request."""


class Probes:
    """Which requests of a replica are probed: the first of each of ``responses`` prompts, under every ``every``-th
    policy version. Greedy requests never are: verl's validation is greedy, and its responses are not trained."""

    def __init__(self, every: int, responses: int) -> None:
        self._every, self._responses = every, responses
        self._version = -1
        self._taken: set[tuple[int, ...]] = set()

    def take(self, version: int, prompt: Sequence[int], temperature: float) -> bool:
        if not self._every or version % self._every or temperature == 0:
            return False
        if version != self._version:
            self._version = version
            self._taken.clear()
        key = tuple(prompt)
        if key in self._taken or len(self._taken) >= self._responses:
            return False
        self._taken.add(key)
        return True


def probe_handle(trajectory: Trajectory, recipe_hash: str) -> GuidanceHandle | None:
    """Of a probed request that generated the whole trajectory; a part of one is found to have other rows."""
    if not trajectory.request_id.endswith(PROBED):
        return None
    return GuidanceHandle(f"{trajectory.request_id}/probe", trajectory.num_rows, recipe_hash)


def over_ranks(observer: SiteObserver, group: Any = None) -> SiteObserver:
    """The sums of all ranks of a group (None: of all there are), each of which must call it."""
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, observer.totals(), group=group)
    merged = SiteObserver()
    for totals in every:
        merged.add(totals)
    return merged
