"""verl's sampling parameters as the engine's."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tracefp4.config import did_you_mean
from tracefp4.errors import TracefpError
from tracefp4.types import SamplingParams

_KNOWN = ["temperature", "top_p", "top_k", "repetition_penalty", "logprobs", "max_tokens", "max_new_tokens", "seed"]
_NEUTRAL: dict[str, tuple[Any, ...]] = {"top_k": (-1, 0, None), "repetition_penalty": (1, 1.0, None)}


def to_sampling_params(
    params: Mapping[str, Any], prompt_tokens: int, max_tokens: int, max_model_len: int, stop: Sequence[int], seed: int
) -> SamplingParams:
    """SamplingParams of one request.

    max_tokens: response tokens where the request names no limit. Whatever it names is bounded by max_model_len. seed:
    used where the request has none. Raises TracefpError for a parameter that the engine does not have, or a prompt
    that leaves no room.
    """
    for name, value in params.items():
        if name not in _KNOWN:
            raise TracefpError(f"sampling parameter {name!r} is not supported by rollout.name=tracefp4"
                               f"{did_you_mean(name, _KNOWN)}")  # fmt: skip
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise TracefpError(
                f"rollout.name=tracefp4 has no {name}; leave actor_rollout_ref.rollout.{name} at {_NEUTRAL[name][0]}, "
                f"got {value}"
            )
    room = max_model_len - prompt_tokens
    if room < 1:
        raise TracefpError(
            f"a prompt of {prompt_tokens} tokens leaves no room in {max_model_len}; raise "
            "actor_rollout_ref.rollout.max_model_len or lower data.max_prompt_length"
        )
    wanted = params.get("max_tokens", params.get("max_new_tokens"))
    return SamplingParams(
        temperature=float(params.get("temperature", 1.0)),
        top_p=float(params.get("top_p", 1.0)),
        max_new_tokens=max(1, min(max_tokens if wanted is None else int(wanted), room)),
        stop_token_ids=tuple(stop),
        seed=seed if params.get("seed") is None else int(params["seed"]),
    )


class RequestSeeds:
    """A seed per request that does not depend on the order in which requests of different prompts arrive.

    The n-th request of a prompt under a policy version gets the same seed in every run with the same base seed.
    """

    def __init__(self, base: int) -> None:
        self._base = base
        self._version = -1
        self._seen: Counter[tuple[int, ...]] = Counter()

    def next(self, version: int, prompt: Sequence[int]) -> int:
        """63 bits."""
        if version != self._version:
            self._version = version
            self._seen.clear()
        key = tuple(prompt)
        self._seen[key] += 1
        text = f"{self._base}|{version}|{key}|{self._seen[key]}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
