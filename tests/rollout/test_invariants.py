"""Events that could hand a token the wrong record: each leaves the right rows, or rows that are known to be unusable.

The trainer's side is part of every test: which rows of a trajectory end up guided, and why the others do not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tiny import make_engine, tiny_config, tiny_requests, tiny_weights
from tracefp4.guidance.disk import ShardStore
from tracefp4.guidance.store import TrajectoryGuidance
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.train.slices import MicroBatchBuilder, RowCounts, fetch
from tracefp4.types import Request, SamplingParams, TrainBatch, Trajectory

WIDTHS = {"expert_input": 64, "key": 64, "value": 64}
PROMPT = tuple(range(2, 22))


def record(engine: RolloutEngine, t: Trajectory) -> TrajectoryGuidance:
    assert t.guidance is not None
    return engine.store.get(t.guidance)


def drain(engine: RolloutEngine) -> dict[str, Trajectory]:
    done: list[Trajectory] = []
    while engine.scheduler.unfinished:
        done += engine.step()
    return {t.request_id: t for t in done}


def new_weights(engine: RolloutEngine, version: int) -> None:
    engine.update_weights(tiny_weights(tiny_config(), seed=version).items(), version)


def guided(engine: RolloutEngine, t: Trajectory, version: int, diff: int) -> tuple[list[bool], dict[str, int]]:
    """Which rows a trainer at a version guides, and the reasons of the others."""
    counts = RowCounts()
    builder = MicroBatchBuilder(engine.store, engine.recipe, True, WIDTHS, (0, 1), 2, diff)
    mb = builder.build(TrainBatch.collate([t], 0), version, counts)
    masks = [g.valid.tolist() for g in mb.guidance.values()]
    assert masks, "the engine records"
    assert all(m == masks[0] for m in masks)
    assert masks[0].pop() is False, "the last token has no row"
    return masks[0], {reason: n for reason, n in counts.reasons.items() if n}


def different(a: TrajectoryGuidance, b: TrajectoryGuidance, site: str, start: int, stop: int) -> float:
    """Share of bytes; other orders of summation in FP32 move a stray code, a wrong row moves most of them."""
    return float((a.sites[site].payload[:, start:stop] != b.sites[site].payload[:, start:stop]).float().mean())


# -- the same prefix again ------------------------------------------------------------------------------------------


def test_identical_prompts_have_rows_of_their_own() -> None:
    """Without prefix caching: side by side, one after another, and under other weights."""
    engine = make_engine("trace-all", "float32", page_size=4, prefix_caching=False)
    sampling = SamplingParams(max_new_tokens=6, seed=3)
    for name in "ab":
        engine.add_request(Request(name, PROMPT, sampling))
    engine.step()
    tables = [set(s.block_table) for s in engine._by_id.values()]
    assert all(len(pages) >= len(PROMPT) // 4 for pages in tables)
    assert not tables[0] & tables[1]
    done = drain(engine)
    done |= {t.request_id: t for t in engine.generate([Request("later", PROMPT, sampling)])}
    new_weights(engine, 1)
    done |= {t.request_id: t for t in engine.generate([Request("updated", PROMPT, sampling)])}

    a = record(engine, done["a"])
    for name in ("b", "later"):
        other = record(engine, done[name])
        assert done[name].token_ids == done["a"].token_ids
        assert guided(engine, done[name], 0, 0) == ([True] * other.rows, {})
        for site, rows in other.sites.items():
            assert different(a, other, site, 0, a.rows) < 2e-3
            assert rows.payload.data_ptr() != a.sites[site].payload.data_ptr()
    updated = record(engine, done["updated"])
    assert done["updated"].row_versions.tolist() == updated.versions.tolist() == [1] * updated.rows
    assert all(different(a, updated, site, 0, len(PROMPT)) > 0.2 for site in WIDTHS)
    a.sites["key"].payload[0, 0] ^= 1
    assert guided(engine, done["a"], 0, 0)[1] == {"checksum": a.rows}
    assert guided(engine, done["b"], 0, 0)[1] == {}


# -- weights that change --------------------------------------------------------------------------------------------


def test_weights_that_change_between_chunks_of_a_prompt_split_its_rows() -> None:
    engine = make_engine("trace-all", "float32", max_tokens_per_step=8)
    request = Request("a", PROMPT, SamplingParams(max_new_tokens=6))
    engine.add_request(request)
    engine.step()
    new_weights(engine, 1)
    engine.step()
    new_weights(engine, 2)
    t = drain(engine)["a"]
    versions = [0] * 8 + [1] * 8 + [2] * (t.num_rows - 16)
    assert t.row_versions.tolist() == record(engine, t).versions.tolist() == versions
    assert t.versions.tolist() == [2] * 6
    for diff in (0, 1, 2):
        old = sum(2 - v > diff for v in versions)
        assert guided(engine, t, 2, diff) == ([2 - v <= diff for v in versions], {"stale": old} if old else {})

    whole = make_engine("trace-all", "float32")
    (old_only,) = whole.generate([request])
    for site in WIDTHS:
        a, b = record(engine, t), record(whole, old_only)
        assert different(a, b, site, 0, 8) < 2e-3, "the first chunk ran under the first weights"
        assert different(a, b, site, 8, 16) > 0.2


def test_rows_preempted_and_recomputed_under_new_weights_are_invalid_and_carry_the_new_version() -> None:
    engine = make_engine("trace-all", "float32", page_size=4, num_pages=10)
    for r in tiny_requests(4, min_prompt=8, max_prompt=8):
        engine.add_request(r)
    while not engine.scheduler.num_preemptions:
        engine.step()
    (victim,) = [s for s in engine.scheduler.waiting if s.num_recomputed]
    sampled_before = victim.num_new
    assert sampled_before > 0
    new_weights(engine, 1)
    t = drain(engine)[victim.request.request_id]
    twice = victim.num_recomputed
    assert 8 <= twice < t.num_rows
    assert t.row_versions.tolist() == record(engine, t).versions.tolist() == [1] * t.num_rows
    assert t.versions.tolist() == [0] * sampled_before + [1] * (len(t.response_ids) - sampled_before)
    mask = [False] * twice + [True] * (t.num_rows - twice)
    assert record(engine, t).valid.tolist() == mask
    assert guided(engine, t, 1, 0) == (mask, {"invalid": twice}), "fresh, and of no use all the same"
    assert t.routed_experts is not None
    assert (t.routed_experts[:twice] == -1).all()
    assert (t.routed_experts[twice:] >= 0).all()


def test_a_second_preemption_does_not_shorten_the_mark() -> None:
    """Preempted again while only half of its rows are back, a sequence keeps the longer mark."""
    engine = make_engine("trace-all", "float32")
    engine.add_request(Request("a", PROMPT, SamplingParams(max_new_tokens=8)))
    for _ in range(4):
        engine.step()
    (seq,) = engine.scheduler.running
    engine.scheduler._preempt(seq)
    longest = seq.num_recomputed
    assert longest == len(PROMPT) + 3
    engine.scheduler.max_tokens_per_step = 9
    engine.step()
    assert seq.num_computed == 9
    engine.scheduler.running.append(engine.scheduler.waiting.popleft())
    engine.scheduler._preempt(seq)
    t = drain(engine)["a"]
    mask = [i >= longest for i in range(t.num_rows)]
    assert guided(engine, t, 0, 0) == (mask, {"invalid": longest})


def test_weights_that_change_between_turns_leave_the_old_turns_rows_old() -> None:
    engine = make_engine("trace-all", "float32")
    answer, turns = [10, 11, 12, 13, 14], []

    def environment(request_id: str, turn: tuple[int, ...]) -> Sequence[int] | None:
        turns.append(turn)
        return answer if len(turns) == 1 else None

    sampling = SamplingParams(max_new_tokens=40, stop_token_ids=tuple(range(1, 9)))
    engine.add_request(Request("a", PROMPT, sampling))
    done: list[Trajectory] = []
    while not done:
        done = engine.step(environment)
        if len(turns) == 1 and engine.version == 0:
            new_weights(engine, 1)
    (t,) = done
    first, second = len(turns[0]), len(t.response_ids) - len(turns[0]) - len(answer)
    assert second > 0
    assert t.token_ids[len(PROMPT) + first :][: len(answer)] == tuple(answer)
    assert t.sampled_mask.tolist() == [True] * first + [False] * len(answer) + [True] * second
    assert t.versions.tolist() == [0] * first + [-1] * len(answer) + [1] * second
    # The token that ended the first turn was sampled by the old weights and forwarded by the new ones.
    old = len(PROMPT) + first - 1
    versions = [0] * old + [1] * (t.num_rows - old)
    assert t.row_versions.tolist() == record(engine, t).versions.tolist() == versions
    assert guided(engine, t, 1, 1) == ([True] * t.num_rows, {})
    assert guided(engine, t, 1, 0) == ([v == 1 for v in versions], {"stale": old})
    assert guided(engine, t, 2, 0) == ([False] * t.num_rows, {"stale": t.num_rows})


# -- records that are not the trajectory's --------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
from tiny import make_engine, tiny_requests
from tracefp4.guidance.disk import ShardStore
engine = make_engine(store=ShardStore(sys.argv[1], commit_seconds=600))
for t in engine.generate(tiny_requests(2)):
    print(t.guidance, t.guidance.sample_id in engine.store, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_record_of_a_killed_rollout_is_missing_with_all_of_its_rows(tmp_path: Path) -> None:
    """The handles were handed out; the shard was never written."""
    engine = make_engine()
    trajectories = engine.generate(tiny_requests(2))
    path = os.pathsep.join(p for p in sys.path if p)
    child = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert child.stdout.splitlines() == [f"{t.guidance} True" for t in trajectories]
    reader, counts = ShardStore(str(tmp_path), create=False, wait_seconds=0.05), RowCounts()
    for t in trajectories:
        assert fetch(reader, t.guidance, t, engine.recipe, counts) is None
    assert counts.reasons == {"missing": sum(t.num_rows for t in trajectories)}


def test_a_record_of_other_rows_or_tokens_guides_none_of_them() -> None:
    engine = make_engine()
    (t,) = engine.generate(tiny_requests(1))
    r, rows = record(engine, t), t.num_rows
    assert guided(engine, t, 0, 0) == ([True] * rows, {})

    short = replace(t, guidance=engine.store.put("short", r.select(rows=(0, rows - 1))))
    assert guided(engine, short, 0, 0) == ([False] * rows, {"rows": rows})

    ids = r.token_ids.clone()
    ids[5] = (ids[5] + 1) % 32
    other = replace(t, guidance=engine.store.put("other", replace(r, token_ids=ids)))
    assert guided(engine, other, 0, 0) == ([i != 5 for i in range(rows)], {"token": 1})

    moved = torch.tensor(t.token_ids[1:], dtype=torch.int32)  # every row is its neighbour's
    same = [t.token_ids[i] == t.token_ids[i + 1] for i in range(rows)]
    assert sum(same) < rows / 4
    shifted = replace(t, guidance=engine.store.put("shifted", replace(r, token_ids=moved)))
    assert guided(engine, shifted, 0, 0) == (same, {"token": rows - sum(same)})
