"""Between verl's fields and this package's types: what travels with a response, expert weights, lost guidance.

Legend: L tokens of one sequence, R response tokens, M layers with routed experts, K experts per token, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import TracefpError
from tracefp4.guidance import GuidanceError
from tracefp4.types import GuidanceHandle, Trajectory

FIELD = "tracefp4"
"""Key of ``TokenOutput.extra_fields`` that holds a note."""

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def make_note(trajectory: Trajectory, recipe_hash: str) -> dict[str, Any]:
    """What travels with a response: plain values that pickle, and the handle in place of the guidance.

    versions: runs of (policy version, rows) over all rows. guidance: [sample id, rows, recipe hash, bytes] or None.
    """
    handle = trajectory.guidance
    runs = [[version, len(list(rows))] for version, rows in groupby(trajectory.row_versions.tolist())]
    guidance = None if handle is None else [handle.sample_id, handle.rows, handle.recipe_hash, handle.nbytes]
    return {"recipe": recipe_hash, "sample": trajectory.request_id, "versions": runs, "guidance": guidance}


def replay_field(trajectory: Trajectory, layers: int, experts_per_token: int) -> Tensor:
    """int16 [L - 1, M, K] for verl's ``routed_experts``; -1 in rows of which the rollout has no routing."""
    if trajectory.routed_experts is not None:
        return trajectory.routed_experts
    return torch.full((trajectory.num_rows, layers, experts_per_token), -1, dtype=torch.int16)


def read_trajectory(
    tokens: Tensor, prompt_tokens: int, note: Mapping[str, Any] | None, routed: Tensor | None, recipe_hash: str
) -> Trajectory:
    """A row of verl's batch as a Trajectory whose records the trainer can look up.

    tokens int64 [L], prompt first; routed int [L or more, M, K] or None. A sequence without a note (another rollout
    engine, a client that dropped it) has no guidance, which is counted. Raises GuidanceError where the rollout held
    another recipe than the trainer.
    """
    ids = tokens.tolist()
    rows = len(ids) - 1
    handle, versions, sample = None, torch.full((rows,), -1, dtype=torch.int32), "unknown"
    if note is not None:
        if note["recipe"] != recipe_hash:
            raise GuidanceError(
                f"sample {note['sample']} was rolled out under recipe {note['recipe']}, the trainer holds "
                f"{recipe_hash}; start both from the same actor_rollout_ref.model.override_config.tracefp4"
            )
        sample = str(note["sample"])
        handle = GuidanceHandle(*note["guidance"]) if note["guidance"] is not None else None
        runs = [version for version, count in note["versions"] for _ in range(count)]
        if len(runs) == rows:
            versions = torch.tensor(runs, dtype=torch.int32)
    return Trajectory(
        request_id=sample,
        prompt_ids=tuple(ids[:prompt_tokens]),
        response_ids=tuple(ids[prompt_tokens:]),
        logprobs=torch.zeros(len(ids) - prompt_tokens),
        versions=torch.full((len(ids) - prompt_tokens,), -1, dtype=torch.int32),
        row_versions=versions,
        # Without versions there is no telling whether the routing belongs to these rows.
        routed_experts=None if routed is None or note is None or (rows and versions[0] < 0) else routed[:rows].cpu(),
        finish_reason="stop",
        guidance=handle,
        advantage=0.0,
    )


def stack_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Undoes verl's split of stacked expert weights: a layer's ``gate_up_proj`` [E, 2F, H] and ``down_proj`` [E, H, F].

    Other weights pass through as they come. Raises TracefpError where an expert of a layer is missing.
    """
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, weight in weights:
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, weight
            continue
        parts.setdefault(match[1], {"gate": {}, "up": {}, "down": {}})[match[3]][int(match[2])] = weight
    for base, experts in parts.items():
        count = 1 + max(e for part in experts.values() for e in part)
        for part, held in experts.items():
            lost = [e for e in range(count) if e not in held]
            if lost:
                raise TracefpError(f"weight {base}.{lost[0]}.{part}_proj.weight is missing from the update")
        gate_up = [torch.cat([experts["gate"][e], experts["up"][e]]) for e in range(count)]
        yield f"{base}.gate_up_proj", torch.stack(gate_up)
        yield f"{base}.down_proj", torch.stack([experts["down"][e] for e in range(count)])


class LossWatch:
    """Ends a run that has silently lost its guidance.

    A step is lost where rows were eligible and fewer than ``below`` of them were guided; after ``limit`` lost steps in
    a row ``note`` raises. limit 0 never raises.
    """

    def __init__(self, below: float, limit: int) -> None:
        self._below, self._limit = below, limit
        self._step: int | None = None
        self._rows = self._guided = self._lost = 0

    def note(self, step: int, rows: int, guided: int, reasons: Mapping[str, int]) -> None:
        """Adds one pass of a step. Raises GuidanceError, naming the reasons, where guidance is lost."""
        if step != self._step:
            self._lost = self._lost + 1 if self._is_lost() else 0
            self._step, self._rows, self._guided = step, 0, 0
        self._rows += rows
        self._guided += guided
        if self._limit and self._is_lost() and self._lost + 1 >= self._limit:
            why = ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count) or "none counted"
            raise GuidanceError(
                f"guidance is lost: {self._guided} of {self._rows} rows were guided at policy version {step}, and less "
                f"than {self._below:.0%} in {self._lost + 1} steps in a row (rows by reason: {why}); check "
                "guidance.url on every node, or set guidance.lost_after_steps to 0 to go on without"
            )

    def _is_lost(self) -> bool:
        return self._rows > 0 and self._guided < self._below * self._rows
