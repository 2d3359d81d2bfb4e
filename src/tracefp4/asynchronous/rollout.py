"""The rollout process: keeps the engine busy, takes new weights between steps, hands out finished groups.

Sequences that run when new weights arrive go on under them; every token and every row is marked with its version.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from safetensors.torch import load_file

from tracefp4.asynchronous.buffer import Group
from tracefp4.asynchronous.channel import Channel
from tracefp4.asynchronous.child import ALIVE_SECONDS, Payload, child
from tracefp4.asynchronous.messages import (
    Aborted,
    Admit,
    Alive,
    Counted,
    Evaluate,
    Evaluated,
    Finished,
    Loaded,
    Skipped,
    Started,
    Stop,
    Weights,
)
from tracefp4.asynchronous.supervisor import RolloutStart
from tracefp4.guidance.disk import make_store
from tracefp4.loop import Parts, preflight
from tracefp4.loop.training import STORE_TOTALS
from tracefp4.signals import Stopped
from tracefp4.tasks import CountingTask, Exchanges, Prompt
from tracefp4.types import Request, Trajectory

IDLE_SECONDS = 0.05


@dataclass
class _Job:
    """Responses to one prompt, or a whole evaluation, on their way. index: of the group; None for an evaluation."""

    index: int | None
    tag: str
    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    done: dict[str, Trajectory] = field(default_factory=dict)


class RolloutWorker:
    """The state of the process; ``run`` returns when the supervisor says so."""

    def __init__(self, parts: Parts, channel: Channel, start: RolloutStart, guidance_url: str) -> None:
        self.parts, self.channel, self.config = parts, channel, parts.config
        self.store = make_store(self.config.guidance.model_copy(update={"url": guidance_url}))
        self.engine = parts.make_engine(self.store)
        self._load(start.weights)
        self._redo, self._next, self._admitted = list(start.redo), start.next_index, start.admitted
        self._prefix = f"{start.incarnation}"
        self._jobs: dict[str, _Job] = {}  # by request id
        self._asked: dict[str, Prompt] = {}
        self._exchanges: Exchanges | None = parts.exchanges(self._asked)
        self._step: tuple[int, list[Prompt | None], dict[str, list[Request]]] | None = None
        self._said = time.monotonic()
        self._rows = 0
        self._worked = False  # since the last message
        self._of_scheduler: dict[str, int] = {}
        self._counted = dict.fromkeys(STORE_TOTALS, 0.0)

    def run(self) -> None:
        """Raises Stopped where the supervisor asks to, Gone where there is none any more."""
        while True:
            self._read_messages()
            self._start_groups()
            busy = self.engine.busy
            if busy:
                for trajectory in self.engine.step(self._exchanges):
                    self._take(trajectory)
                self._note_rows()
            else:
                self.channel.pending(IDLE_SECONDS)
            if time.monotonic() - self._said > ALIVE_SECONDS and (self._worked or not busy):
                self._count()
                self._send(Alive(idle=not self._worked))

    def _note_rows(self) -> None:
        """A step that computed nothing is no sign of life."""
        scheduler = self.engine.scheduler
        rows = sum(s.num_computed for s in (*scheduler.running, *scheduler.waiting))
        self._worked |= rows != self._rows
        self._rows = rows

    # -- messages -----------------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        self.channel.send(message)
        self._said, self._worked = time.monotonic(), False

    def _read_messages(self) -> None:
        newest: Weights | None = None
        while self.channel.pending():
            match self.channel.receive():
                case Weights() as weights:
                    newest = weights
                case Admit(total):
                    self._admitted = total
                case Evaluate(tag):
                    self._start_evaluation(tag)
                case Stop():
                    raise Stopped(15)
        if newest is not None:
            self._load(newest)
            self._send(Loaded(newest.version))
            if self.config.run.on_stale == "drop":
                self._abort_older_than(newest.version - self.config.run.max_lag)

    def _load(self, weights: Weights) -> None:
        self.engine.update_weights(load_file(weights.path).items(), weights.version)

    # -- work ---------------------------------------------------------------------------------------------------

    def _start_groups(self) -> None:
        """Admits groups while the engine has room for a whole one: a queue inside it would only grow stale."""
        room = self.config.rollout.max_num_seqs
        while self.engine.scheduler.unfinished + self.config.sampling.samples_per_prompt <= max(
            room, self.config.sampling.samples_per_prompt
        ):
            if self._redo:
                index = self._redo.pop(0)
            elif self._next < self._admitted:
                index, self._next = self._next, self._next + 1
            else:
                return
            self._start_group(index)

    def _start_group(self, index: int) -> None:
        prompt, requests = self._group(index)
        if prompt is None:
            self._send(Skipped(index))
            return
        self._send(Started(index, self.engine.version))
        self._add(_Job(index, "", [prompt] * len(requests), requests))

    def _group(self, index: int) -> tuple[Prompt | None, list[Request]]:
        """A group's prompt, None where it does not fit, and its requests: as the synchronous step would make them."""
        c, n = self.config, self.config.sampling.samples_per_prompt
        step, place = divmod(index, c.sampling.prompts_per_step)
        if self._step is None or self._step[0] != step:
            prompts = self.parts.task.train_prompts(step, c.sampling.prompts_per_step)
            encoded = [self.parts.encoder.encode(p) for p in prompts]
            kept = [(p, ids) for p, ids in zip(prompts, encoded, strict=True) if ids is not None]
            probing = c.run.probe_every and step % c.run.probe_every == 0
            requests = self.parts.requests(
                [p for p, _ in kept],
                n,
                f"step{step}",
                c.run.probe_trajectories if probing else 0,
                [ids for _, ids in kept],
                heads=True,
            )
            by_prompt = {p.id: requests[i * n : (i + 1) * n] for i, (p, _) in enumerate(kept)}
            fits = [p if ids is not None else None for p, ids in zip(prompts, encoded, strict=True)]
            self._step = (step, fits, by_prompt)
        prompt = self._step[1][place]
        return prompt, [] if prompt is None else self._step[2][prompt.id]

    def _start_evaluation(self, tag: str) -> None:
        prompts, encoded = self.parts.encode(self.parts.task.test_prompts(self.config.run.eval_prompts))
        self._add(_Job(None, tag, prompts, self.parts.requests(prompts, 1, f"eval-{tag}", encoded=encoded)))

    def _add(self, job: _Job) -> None:
        # Another process may have recorded the same requests before it died: the names differ, the samples do not.
        job.requests = [replace(r, request_id=f"{self._prefix}/{r.request_id}") for r in job.requests]
        for request, prompt in zip(job.requests, job.prompts, strict=True):
            self._jobs[request.request_id], self._asked[request.request_id] = job, prompt
            self.engine.add_request(request)

    def _abort_older_than(self, version: int) -> None:
        """Ends the groups with a token that was sampled before ``version``: no step can take them any more."""
        running = {s.request.request_id: s for s in (*self.engine.scheduler.running, *self.engine.scheduler.waiting)}
        groups = {job.index: job for job in self._jobs.values() if job.index is not None}
        for index, job in groups.items():
            sampled = [t.versions[t.sampled_mask].tolist() for t in job.done.values()]
            unfinished = [running[r.request_id] for r in job.requests if r.request_id in running]
            sampled += [[v for v, own in zip(s.versions, s.sampled, strict=True) if own] for s in unfinished]
            if min((v for versions in sampled for v in versions), default=version) < version:
                self._abort(index, job)

    def _abort(self, index: int, job: _Job) -> None:
        for request in job.requests:
            if request.request_id not in job.done:
                job.done[request.request_id] = self.engine.abort(request.request_id)
                del self._jobs[request.request_id]
        self._forget(job)
        self._discard(job.done.values())
        self._send(Aborted(index, sum(t.num_sampled for t in job.done.values())))

    def _discard(self, trajectories: Iterable[Trajectory]) -> None:
        self.store.discard([h for t in trajectories for h in (t.guidance, t.probe) if h is not None])

    def _forget(self, job: _Job) -> None:
        for request in job.requests:
            del self._asked[request.request_id]
            if self._exchanges is not None:
                self._exchanges.turns.pop(request.request_id, None)

    def _take(self, trajectory: Trajectory) -> None:
        job = self._jobs.pop(trajectory.request_id)
        job.done[trajectory.request_id] = trajectory
        if len(job.done) < len(job.requests):
            return
        trajectories = [job.done[r.request_id] for r in job.requests]
        rewards = self.parts.score(job.prompts, trajectories, self._exchanges)
        self._forget(job)
        if job.index is None:
            self._discard(trajectories)
            self._send(Evaluated(job.tag, sum(rewards) / self.config.run.eval_prompts))
            return
        for t, reward in zip(trajectories, rewards, strict=True):
            t.reward = reward
        self._count()
        self._send(Finished(Group(job.index, trajectories, self._stats())))

    def _stats(self) -> dict[str, float]:
        """Figures since the last group: sums over the groups of a step are the step's."""
        scheduler = self.engine.scheduler
        counts = {"rollout/preemptions": scheduler.num_preemptions, "rollout/shared_rows": scheduler.num_shared_rows}
        stats = {name: float(count - self._of_scheduler.get(name, 0)) for name, count in counts.items()}
        self._of_scheduler = counts
        if isinstance(self.parts.task, CountingTask):
            stats |= self.parts.task.metrics()
        return stats

    def _count(self) -> None:
        """Tells what the store has written and dropped: another process may go on counting."""
        figures = self.store.stats()
        more = {name: figures.get(name, 0.0) - before for name, before in self._counted.items()}
        if any(more.values()):
            self._counted = {name: before + more[name] for name, before in self._counted.items()}
            self._send(Counted(more))

    def close(self) -> None:
        self.parts.close()
        self.store.close(timeout=2.0)


def rollout_main(connection: Connection, payload: Payload, start: RolloutStart) -> None:
    """The rollout process."""
    with child(connection, payload) as channel:
        worker = RolloutWorker(preflight(payload.config), channel, start, payload.guidance_url)
        try:
            worker.run()
        finally:
            worker.close()
