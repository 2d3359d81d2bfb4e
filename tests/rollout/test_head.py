"""The rollout's likeliest tokens: exact log-probs, aligned with the response, whatever the batch."""

import math
from dataclasses import replace

import pytest
import torch

import kernel_case
from tiny import make_engine, tiny_requests
from tracefp4.rollout import head
from tracefp4.types import Request, SamplingParams, TrainBatch, Trajectory


def requests(n: int, k: int, **settings: float) -> list[Request]:
    return [
        replace(r, sampling=replace(r.sampling, top_logprobs=k))
        for r in tiny_requests(n, max_new_tokens=6, **settings)  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_whole_vocabulary_is_the_distribution_sampled_from(temperature: float) -> None:
    out = make_engine("bf16", "float32").generate(requests(5, 32, temperature=temperature))
    for t in out:
        assert t.head is not None
        assert t.head.ids.shape == t.head.logprobs.shape == (len(t.response_ids), 32)
        torch.testing.assert_close(t.head.logprobs.exp().sum(-1), torch.ones(len(t.response_ids)))
        assert (t.head.logprobs.diff(dim=-1) <= 0).all()
        at = (t.head.ids == torch.tensor(t.response_ids)[:, None]).nonzero()
        assert at[:, 0].tolist() == list(range(len(t.response_ids)))
        torch.testing.assert_close(t.head.logprobs[at[:, 0], at[:, 1]], t.logprobs, rtol=0, atol=1e-6)


def test_a_smaller_head_is_the_front_of_a_larger_one_and_more_than_the_vocabulary_is_all_of_it() -> None:
    small, large = (make_engine("bf16", "float32").generate(requests(3, k)) for k in (4, 1000))
    for a, b in zip(small, large, strict=True):
        assert a.response_ids == b.response_ids
        assert a.head is not None
        assert b.head is not None
        assert b.head.ids.shape[1] == 32
        assert torch.equal(a.head.ids, b.head.ids[:, :4])
        assert torch.equal(a.head.logprobs, b.head.logprobs[:, :4])


def test_only_requests_that_ask_get_one() -> None:
    plain, asking = tiny_requests(1, max_new_tokens=3)[0], requests(2, 5)[1]
    out = make_engine("bf16").generate([plain, asking])
    assert out[0].head is None
    assert out[1].head is not None
    batch = TrainBatch.collate([replace(t, advantage=1.0) for t in out], 0)
    assert batch.head_ids is not None
    assert batch.head_logprobs is not None
    assert batch.head_ids.shape == (*batch.response_mask.shape, 5)
    assert (batch.head_logprobs[0] == -math.inf).all()
    assert (batch.head_logprobs[1].isfinite().all(-1) == batch.response_mask[1]).all()
    start = len(asking.prompt_ids) - 1
    assert torch.equal(batch.head_ids[1, start : start + 6], out[1].head.ids.long())
    assert TrainBatch.collate([replace(out[0], advantage=1.0)], 0).head_ids is None


def test_an_environments_tokens_have_none() -> None:
    request = replace(
        requests(1, 3)[0], sampling=SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(32)), top_logprobs=3)
    )
    turns: list[int] = []

    def answer(_: str, turn: tuple[int, ...]) -> list[int] | None:
        turns.append(len(turn))
        return [5, 6] if len(turns) == 1 else None

    (t,) = make_engine("bf16").generate([request], on_turn=answer)
    assert t.sampled is not None
    assert t.sampled.tolist() == [True, False, False, True]
    assert t.head is not None
    assert t.head.logprobs.isfinite().all(-1).tolist() == t.sampled.tolist()


def test_preemption_changes_nothing() -> None:
    roomy, tight = (make_engine("bf16", "float32", num_pages=pages).generate(requests(4, 8)) for pages in (0, 3))
    for a, b in zip(roomy, tight, strict=True):
        assert a.head is not None
        assert b.head is not None
        torch.testing.assert_close(a.head.logprobs, b.head.logprobs, rtol=0, atol=1e-5)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="top_logprobs must be >= 0"):
        SamplingParams(top_logprobs=-1)


