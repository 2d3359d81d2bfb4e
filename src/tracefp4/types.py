"""The data contract between rollout, guidance store and trainer.

Shape legend: L rows or tokens of one trajectory, P prompt tokens, R response tokens (L = P + R),
B trajectories of a batch, T padded length, H hidden size, M layers with routed experts, K experts per token.

A trajectory of L tokens has L - 1 *rows*: row i is the forward of token i, which predicts token i + 1.
The last token is sampled but never forwarded, so it has no row.

Example, prompt ``[5, 7]`` and response ``[9, 2]`` (2 is EOS)::

    tokens            5   7   9   2
    rows              0   1   2            (3 = tokens - 1)
    logprobs                  a   b        (of 9 and of 2; one per response token)
    routed_experts    r0  r1  r2           (one [M, K] entry per row)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tracefp4.device import to_device
from tracefp4.errors import TracefpError

SITES = ("expert_input", "key", "value")
"""Recorded sites: the input of the routed experts, or of a dense model's MLP (once per token and layer, before
dispatch), K after RoPE and V, each one row per token and layer."""


class SamplingError(TracefpError, ValueError):
    """A setting of SamplingParams that nothing can be sampled by."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Raises SamplingError for a value that is out of range or of another type.

    temperature: float >= 0; 0 is greedy. top_p: in (0, 1]; 1 keeps the whole distribution. A token's log-prob is that
    of the distribution before top-p, so what was cut is no behavior policy to train on.
    max_new_tokens: >= 1, response tokens, an environment's answers among them. stop_token_ids: sampling one of them
    ends the turn (it is kept as its last token). seed: makes the tokens of this request a function of (weights,
    prompt, seed) alone, whatever else runs in the batch. top_logprobs: how many of the likeliest tokens' log-probs are
    kept at every position, at most the vocabulary.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise SamplingError(f"temperature must be >= 0, a finite number, got {self.temperature!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p must be in (0, 1], got {self.top_p!r}")
        for name, least in (("max_new_tokens", 1), ("top_logprobs", 0)):
            if not _is_whole(value := getattr(self, name)) or value < least:
                raise SamplingError(f"{name} must be >= {least}, a whole number, got {value!r}")
        if not _is_whole(self.seed) or not 0 <= self.seed < 2**63:
            raise SamplingError(f"seed must be in [0, 2**63), a whole number, got {self.seed!r}")
        ids = self.stop_token_ids
        if isinstance(ids, str | bytes) or not isinstance(ids, Collection) or not all(map(_is_whole, ids)):
            raise SamplingError(f"stop_token_ids must be a tuple of token ids, got {ids!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class Request:
    """One prompt to be continued once. request_id is unique within an engine; prompt_ids has P >= 1 ids."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    probe: bool = False
    """Also keep the full codes of every layer (diagnostics; costs 4.5 bits per value)."""


@dataclass(frozen=True)
class GuidanceHandle:
    """Names the guidance of one trajectory in a store; travels in its place (bits stay in the store).

    rows: L - 1. recipe_hash: of the recipe it was recorded under. nbytes: packed rows and their encode scales.
    """

    sample_id: str
    rows: int
    recipe_hash: str
    nbytes: int = 0


@dataclass(frozen=True)
class TokenHead:
    """The likeliest tokens at each response position, likeliest first.

    ids int32 [R, k]; logprobs f32 [R, k], natural log, under the distribution of ``Trajectory.logprobs``, -Inf where
    there is none (an environment's tokens).
    """

    ids: Tensor
    logprobs: Tensor


@dataclass
class Trajectory:
    """One finished response.

    prompt_ids [P], response_ids [R] (Python ints); logprobs f32 [R], natural log, of the sampled token under
    the temperature-scaled distribution before top-p; versions int32 [R], the policy version that sampled each
    response token; row_versions int32 [L - 1], the version that forwarded each row; routed_experts int16
    [L - 1, M, K] over the M layers that have routed experts, -1 in rows that were forwarded twice, or None where there
    are none or rows are missing;
    finish_reason: "stop", "length" or "abort".
    sampled: bool [R], False where a response token came from the environment (a tool's answer in a multi-turn task):
    it has a row and a record like a prompt token, log-prob 0, version -1, and teaches nothing. None: all were sampled.
    guidance and probe are handles into the guidance store, None where nothing was recorded. head: the rollout's
    likeliest tokens, where ``SamplingParams.top_logprobs`` asked for them.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: Tensor
    versions: Tensor
    row_versions: Tensor
    routed_experts: Tensor | None
    finish_reason: str
    guidance: GuidanceHandle | None = None
    probe: GuidanceHandle | None = None
    reward: float = float("nan")
    advantage: float = float("nan")
    group: int = -1
    sampled: Tensor | None = None
    head: TokenHead | None = None

    @property
    def sampled_mask(self) -> Tensor:
        """bool [R]: response tokens that the policy sampled."""
        return torch.ones(len(self.response_ids), dtype=torch.bool) if self.sampled is None else self.sampled

    @property
    def num_sampled(self) -> int:
        return len(self.response_ids) if self.sampled is None else int(self.sampled.sum())

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.response_ids

    @property
    def num_rows(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids) - 1


@dataclass
class RolloutBatch:
    """What one rollout phase hands to the trainer: trajectories with rewards, and the phase's own counts."""

    trajectories: list[Trajectory]
    version: int
    stats: dict[str, float] = field(default_factory=dict)


@dataclass
class TrainBatch:
    """A padded micro-batch. B trajectories, T = longest length; padding on the right.

    input_ids int64 [B, T]; attention_mask bool [B, T], True on real tokens; response_mask bool [B, T - 1],
    True where position t predicts a sampled response token (token t + 1); rollout_logprobs f32 [B, T - 1], 0 outside
    response_mask; advantages f32 [B]; trajectories: the source objects, in row order; response_at int64 [n]: the flat
    indices of what response_mask marks, known beforehand, as a mask itself would have the host wait for the device.
    head_ids int64, head_logprobs f32 [B, T - 1, k]: the rollout's likeliest tokens, -Inf where there is none; None
    where no trajectory has them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    trajectories: Sequence[Trajectory]
    response_at: Tensor
    head_ids: Tensor | None = None
    head_logprobs: Tensor | None = None

    @staticmethod
    def collate(trajectories: Sequence[Trajectory], pad_id: int, device: torch.device | str = "cpu") -> TrainBatch:
        """Pads trajectories on the right. Raises ValueError where log-probs and response disagree in length."""
        for t in trajectories:
            if len(t.logprobs) != len(t.response_ids):
                raise ValueError(
                    f"trajectory {t.request_id}: {len(t.logprobs)} log-probs for {len(t.response_ids)} response tokens"
                )
        prompts = torch.tensor([len(t.prompt_ids) for t in trajectories])[:, None]
        lengths = prompts + torch.tensor([len(t.response_ids) for t in trajectories])[:, None]
        B, T = len(lengths), int(lengths.max())
        # All trajectories at once: row by row, each would cost some ten operations.
        at = torch.arange(T)
        attention_mask = at < lengths
        input_ids = torch.full((B, T), pad_id, dtype=torch.int64)
        tokens = chain.from_iterable(ids for t in trajectories for ids in (t.prompt_ids, t.response_ids))
        input_ids[attention_mask] = torch.tensor(list(tokens), dtype=torch.int64)
        response_mask = (at[:-1] >= prompts - 1) & (at[:-1] < lengths - 1)
        rollout_logprobs = torch.zeros(B, T - 1)
        rollout_logprobs[response_mask] = torch.cat([t.logprobs for t in trajectories])
        if any(t.sampled is not None for t in trajectories):
            response_mask[response_mask.clone()] = torch.cat([t.sampled_mask for t in trajectories])
        advantages = torch.tensor([t.advantage for t in trajectories], dtype=torch.float32)
        head = _collate_heads(trajectories, T)
        return TrainBatch(
            to_device(input_ids, device),
            to_device(attention_mask, device),
            to_device(response_mask, device),
            to_device(rollout_logprobs, device),
            to_device(advantages, device),
            trajectories,
            to_device(response_mask.view(-1).nonzero()[:, 0], device),
            *(None if h is None else h.to(device) for h in head),
        )


def _collate_heads(trajectories: Sequence[Trajectory], T: int) -> tuple[Tensor | None, Tensor | None]:
    """(ids int64, log-probs f32), [B, T - 1, k] each; (None, None) where no trajectory has a head."""
    k = max((t.head.ids.shape[1] for t in trajectories if t.head is not None), default=0)
    if not k:
        return None, None
    ids = torch.zeros(len(trajectories), T - 1, k, dtype=torch.int64)
    logprobs = torch.full((len(trajectories), T - 1, k), -torch.inf)
    for b, t in enumerate(trajectories):
        if t.head is not None:
            start, (R, own) = len(t.prompt_ids) - 1, t.head.ids.shape
            ids[b, start : start + R, :own] = t.head.ids.long()
            logprobs[b, start : start + R, :own] = t.head.logprobs
    return ids, logprobs


OnTurn = Callable[[str, tuple[int, ...]], Sequence[int] | None]
"""An environment's answer: (request id, tokens of the turn that a stop token just ended) -> tokens to append to the
sequence before the policy goes on, or None where the response is over."""


@runtime_checkable
class Rollout(Protocol):
    """Anything that turns requests into trajectories under weights of a known version."""

    @property
    def version(self) -> int: ...

    def generate(self, requests: Sequence[Request], *, on_turn: OnTurn | None = None) -> list[Trajectory]:
        """Runs all requests to their end, turn by turn where on_turn answers; the result has their order."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """Anything that learns from a RolloutBatch and can give out its weights."""

    @property
    def version(self) -> int: ...

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """One RL step over the batch (several optimizer steps); returns the step's metrics."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under Hugging Face parameter names, in the compute dtype."""
        ...


@runtime_checkable
class WeightSync(Protocol):
    """Moves the trainer's weights into the rollout, in place."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...


Metrics = dict[str, float]
JsonDict = dict[str, Any]
