"""The trainer process, and the asynchronous run as a whole."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tracefp4.align.watchdog import Event
from tracefp4.asynchronous.buffer import Group
from tracefp4.asynchronous.channel import Channel
from tracefp4.asynchronous.child import ALIVE_SECONDS, Payload, child
from tracefp4.asynchronous.messages import (
    Alive,
    Done,
    Evaluate,
    Evaluated,
    Groups,
    Published,
    Ready,
    Stop,
    Want,
    Weights,
)
from tracefp4.asynchronous.process import Patience
from tracefp4.asynchronous.rollout import rollout_main
from tracefp4.asynchronous.supervisor import Supervisor
from tracefp4.errors import TracefpError
from tracefp4.files import storage_errors, warn
from tracefp4.guidance.disk import make_store
from tracefp4.loop import RunConfig, preflight
from tracefp4.loop.run import drive
from tracefp4.loop.training import clear_store, prompt_lengths, rollout_metrics, save_policy
from tracefp4.report.events import append_event
from tracefp4.report.logger import EVENTS, METRICS, SAMPLES, TIMING
from tracefp4.saves import STATES
from tracefp4.signals import Stopped, hold
from tracefp4.train.checkpoint import latest_facts
from tracefp4.types import RolloutBatch, Trajectory

WEIGHTS = "weights"
WAIT_FOR_RECORD_SECONDS = 5.0
"""A group can arrive before the shard that holds its records is published, a fraction of a second later."""


class AsyncTrainingRun:
    """The trainer's side of an asynchronous run: what ``tracefp4.loop.run.drive`` drives."""

    def __init__(self, payload: Payload, channel: Channel) -> None:
        self.config = config = payload.config
        self.channel, self.run_dir = channel, payload.run_dir
        self.parts = preflight(config)
        torch.manual_seed(config.run.seed)
        wait = max(WAIT_FOR_RECORD_SECONDS, config.guidance.wait_seconds)
        self.store = make_store(config.guidance.model_copy(update={"url": payload.guidance_url, "wait_seconds": wait}))
        self.trainer = self.parts.make_trainer(self.store)
        self.trajectories: list[Trajectory] = []
        self.totals: dict[str, float] = {}
        self._said = time.monotonic()
        for layer in self.trainer.model.get_decoder().layers:
            layer.register_forward_hook(lambda *_: self._show_progress())

    def _show_progress(self) -> None:
        """Called from within the work, often: an update can be long, and a hung one calls nothing."""
        if time.monotonic() - self._said > ALIVE_SECONDS:
            self._send(Alive())

    def _send(self, message: Any) -> None:
        self.channel.send(message)
        self._said = time.monotonic()

    def begin(self, resumed: bool) -> None:
        """Tells the supervisor where the trainer stands; the rollout starts from there."""
        clear_store(self.store, self.config.guidance.url)  # records of processes that are gone
        self._send(Ready(self._publish(), self.totals))

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """As ``TrainingRun.state``."""
        return self.trainer.state()

    def load_state(self, tensors: dict[str, Tensor], counters: dict[str, int]) -> None:
        """As ``TrainingRun.load_state``."""
        self.trainer.load_state(tensors, counters)

    def _publish(self) -> Weights:
        """Writes the weights under their version, whole or not at all."""
        folder = self.run_dir / WEIGHTS
        path, half = folder / f"v{self.trainer.version}.safetensors", folder / ".half"
        with storage_errors(str(path)):
            folder.mkdir(exist_ok=True)
            save_file({name: w.contiguous() for name, w in self.trainer.named_weights()}, half)
            half.replace(path)
        return Weights(self.trainer.version, str(path))

    def _receive(self, kind: type) -> Any:
        message = self.channel.receive()
        if isinstance(message, Stop):
            raise Stopped(15)
        assert isinstance(message, kind), f"expected {kind.__name__}, got {type(message).__name__}"
        return message

    def step(self, index: int) -> tuple[dict[str, float], dict[str, float]]:
        """One RL step on groups that the rollout made meanwhile; returns (metrics, wall-clock figures)."""
        clock = [time.perf_counter()]
        self._send(Want(self.trainer.version))
        received: Groups = self._receive(Groups)
        clock.append(time.perf_counter())
        self.trajectories = trajectories = _numbered(received.groups)
        metrics = rollout_metrics(trajectories, self.trainer.version)
        metrics |= prompt_lengths([g.trajectories[0].prompt_ids for g in received.groups])
        metrics |= _summed(received.groups) | {"async/ready_groups": float(received.ready)}
        self.totals = received.totals
        metrics |= {name: n for name, n in self.totals.items() if not name.startswith("guidance/")}
        for sentence in received.replaced:
            append_event(self.run_dir, asdict(Event(index, "replaced", "warn", sentence)))
        hold()  # a policy that is half updated is no state to go on from; drive releases
        metrics |= self.trainer.update(RolloutBatch(trajectories, self.trainer.version))
        self._forget(trajectories)
        clock.append(time.perf_counter())
        self._send(Published(self._publish()))
        clock.append(time.perf_counter())
        wait_s, train_s, sync_s = (b - a for a, b in pairwise(clock))
        timing = {
            "wait_seconds": wait_s,
            "train_seconds": train_s,
            "weight_sync_seconds": sync_s,
            "step_seconds": clock[-1] - clock[0],
            "tokens_per_second": sum(t.num_sampled for t in trajectories) / (clock[-1] - clock[0]),
        }
        return metrics, timing | {name: n for name, n in self.totals.items() if name.startswith("guidance/")}

    def _forget(self, trajectories: list[Trajectory]) -> None:
        """Removes what no later step can use: these records, and shards of versions that are too old by now."""
        self.store.discard([h for t in trajectories for h in (t.guidance, t.probe) if h is not None])
        self.store.drop_below(self.trainer.version - self.config.run.max_lag)

    def evaluate(self, tag: str) -> float | None:
        """Pass rate on held-out problems, by the rollout, under the weights it has when it is asked."""
        if not self.config.run.eval_prompts:
            return None
        self._send(Evaluate(tag))
        answer: Evaluated = self._receive(Evaluated)
        return answer.pass_rate

    def save(self, directory: Path, facts: dict[str, Any] | None = None) -> None:
        """As ``TrainingRun.save``."""
        self._send(Alive())
        save_policy(self.trainer, self.parts.tokenizer, directory, facts)

    def close(self) -> None:
        self.parts.close()
        self.store.close(timeout=2.0)


