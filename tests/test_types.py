"""The data contract: collation, positions of masks, validation."""

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch

from tracefp4.errors import TracefpError
from tracefp4.types import SamplingParams, TrainBatch, Trajectory


def trajectory(name: str, prompt: tuple[int, ...], response: tuple[int, ...], advantage: float = 0.0) -> Trajectory:
    logprobs = -torch.arange(1.0, len(response) + 1)
    none = torch.zeros(0)
    return Trajectory(name, prompt, response, logprobs, none, none, None, "stop", advantage=advantage)


def test_example_of_the_module() -> None:
    t = trajectory("a", (5, 7), (9, 2))
    assert t.token_ids == (5, 7, 9, 2)
    assert t.num_rows == 3
    assert math.isnan(t.reward)


def test_collate() -> None:
    """Position t of the response mask predicts token t + 1; the log-prob of that token stands there."""
    batch = TrainBatch.collate(
        [trajectory("a", (5, 7), (9, 2), 0.5), trajectory("b", (3,), (4, 6, 8, 2), -1.5)], pad_id=31
    )
    assert batch.input_ids.tolist() == [[5, 7, 9, 2, 31], [3, 4, 6, 8, 2]]
    assert batch.attention_mask.tolist() == [[True, True, True, True, False], [True] * 5]
    assert batch.response_mask.tolist() == [[False, True, True, False], [True] * 4]
    assert batch.rollout_logprobs.tolist() == [[0, -1, -2, 0], [-1, -2, -3, -4]]
    assert batch.advantages.tolist() == [0.5, -1.5]
    assert [t.request_id for t in batch.trajectories] == ["a", "b"]
    dtypes = (torch.int64, torch.bool, torch.bool, torch.float32, torch.float32)
    fields = ("input_ids", "attention_mask", "response_mask", "rollout_logprobs", "advantages")
    assert tuple(getattr(batch, f).dtype for f in fields) == dtypes
    for b, t in enumerate(batch.trajectories):
        predicted = batch.input_ids[b, 1:][batch.response_mask[b]]
        assert tuple(predicted.tolist()) == t.response_ids


def test_a_pad_id_that_is_also_a_token_is_still_attended_to() -> None:
    batch = TrainBatch.collate([trajectory("a", (0, 0), (0,)), trajectory("b", (1,), (2, 3, 4))], pad_id=0)
    assert batch.attention_mask.sum(-1).tolist() == [3, 4]
    assert batch.response_mask.sum(-1).tolist() == [1, 3]


@pytest.mark.parametrize("count", [1, 3])
def test_log_probs_must_match_the_response(count: int) -> None:
    t = trajectory("a", (5,), (9, 2))
    t.logprobs = torch.zeros(count)
    with pytest.raises(ValueError, match=f"trajectory a: {count} log-probs for 2 response tokens"):
        TrainBatch.collate([trajectory("b", (1,), (2,)), t], pad_id=0)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"max_new_tokens": 0},
    ],
    ids=str,
)
def test_sampling_params_are_checked(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} must be"):
        SamplingParams(**bad)


def test_sampling_params_bounds_are_allowed_and_frozen() -> None:
    params = SamplingParams(temperature=0.0, top_p=1.0, max_new_tokens=1)
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"temperature": math.inf}, "temperature must be >= 0, a finite number, got inf"),
        ({"temperature": math.nan}, "temperature must be >= 0"),
        ({"temperature": "1"}, "temperature must be >= 0, a finite number, got '1'"),
        ({"top_p": None}, r"top_p must be in \(0, 1\], got None"),
        ({"top_p": True}, r"top_p must be in \(0, 1\], got True"),
        ({"top_p": 90}, r"top_p must be in \(0, 1\], got 90"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be >= 1, a whole number, got 2.5"),
        ({"top_logprobs": True}, "top_logprobs must be >= 0, a whole number, got True"),
        ({"seed": 1.5}, r"seed must be in \[0, 2\*\*63\), a whole number, got 1.5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a tuple of token ids, got 5"),
        ({"stop_token_ids": "</s>"}, "stop_token_ids must be a tuple of token ids, got '</s>'"),
        ({"stop_token_ids": (2, "x")}, "stop_token_ids must be a tuple of token ids"),
    ],
)
def test_what_nothing_can_be_sampled_by(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TracefpError, match=f"^{sentence}"):
        SamplingParams(**setting)


def test_numbers_of_numpy_are_numbers() -> None:
    given = SamplingParams(np.float32(0.5), np.float64(0.9), np.int64(3), (np.int32(2),), np.int64(7))
    assert (given.temperature, given.top_p, given.max_new_tokens, given.seed) == (0.5, 0.9, 3, 7)
