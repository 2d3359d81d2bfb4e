"""A rollout and a trainer of an asynchronous run without a model: they only keep the protocol. Payload: see FakeRun."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tracefp4.asynchronous.buffer import Group
from tracefp4.asynchronous.channel import Channel
from tracefp4.asynchronous.child import Payload, child
from tracefp4.asynchronous.messages import (
    Aborted,
    Admit,
    Alive,
    Counted,
    Done,
    Evaluate,
    Evaluated,
    Failed,
    Finished,
    Groups,
    Loaded,
    Published,
    Ready,
    Skipped,
    Started,
    Stop,
    Want,
    Weights,
)
from tracefp4.asynchronous.supervisor import RolloutStart, Supervisor
from tracefp4.loop import RunConfig
from tracefp4.types import Trajectory


@dataclass(frozen=True)
class FakeRun:
    """folder: where each process appends what it did. kill_*: (group or step) at which a process kills itself. hang:
    who stops doing anything, once: "rollout", "rollout start", "evaluation", "trainer", "trainer start"; "trainer
    always" as well in every process that follows. stale_groups: the rollout ends them half-done. heir: a rollout that
    kills itself leaves a process behind, which holds its end of the channel."""

    folder: str
    steps: int = 6
    slow_groups: tuple[int, ...] = ()
    step_seconds: float = 0.0
    kill_rollout_at: tuple[int, ...] = ()
    kill_trainer_at: tuple[int, ...] = ()
    fail_trainer: str = ""
    hang: str = ""
    skipped_groups: tuple[int, ...] = ()
    stale_groups: tuple[int, ...] = ()
    state_every: int = 2
    heir: bool = False


def trajectory(index: int, versions: list[int]) -> Trajectory:
    n = len(versions)
    return Trajectory(
        request_id=f"group{index}/0",
        prompt_ids=(5, 6),
        response_ids=tuple(range(n)),
        logprobs=torch.zeros(n),
        versions=torch.tensor(versions, dtype=torch.int32),
        row_versions=torch.tensor([versions[0]] * (n + 1), dtype=torch.int32),
        routed_experts=None,
        finish_reason="stop",
    )


def once(folder: str, name: str) -> bool:
    """Whether this is the first call with the name, over all processes."""
    try:
        os.close(os.open(Path(folder) / f"{name}.once", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def note(run: FakeRun, who: str, **what: object) -> None:
    with open(Path(run.folder) / f"{who}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def hang_here(run: FakeRun, where: str) -> None:
    if run.hang == f"{where} always" or (run.hang == where and once(run.folder, "hang")):
        time.sleep(600)


def rollout(connection: Connection, run: FakeRun, start: RolloutStart) -> None:
    """Each group takes four ticks, slow ones sixteen; a token is sampled in every tick, under the version it holds."""
    channel = Channel(connection)
    version, admitted, nxt = start.weights.version, start.admitted, start.next_index
    queue, running = list(start.redo), {}
    note(run, "rollout", incarnation=start.incarnation, redo=list(start.redo), first=nxt, version=version)
    hang_here(run, "rollout start")
    stop = False
    while not stop:
        try:
            while channel.pending(0.002):
                match channel.receive():
                    case Weights(v, path):
                        assert Path(path).is_file()
                        version = v
                        channel.send(Loaded(v))
                    case Admit(total):
                        admitted = total
                    case Evaluate(tag):
                        channel.send(Alive())
                        hang_here(run, "evaluation")
                        channel.send(Evaluated(tag, 0.5))
                    case Stop():
                        stop = True
            while len(running) < 4 and (queue or nxt < admitted):
                index = queue.pop(0) if queue else nxt
                nxt = max(nxt, index + 1)
                if index in run.skipped_groups:
                    channel.send(Skipped(index))
                    if index in run.kill_rollout_at and once(run.folder, f"rollout-{index}"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    continue
                running[index] = []
                channel.send(Started(index, version))
            for index, versions in list(running.items()):
                versions.append(version)
                if index in run.kill_rollout_at and once(run.folder, f"rollout-{index}"):
                    if run.heir and os.fork() == 0:
                        time.sleep(30)
                        os._exit(0)
                    os.kill(os.getpid(), signal.SIGKILL)
                if index in run.stale_groups and len(versions) == 2:
                    del running[index]
                    channel.send(Counted({"guidance/dropped/full": 1.0}))
                    channel.send(Aborted(index, 10))
                elif len(versions) == (16 if index in run.slow_groups else 4):
                    channel.send(Finished(Group(index, [trajectory(index, running.pop(index))])))
                    hang_here(run, "rollout")
        except ConnectionError:
            return


def trainer(connection: Connection, run: FakeRun, lost: int) -> None:
    channel = Channel(connection)
    folder = Path(run.folder)
    saved = folder / "state.json"
    state = json.loads(saved.read_text()) if saved.exists() else {}
    version, totals = state.get("version", 0), state.get("totals", {})
    hang_here(run, "trainer start")

    def publish() -> Weights:
        path = folder / f"v{version}.safetensors"
        path.write_bytes(b"weights")
        return Weights(version, str(path))

    try:
        channel.send(Ready(publish(), totals))
        if not version:
            channel.send(Evaluate("start"))
            assert isinstance(channel.receive(), Evaluated)
        while version < run.steps:
            channel.send(Want(version))
            got = channel.receive()
            if isinstance(got, Stop):
                note(run, "trainer", stopped=version)
                return
            assert isinstance(got, Groups)
            lags = [version - g.oldest_version for g in got.groups]
            totals = got.totals
            used = [g.index for g in got.groups]
            note(run, "trainer", version=version, groups=used, lags=lags, totals=totals, replaced=got.replaced)
            if version == 1:
                hang_here(run, "trainer")
            channel.send(Alive())
            time.sleep(run.step_seconds)
            if version in run.kill_trainer_at and once(run.folder, f"trainer-{version}"):
                os.kill(os.getpid(), signal.SIGKILL)
            if run.fail_trainer:
                channel.send(Failed(run.fail_trainer, user_error=not run.fail_trainer.startswith("Traceback")))
                return
            version += 1
            if version % run.state_every == 0:
                saved.write_text(json.dumps({"version": version, "totals": totals}))
            channel.send(Published(publish()))
        channel.send(Done({"steps": version}))
    except ConnectionError:
        return


def _busy(connection: Connection, payload: Payload, name: str) -> None:
    with child(connection, payload) as channel:
        if name == "trainer":
            channel.send(Ready(Weights(0, "")))
        note(FakeRun(str(payload.run_dir)), name, pid=os.getpid())
        time.sleep(600)


def busy_trainer(connection: Connection, payload: Payload, lost: int) -> None:
    _busy(connection, payload, "trainer")


def busy_rollout(connection: Connection, payload: Payload, start: RolloutStart) -> None:
    _busy(connection, payload, "rollout")


def supervise_busy_children(folder: str) -> None:
    Supervisor(busy_rollout, busy_trainer, Payload(RunConfig(), Path(folder), False), 2, 2).run()


def supervise_until_ctrl_c(folder: str) -> None:
    try:
        Supervisor(rollout, trainer, FakeRun(folder, steps=10_000), 2, 2).run()
    except KeyboardInterrupt:
        print("stopped")
