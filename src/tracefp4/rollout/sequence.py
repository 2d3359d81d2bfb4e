"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from tracefp4.types import Request

Drawn = tuple[list[int], list[float]]
"""Tokens that a step drew for a sequence, in order, up to its stop token, and their log-probs."""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """State of one request. tokens = prompt + response so far; rows [0, num_computed) are in the cache.

    A row's policy version stands in row_versions, a sampled token's in versions; an environment's tokens have version
    -1 there, log-prob 0 and False in sampled. turn_start: index in tokens where the current turn begins. Rows below
    num_recomputed were forwarded twice (preemption): later tokens read other K and V than earlier ones did, so
    no single record is right for them and they are handed out as invalid. Rows below num_shared lie in pages of a
    sequence that begins alike, which has computed them, or will in the step that computes this one's first rows. Those
    below num_old are of older weights: such a sequence shares its pages with nobody from then on.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turn_start: int = 0
    row_versions: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_shared: int = 0
    num_old: int = 0
    num_recomputed: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    head: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of the sampled tokens, in order, (ids, log-probs) [n, k] of the likeliest ones; see ``tracefp4.rollout.head``."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.turn_start = len(self.tokens)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def response(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.num_prompt :])

    @property
    def turn(self) -> tuple[int, ...]:
        """Tokens of the current turn, the stop token included."""
        return tuple(self.tokens[self.turn_start :])

    def extend(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Takes sampled tokens and settles whether the last ends the response; none before it does."""
        n = len(tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * n
        self.sampled += [True] * n
        request = self.request
        sampling = request.sampling
        if tokens[-1] in sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) - len(request.prompt_ids) >= sampling.max_new_tokens:
            self.finish_reason = "length"

    def continue_with(self, reply: list[int]) -> None:
        """Opens the next turn after an environment's answer. The rows so far stay in the cache.

        Where the answer leaves no room for a sampled token the response ends as cut off, without it.
        """
        if self.num_new + len(reply) >= self.request.sampling.max_new_tokens:
            self.finish_reason = "length"
            return
        self.tokens.extend(reply)
        self.logprobs.extend([0.0] * len(reply))
        self.versions.extend([-1] * len(reply))
        self.sampled.extend([False] * len(reply))
        self.turn_start = len(self.tokens)
        self.finish_reason = None