@pytest.mark.parametrize("k", [1, 20, 501])
def test_blocks_of_rows_find_what_all_rows_find_at_once(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several tokens are equally likely, too."""
    B, V = 11, 501
    logits = (torch.randn(B, V, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    logits[::2] = logits[::2].round()
    logits[4] = 1.0
    temperature = torch.linspace(0.3, 2.0, B)
    want = head.likeliest(logits, temperature, k)
    for rows in (1, 2, 3, 5, 6, 10, 11, 12):
        monkeypatch.setattr(head, "HEAD_BYTES", rows * V * head.HEAD_LOGIT_BYTES)
        got = head.likeliest(logits, temperature, k)
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(got, want, strict=True))


def kernel_requests(n: int, k: int, tokens: int, **settings: float) -> list[Request]:
    asked = kernel_case.requests(n, tokens, **settings)
    return [replace(r, sampling=replace(r.sampling, top_logprobs=k)) for r in asked]


def check_whole(out: list[Trajectory], vocab: int = 32) -> None:
    """Heads of the whole vocabulary: a distribution at every token, with the token's own log-prob at its place."""
    for t in out:
        assert t.head is not None
        assert t.head.ids.shape == t.head.logprobs.shape == (len(t.response_ids), vocab)
        torch.testing.assert_close(t.head.logprobs.exp().sum(-1), torch.ones(len(t.response_ids)))
        assert (t.head.logprobs.diff(dim=-1) <= 0).all()
        at = (t.head.ids == torch.tensor(t.response_ids)[:, None]).nonzero()
        assert at[:, 0].tolist() == list(range(len(t.response_ids)))
        torch.testing.assert_close(t.head.logprobs[at[:, 0], at[:, 1]], t.logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("temperature", "top_p", "burst"), [(1.0, 1.0, 1), (0.6, 1.0, 4), (1.0, 0.7, 4)])
def test_over_the_kernels_too(temperature: float, top_p: float, burst: int) -> None:
    asked = kernel_requests(7, 32, 9, temperature=temperature, top_p=top_p)
    check_whole(kernel_case.engine("trace-all", "references", steps_per_sync=burst).generate(asked))


def test_by_triton() -> None:
    """The captured step on a GPU; the interpreter without."""
    check_whole(kernel_case.engine("bf16", "triton").generate(kernel_requests(3, 1000, 3)))


def test_over_the_kernels_a_wider_head_may_be_asked_for_on_the_way() -> None:
    """Steps keep the widest head that any request has asked for; what was drawn before is not drawn again."""
    alone = kernel_case.engine("bf16", "references").generate(kernel_requests(2, 4, 12))
    made = kernel_case.engine("bf16", "references")
    first, second = kernel_requests(2, 4, 12)
    plain, wide = kernel_case.requests(4, 6)[2], kernel_requests(4, 32, 6)[3]
    done = {}
    made.add_request(first)
    made.add_request(plain)
    for _ in range(3):
        done.update((t.request_id, t) for t in made.step())
    made.add_request(wide)
    made.add_request(second)
    while made.scheduler.unfinished:
        done.update((t.request_id, t) for t in made.step())
    assert done[plain.request_id].head is None
    check_whole([done[wide.request_id]])
    for want in alone:
        got = done[want.request_id]
        assert got.response_ids == want.response_ids
        assert got.head is not None
        assert want.head is not None
        assert got.head.ids.shape == (len(got.response_ids), 4)
        torch.testing.assert_close(got.head.logprobs, want.head.logprobs)


def test_over_the_kernels_preemption_keeps_what_was_drawn() -> None:
    made = kernel_case.engine("bf16", "references", num_pages=4)
    out = made.generate(kernel_requests(4, 32, 14))
    assert made.scheduler.num_preemptions > 0
    check_whole(out)
