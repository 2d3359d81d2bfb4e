"""Prefix caching: prompts that begin alike share pages, rows and records, and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_case
from tiny import make_engine, tiny_config, tiny_weights
from tracefp4.guidance.store import TrajectoryGuidance
from tracefp4.rollout.block_manager import BlockManager
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.scheduler import Scheduler
from tracefp4.rollout.sequence import Sequence, Status
from tracefp4.types import Request, SamplingParams, Trajectory

PROMPT = tuple(range(2, 22))
OTHER = (*PROMPT[:9], *range(21, 10, -1))
"""The same first nine tokens."""


def group(name: str, prompt: tuple[int, ...], n: int, new: int = 8, **fields: Any) -> list[Request]:
    return [Request(f"{name}{i}", prompt, SamplingParams(max_new_tokens=new, seed=i), **fields) for i in range(n)]


def record(engine: RolloutEngine, t: Trajectory) -> TrajectoryGuidance:
    assert t.guidance is not None
    return engine.store.get(t.guidance)


def same(a: RolloutEngine, b: RolloutEngine, ours: list[Trajectory], theirs: list[Trajectory]) -> None:
    """Equal tokens, versions and valid rows; log-probs and codes but for sums in another order."""
    for x, y in zip(ours, theirs, strict=True):
        assert x.response_ids == y.response_ids
        assert torch.equal(x.row_versions, y.row_versions)
        torch.testing.assert_close(x.logprobs, y.logprobs, rtol=1e-4, atol=1e-4)
        p, q = record(a, x), record(b, y)
        assert torch.equal(p.valid, q.valid)
        assert torch.equal(p.token_ids, q.token_ids)
        for site, rows in p.sites.items():
            assert float((rows.payload != q.sites[site].payload).float().mean()) < 2e-3


@pytest.mark.parametrize("chunk", [4096, 13])
def test_samples_of_a_prompt_compute_its_whole_pages_once(chunk: int) -> None:
    """20 tokens in pages of 4: the last token is each sample's own, and with it the fifth page."""
    requests = [*group("a", PROMPT, 4), *group("b", OTHER, 3), *group("c", PROMPT[:4], 2)]
    on, off = (
        make_engine("trace-all", "float32", page_size=4, prefix_caching=caching, max_tokens_per_step=chunk)
        for caching in (True, False)
    )
    ours, theirs = on.generate(requests), off.generate(requests)
    same(on, off, ours, theirs)
    assert off.scheduler.num_shared_rows == 0
    # Three of a share 16 rows; the first of b 8 with a, its others 16; a prompt of one page shares nothing.
    assert on.scheduler.num_shared_rows == 3 * 16 + 8 + 2 * 16
    first = record(on, ours[0])
    for other in ours[1:4]:
        for site, rows in record(on, other).sites.items():
            assert torch.equal(rows.payload[:, :16], first.sites[site].payload[:, :16])
    assert on.blocks.num_free == on.blocks.num_pages


def test_over_the_kernels_too() -> None:
    prompt = tuple(random.Random(1).choices(range(2, 32), k=36))
    requests = group("a", prompt, 3, new=6)
    on, off = (kernel_case.engine("trace-all", "references", prefix_caching=caching) for caching in (True, False))
    ours, theirs = on.generate(requests), off.generate(requests)
    assert on.scheduler.num_shared_rows == 2 * 32
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x.row_versions, y.row_versions)
        assert x.routed_experts is not None
        assert (x.routed_experts >= 0).all()
    first, second = (record(on, t) for t in ours[:2])
    for site, rows in second.sites.items():
        assert torch.equal(rows.payload[:, :32], first.sites[site].payload[:, :32])
    assert [t.response_ids[0] for t in ours] == [t.response_ids[0] for t in theirs]


def test_a_probe_shares_with_probes_only() -> None:
    engine = make_engine("trace-all", "float32", page_size=4)
    plain, probes = group("a", PROMPT, 2), group("p", PROMPT, 2, probe=True)
    done = {t.request_id: t for t in engine.generate([plain[0], probes[0], plain[1], probes[1]])}
    assert engine.scheduler.num_shared_rows == 2 * 16
    for i in (0, 1):
        probe = done[f"p{i}"].probe
        assert probe is not None
        assert engine.store.get(probe).valid.all()


