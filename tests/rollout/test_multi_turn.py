"""Responses of several turns: an environment answers, the sequence goes on from its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import make_engine, tiny_config, tiny_model, tiny_requests
from tracefp4.errors import TracefpError
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.types import Request, TrainBatch, Trajectory

STOPS = tuple(range(1, 9))
"""A quarter of the vocabulary ends a turn, so that turns are short."""


def requests(n: int = 6, max_new_tokens: int = 40) -> list[Request]:
    return [
        replace(r, sampling=replace(r.sampling, stop_token_ids=STOPS))
        for r in tiny_requests(n, max_prompt=10, max_new_tokens=max_new_tokens)
    ]


class Environment:
    """Answers the first ``turns`` turns of every request with tokens that depend on the turn's own."""

    def __init__(self, turns: int = 3, length: int = 5) -> None:
        self.turns, self.length = turns, length
        self.heard: dict[str, list[tuple[int, ...]]] = {}
        self.said: dict[str, list[list[int]]] = {}

    def __call__(self, request_id: str, turn: tuple[int, ...]) -> Sequence[int] | None:
        self.heard.setdefault(request_id, []).append(turn)
        if len(self.heard[request_id]) > self.turns:
            return None
        reply = [10 + (sum(turn) + i) % 20 for i in range(self.length)]
        self.said.setdefault(request_id, []).append(reply)
        return reply


def run(engine: RolloutEngine, environment: Callable[..., Any] | None = None, **sizes: int) -> list[Trajectory]:
    return engine.generate(requests(**sizes), on_turn=environment or Environment())


def hf_logprobs(t: Trajectory) -> Tensor:
    with torch.no_grad():
        logits = tiny_model(tiny_config())(torch.tensor([t.token_ids])).logits[0].float()
    p = len(t.prompt_ids)
    return torch.log_softmax(logits, -1)[p - 1 : -1].gather(-1, torch.tensor(t.response_ids)[:, None])[:, 0]


def test_a_response_is_the_turns_and_the_answers_in_order() -> None:
    environment = Environment()
    several = 0
    for t in run(make_engine("bf16", "float32"), environment):
        heard, said = environment.heard.get(t.request_id, []), environment.said.get(t.request_id, [])
        several += len(heard) > 1
        expected: list[int] = []
        flags: list[bool] = []
        for i, turn in enumerate(heard):
            assert turn[-1] in STOPS
            assert not set(turn[:-1]) & set(STOPS)
            expected += turn
            flags += [True] * len(turn)
            if i < len(said):
                expected += said[i]
                flags += [False] * len(said[i])
        assert list(t.response_ids[: len(expected)]) == expected
        assert t.sampled_mask.tolist()[: len(flags)] == flags
        assert all(t.sampled_mask.tolist()[len(flags) :])
        assert t.num_rows == len(t.row_versions) == len(t.token_ids) - 1
        assert t.versions.tolist() == [0 if sampled else -1 for sampled in t.sampled_mask.tolist()]
        assert len(t.logprobs) == len(t.response_ids)
        assert bool((t.logprobs[~t.sampled_mask] == 0).all())
    assert several >= 4


def test_log_probs_of_every_turn_are_those_of_one_forward_over_all_tokens() -> None:
    for t in run(make_engine("bf16", "float32")):
        assert (t.logprobs - hf_logprobs(t))[t.sampled_mask].abs().max() < 1e-5


@pytest.mark.parametrize(
    "sizes",
    [{"max_tokens_per_step": 3}, {"max_tokens_per_step": 1}, {"page_size": 1}, {"max_num_seqs": 2}],
    ids=str,
)
def test_sizes_change_nothing(sizes: dict[str, int]) -> None:
    plain = run(make_engine("bf16", "float32"))
    for t, want in zip(run(make_engine("bf16", "float32", **sizes)), plain, strict=True):
        assert t.response_ids == want.response_ids
        assert torch.equal(t.sampled_mask, want.sampled_mask)
        assert (t.logprobs - want.logprobs).abs().max() < 1e-5


def test_every_turns_rows_are_recorded_as_one_prefill_of_all_tokens_records_them() -> None:
    """FP32 paths: chunks change no slot here; the records of the turns and of one long prompt are the same bytes."""
    engine = make_engine("trace-all", "float32", max_model_len=128)
    for t in run(engine):
        assert t.guidance is not None
        record = engine.store.get(t.guidance)
        assert record.token_ids.tolist() == list(t.token_ids[:-1])
        assert bool(record.valid.all())
        again = Request(f"{t.request_id}/again", t.token_ids[:-1], replace(requests()[0].sampling, max_new_tokens=1))
        (whole,) = engine.generate([again])
        assert whole.guidance is not None
        other = engine.store.get(whole.guidance)
        for site, rows in record.sites.items():
            assert torch.equal(rows.payload, other.sites[site].payload), site
        assert t.routed_experts is not None
        assert whole.routed_experts is not None
        assert torch.equal(t.routed_experts, whole.routed_experts)


def test_preemption_between_turns_changes_no_token_and_marks_rows() -> None:
    plain = run(make_engine("bf16", "float32"))
    engine = make_engine("trace-all", "float32", page_size=4, num_pages=16)
    tight = make_engine("bf16", "float32", page_size=4, num_pages=16)
    for t, want in zip(run(tight), plain, strict=True):
        assert t.response_ids == want.response_ids
    assert tight.scheduler.num_preemptions > 0
    invalid = 0
    for t in run(engine):
        assert t.guidance is not None
        invalid += int((~engine.store.get(t.guidance).valid).sum())
    assert engine.scheduler.num_preemptions > 0
    assert invalid > 0
    assert engine.blocks.num_free == engine.blocks.num_pages


def test_an_answer_without_room_ends_the_response_as_cut_off() -> None:
    environment = Environment(turns=99, length=12)
    cut = 0
    for t in run(make_engine("bf16", "float32"), environment, max_new_tokens=20):
        assert len(t.response_ids) <= 20
        assert t.sampled_mask[-1], "a response ends with a token of the policy"
        cut += t.finish_reason == "length"
    assert cut >= 4


def test_an_environment_that_raises_leaves_the_engine_idle_and_the_store_empty() -> None:
    engine = make_engine("trace-all")
    calls = 0

    def broken(request_id: str, turn: tuple[int, ...]) -> Sequence[int] | None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("tool is down")
        return None

    with pytest.raises(RuntimeError, match="tool is down"):
        run(engine, broken)
    assert engine.scheduler.unfinished == 0
    assert engine.blocks.num_free == engine.blocks.num_pages
    assert len(engine.store) == 0  # type: ignore[arg-type]
    assert len(run(engine)) == 6


def test_an_answer_with_a_foreign_token_id_is_refused() -> None:
    engine = make_engine("bf16", "float32")
    with pytest.raises(TracefpError, match=r"token id outside 0\.\.31"):
        run(engine, lambda request_id, turn: [99])
    assert engine.scheduler.unfinished == 0


def test_answers_teach_nothing() -> None:
    batch = run(make_engine("bf16", "float32"))
    for t in batch:
        t.advantage = 1.0
    collated = TrainBatch.collate(batch, 0)
    for b, t in enumerate(batch):
        p, n = len(t.prompt_ids), len(t.token_ids)
        assert torch.equal(collated.response_mask[b, p - 1 : n - 1], t.sampled_mask)
        assert not bool(collated.response_mask[b, n - 1 :].any())
    assert collated.response_mask.sum() == sum(t.num_sampled for t in batch)
