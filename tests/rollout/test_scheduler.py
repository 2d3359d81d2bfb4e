"""Pages and scheduling under random load: no slot has two owners, nothing is lost, everyone finishes."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.rollout.block_manager import BlockManager
from tracefp4.rollout.scheduler import Scheduled, Scheduler
from tracefp4.rollout.sequence import Sequence, Status
from tracefp4.types import Request, SamplingParams


def sequence(name: str, prompt: int, new: int) -> Sequence:
    return Sequence(Request(name, (5,) * prompt, SamplingParams(max_new_tokens=new)))


def test_pages_are_handed_out_once_and_come_back() -> None:
    blocks = BlockManager(4, 3)
    a, b = sequence("a", 1, 1), sequence("b", 1, 1)
    blocks.grow(a, 4)
    blocks.grow(b, 3)
    assert (len(a.block_table), len(b.block_table), blocks.num_free) == (2, 1, 1)
    assert not set(a.block_table) & set(b.block_table)
    blocks.grow(a, 6)  # still fits
    assert len(a.block_table) == 2
    assert blocks.can_grow(a, 9)
    assert not blocks.can_grow(a, 10)
    assert blocks.slots(a, 2, 5).tolist() == [a.block_table[0] * 3 + 2, a.block_table[1] * 3, a.block_table[1] * 3 + 1]
    with pytest.raises(RuntimeError, match="no free page"):
        blocks.grow(b, 12)
    blocks.release(a)
    blocks.release(b)
    assert blocks.num_free == 4


def test_an_empty_cache_is_refused() -> None:
    for pages, size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least one page"):
            BlockManager(pages, size)


class Machine:
    """What the engine does around a scheduler, without a model; checks every batch."""

    def __init__(self, pages: int, page_size: int, max_seqs: int, budget: int) -> None:
        self.blocks = BlockManager(pages, page_size)
        self.scheduler = Scheduler(self.blocks, max_seqs, budget)
        self.live: list[Sequence] = []
        self.written: dict[str, set[int]] = {}  # rows of each sequence that are in its present slots

    def add(self, seq: Sequence) -> None:
        self.live.append(seq)
        self.scheduler.add(seq)

    def check(self, batch: list[Scheduled]) -> None:
        owned = Counter(page for s in self.live for page in s.block_table)
        assert all(n == 1 for n in owned.values())
        assert len(owned) + self.blocks.num_free == self.blocks.num_pages
        assert len({id(s.seq) for s in batch}) == len(batch)
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        decoding = all(s.stop - s.start == 1 and s.start >= s.seq.num_prompt for s in batch)
        if not decoding:
            assert sum(s.stop - s.start for s in batch) <= self.scheduler.max_tokens_per_step
        for s in batch:
            assert s.seq in self.live
            assert s.start == s.seq.num_computed < s.stop <= len(s.seq.tokens)
            assert len(s.seq.block_table) >= self.blocks.pages_for(s.stop)
            if s.start == 0:
                self.written[s.seq.request.request_id] = set()
            rows = self.written[s.seq.request.request_id]
            assert rows == set(range(s.start))  # all earlier rows stand in the pages it holds now
            rows.update(range(s.start, s.stop))

    def step(self) -> bool:
        before = self.scheduler.num_preemptions
        batch = self.scheduler.schedule()
        self.check(batch)
        for s in batch:
            s.seq.num_computed = s.stop
            s.seq.row_versions.extend([0] * (s.stop - s.start))
            if s.samples:
                s.seq.extend([7], [0.0], 0)
                if s.seq.finish_reason:
                    assert s.seq.num_computed == len(s.seq.tokens) - 1 == len(s.seq.row_versions)
                    self.finish(s.seq, s.seq.finish_reason)
        return bool(batch) or self.scheduler.num_preemptions > before

    def finish(self, seq: Sequence, reason: str) -> None:
        self.scheduler.finish(seq, reason)
        self.live.remove(seq)


@settings(max_examples=300, deadline=None)
@given(
    pages=st.integers(1, 12),
    page_size=st.integers(1, 5),
    max_seqs=st.integers(1, 5),
    budget=st.integers(1, 17),
    seed=st.integers(0, 10**6),
)
def test_random_load(pages: int, page_size: int, max_seqs: int, budget: int, seed: int) -> None:
    rng = random.Random(seed)
    m = Machine(pages, page_size, max_seqs, budget)
    added = rng.randint(1, 12)
    todo = added
    # Every step forwards a row or preempts. A preempted sequence is admitted again only with room for a token more,
    # so it gains one each time: the steps are bounded by a small multiple of all tokens squared.
    for _ in range(20000):
        if todo and rng.random() < 0.4:
            total = rng.randint(2, max(2, min(30, pages * page_size)))
            if m.blocks.pages_for(total) <= pages:
                prompt = rng.randint(1, total - 1)
                m.add(sequence(f"s{todo}", prompt, total - prompt))
            todo -= 1
        elif m.live and rng.random() < 0.03:
            m.finish(rng.choice(m.live), "abort")
        elif not m.step() and not todo:
            break
    assert not m.live
    assert m.scheduler.unfinished == 0
    assert m.blocks.num_free == pages
    assert sorted(m.blocks._free) == list(range(pages))


def test_long_prompts_are_chunked_to_the_budget() -> None:
    m = Machine(20, 4, 4, 10)
    a, b = sequence("a", 25, 2), sequence("b", 3, 2)
    m.add(a)
    m.add(b)
    seen = []
    for _ in range(3):
        batch = m.scheduler.schedule()
        m.check(batch)
        seen.append([(s.seq.request.request_id, s.start, s.stop, s.samples) for s in batch])
        for s in batch:
            s.seq.num_computed = s.stop
    assert seen == [[("a", 0, 10, False)], [("a", 10, 20, False)], [("a", 20, 25, True), ("b", 0, 3, True)]]


def test_the_newest_sequence_is_preempted_and_marked() -> None:
    m = Machine(4, 2, 4, 100)
    a, b = sequence("a", 3, 5), sequence("b", 3, 5)
    m.add(a)
    m.add(b)
    while not m.scheduler.num_preemptions:
        m.step()
    assert (a.status, b.status) == (Status.RUNNING, Status.WAITING)
    assert (b.num_computed, b.num_recomputed, b.block_table, b.row_versions) == (0, len(b.tokens) - 1, [], [])
    while m.scheduler.unfinished:
        m.step()
    assert a.num_recomputed == 0
    assert len(b.tokens) == 8


def test_a_preempted_sequence_waits_behind_a_half_prefilled_one() -> None:
    """Which holds pages: it would keep them while the other one waits for them."""
    m = Machine(6, 2, 2, 3)
    a = sequence("a", 3, 5)
    m.add(a)
    m.step()
    half = sequence("half", 4, 1)
    m.add(half)
    m.step()
    assert 0 < half.num_computed < 4
    half.num_computed = 0  # as after a step that raised: the pages are held, no row is settled
    m.scheduler._preempt(a)
    assert list(m.scheduler.waiting) == [half, a]
