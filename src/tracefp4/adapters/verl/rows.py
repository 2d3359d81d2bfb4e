"""Between verl's fields and this package's types: what travels with a response, expert weights, lost guidance.

Legend: L tokens of one sequence, R response tokens, M layers with routed experts, K experts per token, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tracefp4.adapters.verl.segments import SegmentedTrajectory, make_note, read_note
from tracefp4.errors import TracefpError
from tracefp4.guidance import GuidanceError
from tracefp4.types import Trajectory

__all__ = ["FIELD", "LossWatch", "make_note", "note_of", "read_trajectory", "replay_field", "stack_experts"]

FIELD = "tracefp4"
"""Key of ``TokenOutput.extra_fields`` that holds a note."""

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def note_of(extra_fields: Any) -> Mapping[str, Any] | None:
    """The note in one row of ``extra_fields``, however verl's tensordict wraps it; None where there is none."""
    fields = getattr(extra_fields, "data", extra_fields)
    return fields.get(FIELD) if isinstance(fields, Mapping) else None


def replay_field(trajectory: Trajectory, layers: int, experts_per_token: int) -> Tensor:
    """int16 [L - 1, M, K] for verl's ``routed_experts``; -1 in rows of which the rollout has no routing."""
    if trajectory.routed_experts is not None:
        return trajectory.routed_experts
    return torch.full((trajectory.num_rows, layers, experts_per_token), -1, dtype=torch.int16)


def read_trajectory(
    tokens: Tensor, prompt_tokens: int, note: Mapping[str, Any] | None, routed: Tensor | None, recipe_hash: str
) -> SegmentedTrajectory:
    """A row of verl's batch as a trajectory whose records the trainer can look up, segment by segment.

    tokens int64 [L], prompt first; routed int [any length, M, K] or None. A sequence without a note (another rollout
    engine, a client that dropped it) has no guidance, which is counted. Raises GuidanceError where the rollout held
    another recipe than the trainer.
    """
    ids = tokens.tolist()
    rows = len(ids) - 1
    segments = [s.clip(0, rows) for s in read_note(note, recipe_hash)]
    segments = [s for s in segments if s.start < s.stop]
    covered = segments[-1].stop if segments else 0
    versions = torch.full((rows,), -1, dtype=torch.int32)
    versions[:covered] = torch.tensor([v for s in segments for v in s.own_versions], dtype=torch.int32)
    replayed = None
    if routed is not None and covered:
        # verl fills what lies behind the recorded rows with zeros, which would be an expert.
        replayed = torch.full((rows, *routed.shape[1:]), -1, dtype=torch.int16)
        known = min(covered, len(routed))
        replayed[:known] = routed[:known].cpu()
    return SegmentedTrajectory(
        request_id=segments[0].sample if segments else "unknown",
        prompt_ids=tuple(ids[:prompt_tokens]),
        response_ids=tuple(ids[prompt_tokens:]),
        logprobs=torch.zeros(len(ids) - prompt_tokens),
        versions=torch.full((len(ids) - prompt_tokens,), -1, dtype=torch.int32),
        row_versions=versions,
        routed_experts=replayed,
        finish_reason="stop",
        advantage=0.0,
        segments=tuple(segments),
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
                "guidance.url on every node, and that trainer.v1.trainer_mode is one of tracefp4's (verl's own "
                "asynchronous client drops the handles), or set guidance.lost_after_steps to 0 to go on without"
            )

    def _is_lost(self) -> bool:
        return self._rows > 0 and self._guided < self._below * self._rows