def test_new_weights_end_all_sharing() -> None:
    """A sample that comes after the update computes its own rows, though the old ones are still in the cache."""
    engine = make_engine("trace-all", "float32", page_size=4)
    for request in group("a", PROMPT, 2):
        engine.add_request(request)
    engine.step()
    assert engine.scheduler.num_shared_rows == 16
    engine.update_weights(tiny_weights(tiny_config(), seed=1).items(), 1)
    for request in group("b", PROMPT, 2):
        engine.add_request(request)
    done: dict[str, Trajectory] = {}
    while engine.busy:
        done.update((t.request_id, t) for t in engine.step())
    assert engine.scheduler.num_shared_rows == 2 * 16  # of the second new one with the first new one
    for i in (0, 1):
        assert done[f"a{i}"].row_versions[:20].tolist() == [0] * 20
        assert done[f"b{i}"].row_versions.tolist() == [1] * len(done[f"b{i}"].row_versions)
        fresh = make_engine("trace-all", "float32", page_size=4, load=False)
        fresh.update_weights(tiny_weights(tiny_config(), seed=1).items(), 1)
        same(engine, fresh, [done[f"b{i}"]], fresh.generate([group("b", PROMPT, 2)[i]]))


def test_weights_that_change_between_a_failed_step_and_its_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples had been given the first one's pages, and none of the rows was computed."""
    engine = make_engine("trace-all", "float32", page_size=4)
    for request in group("a", PROMPT, 3):
        engine.add_request(request)
    step_that_fails(engine, monkeypatch)
    engine.update_weights(tiny_weights(tiny_config(), seed=1).items(), 1)
    done: list[Trajectory] = []
    while engine.busy:
        done += engine.step()
    fresh = make_engine("trace-all", "float32", page_size=4, load=False)
    fresh.update_weights(tiny_weights(tiny_config(), seed=1).items(), 1)
    done.sort(key=lambda t: t.request_id)
    same(engine, fresh, done, fresh.generate(group("a", PROMPT, 3)))
    assert all(t.row_versions.tolist() == [1] * len(t.row_versions) for t in done)


def test_a_prompt_half_of_older_weights_is_shared_with_nobody() -> None:
    """Its later pages are of the new weights, but stand behind older ones."""
    engine = make_engine("trace-all", "float32", page_size=4, max_tokens_per_step=8)
    first, second = group("a", PROMPT, 2)
    engine.add_request(first)
    engine.step()
    engine.update_weights(tiny_weights(tiny_config(), seed=1).items(), 1)
    engine.add_request(second)
    done: dict[str, Trajectory] = {}
    while engine.busy:
        done.update((t.request_id, t) for t in engine.step())
    assert engine.scheduler.num_shared_rows == 0
    assert done["a0"].row_versions[:20].tolist() == [0] * 8 + [1] * 12
    fresh = make_engine("trace-all", "float32", page_size=4, load=False)
    fresh.update_weights(tiny_weights(tiny_config(), seed=1).items(), 1)
    same(engine, fresh, [done["a1"]], fresh.generate([second]))


