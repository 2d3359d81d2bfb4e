"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tracefp4.types import Request


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """State of one request. tokens = prompt + response so far; rows [0, num_computed) are in the cache.

    A row's policy version stands in row_versions, a sampled token's in versions. Rows below
    num_recomputed were forwarded twice (preemption): later tokens read other K and V than earlier ones did, so
    no single record is right for them and they are handed out as invalid.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    row_versions: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_recomputed: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def response(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.num_prompt :])

    def append(self, token: int, logprob: float, version: int) -> None:
        """Takes a sampled token and settles whether it ends the response."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        sampling = self.request.sampling
        if token in sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_new >= sampling.max_new_tokens:
            self.finish_reason = "length"
