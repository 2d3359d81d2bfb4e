"""Captured decode steps, without a GPU: what a graph hands on lies in buffers, one for all sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_case import engine, requests
from tracefp4.rollout.decode import DecodeRunner
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.types import Request, SamplingParams


class Graph:
    """In place of a CUDA graph: does again what was captured, and hands nothing on but what is in the runner's buffers.

    As the memory that graphs share is another graph's next, all logits but those that the graph writes are spoilt.
    """

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.work: list[tuple[DecodeRunner, tuple[int, bool, bool]]] = []

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        ((run, size),) = self.work
        assert run._logits is not None
        run._logits.fill_(torch.nan)
        captured(run, *size)
        assert bool(run._logits[: size[0]].isfinite().all())


captured = DecodeRunner._captured


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, bool]]:
    """The sizes that were captured, in order."""
    sizes: list[tuple[int, bool, bool]] = []

    @contextmanager
    def capture(graph: Graph, pool: str | None, capture_error_mode: str) -> Iterator[None]:
        assert pool == ("pool" if sizes else None)
        assert capture_error_mode == "thread_local"
        Graph.capturing = graph
        yield
        Graph.capturing = None
        sizes.append(graph.work[0][1])

    def noted(self: DecodeRunner, *size: Any) -> None:
        assert Graph.capturing is not None
        Graph.capturing.work.append((self, size))
        captured(self, *size)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(DecodeRunner, "_captured", noted)
    return sizes


def made(with_graphs: bool) -> RolloutEngine:
    engine_ = engine("trace-all", "references", max_num_seqs=9)
    if with_graphs:
        kernels = engine_.kernels
        assert kernels is not None
        pages = kernels.runner.tables.shape[1]
        kernels.runner = DecodeRunner(kernels.model, kernels.pool, 9, pages, kernels.recorder, graphs=True)
    return engine_


def mixed(name: str, heads: int = 0) -> list[Request]:
    """Requests of unequal lengths, so that the batch shrinks from 9 rows to 1: greedy, whole, and cut by top-p."""
    settings = [(0.0, 1.0), (1.0, 0.5), (0.7, 1.0), (1.0, 0.9), (0.0, 0.3)]
    return [
        replace(r, request_id=f"{name}{i}", sampling=replace(
            r.sampling, temperature=settings[i % 5][0], top_p=settings[i % 5][1], max_new_tokens=3 + 2 * i,
            top_logprobs=heads,
        )) for i, r in enumerate(requests(9))
    ]  # fmt: skip


def assert_same(on: RolloutEngine, off: RolloutEngine, ask: list[Request]) -> None:
    for t, u in zip(on.generate(ask), off.generate(ask), strict=True):
        assert t.response_ids == u.response_ids
        assert torch.equal(t.logprobs, u.logprobs)
        assert t.guidance is not None
        assert u.guidance is not None
        assert on.store.get(t.guidance).checksum() == off.store.get(u.guidance).checksum()
        assert (t.head is None) == (u.head is None)
        if t.head is not None and u.head is not None:
            assert torch.equal(t.head.ids, u.head.ids)
            assert torch.equal(t.head.logprobs, u.head.logprobs)


@pytest.mark.parametrize("heads", [0, 3])
def test_captured_steps_draw_what_eager_ones_draw(heads: int, graphs: list[tuple[int, bool, bool]]) -> None:
    """Top-p from the logits that a graph has left, of sizes that alternate; and back to sizes that are captured."""
    ask = mixed("r", heads)
    ask += [Request("alone", (3, 4, 5), SamplingParams(1.0, 0.8, 5, seed=4, top_logprobs=heads))]
    ask += [Request("whole", (3, 4, 5), SamplingParams(1.0, 1.0, 5, seed=5, top_logprobs=heads))]
    on, off = made(True), made(False)
    assert on.kernels is not None
    logits = on.kernels.runner._logits
    assert logits is not None
    assert tuple(logits.shape) == (9, on.kernels.model.shape.vocab)
    for batch in (ask[9:10], ask[:9], ask[10:], mixed("again", heads)[:3]):
        assert_same(on, off, batch)
    assert {nucleus for _, nucleus, _ in graphs} == {False, True}
    assert {B for B, nucleus, _ in graphs if nucleus} >= {1, 4, 8, 9}
    assert len(graphs) == len(set(graphs)) == on.kernels.runner.captures
    assert on.kernels.runner._logits is logits


def test_heads_asked_for_later_are_captured_anew(graphs: list[tuple[int, bool, bool]]) -> None:
    on, off = made(True), made(False)
    assert_same(on, off, mixed("r")[:4])
    before = len(graphs)
    graphs.clear()  # the next capture takes no memory of these
    assert_same(on, off, mixed("again", 5)[:4])
    assert len(graphs) == before > 1


def test_steps_that_are_not_captured_hold_no_logits() -> None:
    off = made(False)
    off.generate(mixed("r")[:2])
    assert off.kernels is not None
    assert off.kernels.runner._logits is None