def test_pages_of_a_failed_step_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that comes after it would take pages over whose rows nobody has computed."""
    engine = make_engine("trace-all", "float32", page_size=4)
    first, second = group("a", PROMPT, 2)
    engine.add_request(first)
    step_that_fails(engine, monkeypatch)
    engine.add_request(second)
    done: list[Trajectory] = []
    while engine.busy:
        done += engine.step()
    done.sort(key=lambda t: t.request_id)
    fresh = make_engine("trace-all", "float32", page_size=4)
    same(engine, fresh, done, fresh.generate([first, second]))


def step_that_fails(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise FloatingPointError("logits are not finite")

    with monkeypatch.context() as patched:
        patched.setattr(engine.model, "forward", fails)
        with pytest.raises(FloatingPointError):
            engine.step()


def test_pages_outlive_the_sequence_that_filled_them() -> None:
    """The first sample is aborted, or preempted: the others go on with its pages, whose record is theirs."""
    alone = make_engine("trace-all", "float32", page_size=4, prefix_caching=False)
    want = alone.generate(group("a", PROMPT, 3))
    engine = make_engine("trace-all", "float32", page_size=4)
    for request in group("a", PROMPT, 3):
        engine.add_request(request)
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[1])
    engine.abort("a0")
    done: list[Trajectory] = []
    while engine.busy:
        done += engine.step()
    done.sort(key=lambda t: t.request_id)
    assert [t.response_ids for t in done] == [t.response_ids for t in want[1:]]
    assert record(engine, done[1]).valid.all()
    same(engine, alone, done[1:], want[2:])
    assert engine.scheduler.num_shared_rows == 3 * 16, "the preempted one found the pages again"
    assert engine.blocks.num_free == engine.blocks.num_pages


def test_a_prompt_that_does_not_fit_holds_no_pages_while_it_waits() -> None:
    engine = make_engine("trace-all", "float32", page_size=4, num_pages=11)
    requests = [*group("a", PROMPT, 2, new=12), *group("b", (*PROMPT, *PROMPT), 1, new=2)]
    for request in requests:
        engine.add_request(request)
    engine.step()
    (waiting,) = engine.scheduler.waiting
    assert (waiting.block_table, waiting.num_shared) == ([], 0)
    while engine.busy:
        engine.step()
    assert engine.blocks.num_free == 11


# -- under random load ----------------------------------------------------------------------------------------------


class Cache:
    """What every slot would hold: the tokens up to its row, and the version of the weights."""

    def __init__(self, pages: int, page_size: int, max_seqs: int, budget: int) -> None:
        self.blocks = BlockManager(pages, page_size, prefix_caching=True)
        self.scheduler = Scheduler(self.blocks, max_seqs, budget)
        self.slots: dict[int, tuple[tuple[int, ...], int]] = {}
        self.version = 0

    def step(self, fails: bool) -> bool:
        before = self.scheduler.num_preemptions
        batch = self.scheduler.schedule()
        if fails:
            return bool(batch)
        self.scheduler.settle()
        for s in batch:
            for row, slot in enumerate(self.blocks.slots(s.seq, s.start, s.stop).tolist(), start=s.start):
                self.slots[slot] = tuple(s.seq.tokens[: row + 1]), self.version
        for s in batch:
            seq = s.seq
            held = [self.slots[slot] for slot in self.blocks.slots(seq, 0, s.stop).tolist()]
            seq.num_computed = s.stop
            seq.row_versions.extend([self.version] * (s.stop - len(seq.row_versions)))
            assert held == [(tuple(seq.tokens[: i + 1]), v) for i, v in enumerate(seq.row_versions)]
            if s.samples:
                seq.extend([random.randrange(3)], [0.0], self.version)
                if seq.finish_reason:
                    self.scheduler.finish(seq, seq.finish_reason)
        return bool(batch) or self.scheduler.num_preemptions > before


@settings(max_examples=300, deadline=None)
@given(
    pages=st.integers(2, 14),
    page_size=st.integers(1, 4),
    max_seqs=st.integers(1, 6),
    budget=st.integers(1, 17),
    seed=st.integers(0, 10**6),
)
def test_every_row_that_is_read_holds_its_own_prefix(
    pages: int, page_size: int, max_seqs: int, budget: int, seed: int
) -> None:
    rng = random.Random(seed)
    random.seed(seed)
    m = Cache(pages, page_size, max_seqs, budget)
    stems = [[rng.randrange(3) for _ in range(16)] for _ in range(2)]
    live: list[Sequence] = []
    todo = rng.randint(2, 14)
    for _ in range(20000):
        live = [seq for seq in live if seq.status is not Status.FINISHED]
        if todo and rng.random() < 0.4:
            total = rng.randint(2, max(2, min(24, pages * page_size)))
            if m.blocks.pages_for(total) <= pages:
                prompt = rng.choice(stems)[: rng.randint(1, min(16, total - 1))]
                new = SamplingParams(max_new_tokens=total - len(prompt))
                live.append(Sequence(Request(f"s{todo}", tuple(prompt), new, probe=rng.random() < 0.2)))
                m.scheduler.add(live[-1])
            todo -= 1
        elif live and rng.random() < 0.03:
            m.scheduler.finish(rng.choice(live), "abort")
        elif rng.random() < 0.05:
            m.version += 1
            m.scheduler.forget_prefixes()
        elif not m.step(fails=rng.random() < 0.05) and not todo:
            break
    assert m.scheduler.unfinished == 0
    assert sorted(m.blocks._free) == list(range(pages))
    assert not any((m.blocks._known, m.blocks._prefix_of, *m.blocks._owners))
