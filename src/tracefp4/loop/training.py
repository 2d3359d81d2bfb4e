"""One RL step: prompts, rollout, rewards, update, weights to the rollout. Synchronous: the rollout of step k runs under
the weights of step k, or of step k - run.lag."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import TracefpError
from tracefp4.files import replaced_dir, warn
from tracefp4.guidance.disk import make_store
from tracefp4.guidance.store import GuidanceStore, MemoryStore
from tracefp4.loop.config import RunConfig
from tracefp4.loop.lag import PastWeights
from tracefp4.loop.parts import Parts, preflight
from tracefp4.loop.posttraining import quantize_calibrated
from tracefp4.report import write_json_atomic
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.saves import BEST_FACTS
from tracefp4.signals import hold
from tracefp4.tasks import CountingTask, Prompt, Task
from tracefp4.train.trainer import GRPOTrainer
from tracefp4.types import GuidanceHandle, Request, RolloutBatch, Trajectory

STORE_TOTALS = (
    "guidance/written_bytes",
    "guidance/written_records",
    "guidance/dropped/full",
    "guidance/dropped/error",
)
"""Figures of a store on disk that count from its process's start."""


class TrainingRun:
    """A run's parts, and its step. ``run_training`` drives one; use it directly for a loop of your own.

    task: a task of your own, used as it is in place of the one that ``config.task`` names. Raises TracefpError for
    whatever the user can mend.
    """

    def __init__(self, config: RunConfig, task: Task | None = None) -> None:
        self.config = config
        self.parts = parts = preflight(config, task)
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        torch.manual_seed(config.run.seed)
        self.method, self.tokenizer, self.task, self.recipe = parts.method, parts.tokenizer, parts.task, parts.recipe
        self.store = make_store(config.guidance.model_copy(update={"url": guidance_url(config)}))
        self.trajectories: Sequence[Trajectory] = ()
        self.engine = parts.make_engine(self.store)
        self.trainer = parts.make_trainer(self.store)
        self.past = PastWeights(config.run.lag)
        self.totals: dict[str, float] = {}
        self._totals_before: dict[str, float] = {}
        try:
            self.publish()
        except TracefpError as error:
            raise TracefpError(f"checkpoint {parts.path} cannot be used: {error}") from error

    def publish(self) -> None:
        """Gives the rollout the weights that its next step runs under: the trainer's, or those of run.lag steps ago."""
        if not self.past.lag:
            self.engine.update_weights(self.trainer.named_weights(), self.trainer.version)
            return
        self.past.add(self.trainer.version, self.trainer.named_weights())
        version, weights = self.past.oldest()
        if version > self.engine.version:
            self.engine.update_weights(weights.items(), version)

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """(tensors, counters) that the next step depends on."""
        tensors, counters = self.trainer.state()
        return tensors | self.past.tensors(self.trainer.version), counters

    def load_state(self, tensors: dict[str, Tensor], counters: dict[str, int]) -> None:
        """Inverse of ``state``. Raises KeyError for a tensor or counter that is missing."""
        self.trainer.load_state(tensors, counters)
        self.past.load(tensors)

    def begin(self, resumed: bool) -> None:
        """Called once, before the first step or evaluation; resumed: the trainer's state has just been loaded."""
        self._totals_before = dict(self.totals)
        if resumed:
            self.publish()
        clear_store(self.store, self.config.guidance.url)  # records of an earlier process, which this run makes again

    def step(self, index: int) -> tuple[dict[str, float], dict[str, float]]:
        """One RL step; returns (metrics, wall-clock figures)."""
        c, n = self.config, self.config.sampling.samples_per_prompt
        asked_for = self.task.train_prompts(index, c.sampling.prompts_per_step)
        truncated = self.parts.encoder.truncated
        prompts, encoded = self.parts.encode(asked_for)
        truncated = self.parts.encoder.truncated - truncated
        probing = c.run.probe_every and index % c.run.probe_every == 0
        probes = c.run.probe_trajectories if probing else 0
        requests = self.parts.requests(prompts, n, f"step{index}", probes, encoded, heads=True)
        clock = [time.perf_counter()]
        scheduler = self.engine.scheduler
        preemptions, shared = scheduler.num_preemptions, scheduler.num_shared_rows
        each = [p for p in prompts for _ in range(n)]
        trajectories, rewards = self._respond(each, requests)
        self.trajectories = trajectories
        clock.append(time.perf_counter())
        try:
            for i, (t, reward) in enumerate(zip(trajectories, rewards, strict=True)):
                t.group, t.reward = i // n, reward
            metrics = rollout_metrics(trajectories, self.trainer.version)
            if isinstance(self.task, CountingTask):
                metrics |= self.task.metrics()
            metrics |= prompt_metrics(encoded, dropped=len(asked_for) - len(prompts), truncated=truncated)
            metrics["rollout/preemptions"] = float(scheduler.num_preemptions - preemptions)
            metrics["rollout/shared_rows"] = float(scheduler.num_shared_rows - shared)
            if self.engine.model.compensation is not None:
                metrics |= self.engine.model.compensation.metrics()
            hold()  # a policy that is half updated is no state to go on from; run_training releases
            metrics |= self.trainer.update(RolloutBatch(trajectories, self.engine.version))
        finally:
            self._discard(trajectories)
        clock.append(time.perf_counter())
        self.publish()
        clock.append(time.perf_counter())
        rollout_s, train_s, sync_s = (b - a for a, b in pairwise(clock))
        timing = {
            "rollout_seconds": rollout_s,
            "train_seconds": train_s,
            "weight_sync_seconds": sync_s,
            "rollout_tokens_per_second": sum(t.num_sampled for t in trajectories) / rollout_s,
            "train_tokens_per_second": sum(t.num_sampled for t in trajectories if t.advantage) / train_s,
        }
        figures = self.store.stats()
        self.totals = {name: figures[name] + self._totals_before.get(name, 0.0) for name in STORE_TOTALS if figures}
        return metrics, timing | figures | self.totals

    def _respond(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], engine: RolloutEngine | None = None
    ) -> tuple[list[Trajectory], list[float]]:
        """Responses and their rewards. prompts: one a request. Leaves no record behind where it raises."""
        exchanges = self.parts.exchanges({r.request_id: p for r, p in zip(requests, prompts, strict=True)})
        trajectories = (engine or self.engine).generate(requests, on_turn=exchanges)
        try:
            return trajectories, self.parts.score(prompts, trajectories, exchanges)
        except BaseException:
            self._discard(trajectories)
            raise

    def _discard(self, trajectories: Sequence[Trajectory]) -> None:
        handles: list[GuidanceHandle] = [h for t in trajectories for h in (t.guidance, t.probe) if h is not None]
        self.store.discard(handles)

    def evaluate(self, tag: str) -> float | None:
        """Pass rate on held-out problems, one sampled response each, by the trainer's weights in the mode's own rollout
        form, or in the form that it is quantized to after training.

        A problem whose prompt does not fit cannot be answered and counts as failed.
        """
        n = self.config.run.eval_prompts
        if not n:
            return None
        prompts, encoded = self.parts.encode(self.task.test_prompts(n))
        requests = self.parts.requests(prompts, 1, f"eval-{tag}", encoded=encoded)
        engine = self._evaluator()
        trajectories, rewards = self._respond(prompts, requests, engine)
        self._discard(trajectories)
        if engine.model.compensation is not None:
            engine.model.compensation.metrics()  # of this evaluation: the next step's are its own
        return sum(rewards) / n

    def _evaluator(self) -> RolloutEngine:
        """The rollout's engine where it holds the trainer's weights in the form to evaluate; else another one."""
        if self.method.deployed is None and not self.past.lag:
            return self.engine
        engine = self.parts.make_engine(MemoryStore(), self.parts.evaluated_recipe)
        engine.update_weights(self.trainer.named_weights(), self.trainer.version)
        if self.method.calibrated:
            quantize_calibrated(engine, self.parts, self.trainer.model)
        return engine

    def save(self, directory: Path, facts: dict[str, Any] | None = None) -> None:
        """Writes weights (compute dtype), config and tokenizer as a Hugging Face directory, whole or not at all.

        facts: for a best.json beside them. Raises StorageError where the disk refuses; what was there stays.
        """
        save_policy(self.trainer, self.tokenizer, directory, facts)

    def close(self) -> None:
        """Ends what the task and the store keep running."""
        self.parts.close()
        self.store.close()


