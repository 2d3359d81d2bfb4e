"""The rollout's side of an asynchronous run in this process: what it tells of itself, and what it gives up."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tracefp4.asynchronous import rollout, training
from tracefp4.asynchronous.child import Payload
from tracefp4.asynchronous.messages import Aborted, Alive, Counted, Evaluate, Loaded, Ready, Started, Weights
from tracefp4.asynchronous.rollout import RolloutWorker
from tracefp4.asynchronous.supervisor import RolloutStart
from tracefp4.guidance.disk import ShardStore
from tracefp4.guidance.store import MemoryStore
from tracefp4.loop import RunConfig, preflight
from tracefp4.loop.parts import Parts


class Mailbox:
    """A channel whose other end is the test."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.inbox: deque[Any] = deque()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> Any:
        return self.inbox.popleft()

    def pending(self, timeout: float = 0.0) -> bool:
        return bool(self.inbox)

    def told(self, kind: type) -> list[Any]:
        return [m for m in self.sent if isinstance(m, kind)]


class Turns:
    """In place of ``_read_messages``: ends ``run`` after so many turns."""

    class Over(Exception):
        pass

    def __init__(self, worker: RolloutWorker, turns: int) -> None:
        self.left, self.read = turns, worker._read_messages

    def __call__(self) -> None:
        if not self.left:
            raise self.Over
        self.left -= 1
        self.read()


def config(**run: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "method": {"name": "trace-all"},
            "sampling": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 40},
            "rollout": {"max_num_seqs": 8, "max_model_len": 96},
            "run": {"asynchronous": True, "tensorboard": False, "eval_prompts": 2, **run},
        }
    )


def publish(parts: Parts, folder: Path, version: int) -> Weights:
    path = folder / f"v{version}.safetensors"
    trainer = parts.make_trainer(MemoryStore())
    save_file({name: w.contiguous() for name, w in trainer.named_weights()}, path)
    return Weights(version, str(path))


def make(folder: Path, admitted: int = 2, **run: Any) -> tuple[RolloutWorker, Mailbox]:
    parts, box = preflight(config(**run)), Mailbox()
    start = RolloutStart(publish(parts, folder, 0), 0, (), admitted, 1)
    return RolloutWorker(parts, box, start, str(folder / "guidance")), box  # type: ignore[arg-type]


def turn(worker: RolloutWorker, turns: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_read_messages", Turns(worker, turns))
        with pytest.raises(Turns.Over):
            worker.run()


def test_groups_that_no_step_can_take_any_more_are_aborted(tmp_path: Path) -> None:
    worker, box = make(tmp_path, on_stale="drop", max_lag=1)
    turn(worker, 4)  # a prefill and three tokens of each
    assert [m.index for m in box.told(Started)] == [0, 1]
    box.inbox.append(publish(worker.parts, tmp_path, 1))
    turn(worker, 1)
    assert box.told(Aborted) == []  # they lag by one, as they may
    sampled = sum(s.num_new for s in worker.engine.scheduler.running)
    assert sampled >= 8
    box.inbox.append(publish(worker.parts, tmp_path, 2))
    box.inbox.append(Evaluate("late"))
    worker._read_messages()
    aborted = box.told(Aborted)
    assert [m.index for m in aborted] == [0, 1]
    assert sum(m.tokens for m in aborted) == sampled
    left = {s.request.request_id for s in (*worker.engine.scheduler.running, *worker.engine.scheduler.waiting)}
    assert left == set(worker._jobs) == set(worker._asked)
    assert len(left) == 2
    assert all("eval-late" in name for name in left)
    assert isinstance(worker.store, ShardStore)
    worker.store.flush()
    assert not list((tmp_path / "guidance").glob("*.safetensors"))  # their records are gone too
    worker.close()


def test_a_group_of_the_newest_weights_stays(tmp_path: Path) -> None:
    """Started under old weights, but all of its tokens sampled under new ones."""
    worker, box = make(tmp_path, on_stale="drop", max_lag=0)
    worker._start_groups()
    box.inbox.append(publish(worker.parts, tmp_path, 1))
    turn(worker, 2)
    assert box.told(Loaded) == [Loaded(1)]
    assert box.told(Aborted) == []
    worker.close()


def test_where_a_step_waits_nothing_is_aborted(tmp_path: Path) -> None:
    worker, box = make(tmp_path, on_stale="wait", max_lag=0)
    turn(worker, 3)
    box.inbox.append(publish(worker.parts, tmp_path, 5))
    worker._read_messages()
    assert box.told(Aborted) == []
    assert worker.engine.scheduler.unfinished == 4
    worker.close()


def test_only_computed_rows_are_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, box = make(tmp_path)
    monkeypatch.setattr(rollout, "ALIVE_SECONDS", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.engine, "step", lambda on_turn=None: [])
        turn(worker, 3)
    assert box.told(Alive) == []
    turn(worker, 3)
    assert box.told(Alive) == [Alive(idle=False)] * 3
    worker.close()


def test_a_rollout_without_work_says_that_it_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, box = make(tmp_path, admitted=0)
    monkeypatch.setattr(rollout, "ALIVE_SECONDS", 0.0)
    turn(worker, 2)
    assert box.sent == [Alive(idle=True)] * 2
    worker.close()


def test_lost_guidance_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, box = make(tmp_path)
    figures = {"guidance/dropped/full": 3.0, "guidance/written_bytes": 100.0, "guidance/queue_bytes": 7.0}
    monkeypatch.setattr(worker.store, "stats", lambda: figures)
    worker._count()
    worker._count()
    figures = {"guidance/dropped/full": 4.0, "guidance/written_bytes": 100.0}
    worker._count()
    told = [{name: n for name, n in m.figures.items() if n} for m in box.told(Counted)]
    assert told == [{"guidance/dropped/full": 3.0, "guidance/written_bytes": 100.0}, {"guidance/dropped/full": 1.0}]
    worker.close()


def test_each_layer_of_an_update_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Mailbox()
    run = training.AsyncTrainingRun(Payload(config(), tmp_path, False), box)  # type: ignore[arg-type]
    run.begin(resumed=False)
    ids = torch.ones(1, 4, dtype=torch.int64)
    run.trainer.model.get_decoder()(input_ids=ids, use_cache=False)
    assert [type(m) for m in box.sent] == [Ready]  # it has just said something
    monkeypatch.setattr(training, "ALIVE_SECONDS", 0.0)
    run.trainer.model.get_decoder()(input_ids=ids, use_cache=False)
    assert box.sent[1:] == [Alive()] * len(run.trainer.model.get_decoder().layers)
    run.close()