def _numbered(groups: list[Group]) -> list[Trajectory]:
    for i, group in enumerate(groups):
        for t in group.trajectories:
            t.group = i
    return [t for g in groups for t in g.trajectories]


def _summed(groups: list[Group]) -> dict[str, float]:
    names = sorted({name for g in groups for name in g.stats})
    return {name: sum(g.stats.get(name, 0.0) for g in groups) for name in names}


def trainer_main(connection: Connection, payload: Payload, lost: int) -> None:
    """The trainer process; lost: how many of its predecessors died, whose work it takes up."""
    with child(connection, payload) as channel:
        if lost:
            payload = replace(payload, resume=True)
            if latest_facts(payload.run_dir / STATES) is None:  # before the first state: from the start
                # Event files stay: a viewer that shows them is told of the new start, see RunLogger.
                for name in (METRICS, TIMING, EVENTS, SAMPLES):
                    (payload.run_dir / name).unlink(missing_ok=True)
        run = AsyncTrainingRun(payload, channel)
        try:
            channel.send(Done(drive(run, payload.run_dir, None, payload.resume)))
        finally:
            run.close()


def run_asynchronous(config: RunConfig, run_dir: Path, resume: bool = False) -> dict[str, Any]:
    """As ``tracefp4.loop.run_training``, with rollout and trainer as processes that run at the same time.

    Metrics are not those of the synchronous loop, byte for byte, nor of another run of the same seed: which responses
    are ready when depends on the machine. Raises TracefpError where a child fails for good; a signal stops the trainer
    after its update, with a state saved, and is passed on.
    """
    if not config.run.asynchronous:
        raise TracefpError("run.asynchronous is false in this config: use run_training")
    lag, limit = config.run.max_lag, config.train.max_version_diff
    if lag > limit:
        warn(
            f"run.max_lag {lag} exceeds train.max_version_diff {limit}: rows older than {limit} versions are trained "
            "on without guidance and routing replay; raise train.max_version_diff or lower run.max_lag"
        )
    payload = Payload(config, run_dir, resume)
    supervisor = Supervisor(
        rollout_main,
        trainer_main,
        payload,
        config.sampling.prompts_per_step,
        config.run.max_lag,
        config.run.on_stale,
        config.run.max_restarts,
        Patience(config.run.start_seconds, config.run.hang_seconds),
        notify=warn,
    )
    try:
        return supervisor.run()
    finally:
        # What the processes passed each other: the rollout is always ahead, so records are left that no step used.
        shutil.rmtree(run_dir / WEIGHTS, ignore_errors=True)
        if config.guidance.url == "memory":
            shutil.rmtree(payload.guidance_url, ignore_errors=True)