def save_policy(trainer: GRPOTrainer, tokenizer: Any, directory: Path, facts: dict[str, Any] | None) -> None:
    """See ``TrainingRun.save``."""
    with replaced_dir(directory) as staging:
        trainer.model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        if facts is not None:
            write_json_atomic(staging / BEST_FACTS, facts)


def rollout_metrics(trajectories: Sequence[Trajectory], trainer_version: int) -> dict[str, float]:
    """Rewards, lengths and guidance bytes of a step's responses, and how many versions they lag behind the trainer."""
    count = len(trajectories)
    rewards = [t.reward for t in trajectories]
    lengths = [t.num_sampled for t in trajectories]
    sampled = (t.versions if t.sampled is None else t.versions[t.sampled] for t in trajectories)
    lags = [trainer_version - int(versions.min()) for versions in sampled]
    rows = sum(t.num_rows for t in trajectories)
    stored = sum(t.guidance.nbytes for t in trajectories if t.guidance is not None)
    return {
        "reward/mean": sum(rewards) / count,
        "response/length_mean": sum(lengths) / count,
        "response/length_max": float(max(lengths)),
        "response/truncated_share": sum(t.finish_reason == "length" for t in trajectories) / count,
        "policy/lag": sum(lags) / count,
        "policy/lag_max": float(max(lags)),
        "guidance/bytes_per_token": stored / rows,
    }


