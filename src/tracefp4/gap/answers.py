"""What a form answers with, and how it is asked."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any

Key = tuple[str, int]
"""An answer's place: inquiry id and sample number."""


@dataclass(frozen=True)
class Sampling:
    """samples: answers to each inquiry. seed: of the run; chat: "auto", "on" or "off"."""

    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0
    chat: str = "auto"


@dataclass(frozen=True)
class Job:
    """One answer to be had: sample ``sample`` of inquiry number ``inquiry`` (from 0) with id ``id``."""

    inquiry: int
    id: str
    sample: int

    @property
    def key(self) -> Key:
        return self.id, self.sample

    def seed(self, run_seed: int) -> int:
        """Below 2^31, the same for both forms and whatever else is asked."""
        digest = hashlib.sha256(f"{run_seed}:{self.sample}:{self.id}".encode()).digest()
        return int.from_bytes(digest[:4], "little") >> 1


@dataclass(frozen=True)
class Answer:
    """One answer.

    Fields:
        text: without special tokens.
        finish: "stop", or "length" where it was cut at the limit of tokens; else what the server said.
        seconds: from request to answer; of the whole batch for weights on this machine.
        prompt_tokens, tokens: None where a server does not say.
        prompt_ids, token_ids: where the form is run here, or the server tells token ids; the end token among them.
        logprobs: of each token under temperature 1, None where they are unknown.
        pieces: the tokens as text, where a server gives log-probs without ids.
    """

    text: str
    finish: str
    seconds: float
    prompt_tokens: int | None = None
    tokens: int | None = None
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    pieces: list[str] | None = None

    def without_tokens(self) -> Answer:
        """Without what only a comparison of tokens needs: it is many times the text."""
        return replace(self, prompt_ids=None, token_ids=None, logprobs=None, pieces=None)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Failure:
    """Why an answer is missing; final: asking again would not help (the prompt does not fit)."""

    reason: str
    final: bool = False