def response_samples(parts: Parts, trajectories: Sequence[Trajectory], count: int, step: int) -> list[dict[str, Any]]:
    """Lines for samples.jsonl: ``count`` responses of a step, spread evenly, with what they earned.

    Text is what the tokenizer makes of the ids, special tokens shown. A reward or an advantage that is not a finite
    number is null.
    """
    total = len(trajectories)
    chosen = sorted({int(i * total / count) for i in range(min(count, total))})
    lines = []
    for t in (trajectories[i] for i in chosen):
        reward, advantage = (x if math.isfinite(x) else None for x in (t.reward, t.advantage))
        lines.append(
            {
                "step": step,
                "request_id": t.request_id,
                "prompt": parts.tokenizer.decode(list(t.prompt_ids)),
                "response": parts.tokenizer.decode(list(t.response_ids)),
                "reward": reward,
                "advantage": advantage,
                "tokens": t.num_sampled,
                "finish_reason": t.finish_reason,
                "version": int(t.versions.max()) if len(t.versions) else None,
            }
        )
    return lines


def guidance_url(config: RunConfig) -> str:
    """Where this run's records live: below ``guidance.url``, so that the runs of a comparison can share a place."""
    url = config.guidance.url
    return url if url == "memory" else f"{url.rstrip('/')}/{config.method.name}-seed{config.run.seed}"


def clear_store(store: GuidanceStore, url: str) -> None:
    """Removes what is in a store. A disk that refuses costs space, and is warned about."""
    try:
        store.clear()
    except OSError as error:
        warn(f"guidance of an earlier process stays in {url}: {error}")


def prompt_metrics(encoded: Sequence[tuple[int, ...]], dropped: int, truncated: int) -> dict[str, float]:
    """Lengths of a step's prompts, and how many did not fit."""
    return {"prompt/dropped": float(dropped), "prompt/truncated": float(truncated)} | prompt_lengths(encoded)


def prompt_lengths(encoded: Sequence[tuple[int, ...]]) -> dict[str, float]:
    lengths = [len(ids) for ids in encoded]
    return {
        "prompt/length_mean": sum(lengths) / len(lengths),
        "prompt/length_max": float(max(lengths)),
    }
