"""The RL loop: wires a Rollout and a Trainer, which know nothing of each other.

One step: prompts, rollout, rewards, update, weights to the rollout. Synchronous: the rollout of step k runs under
the weights of step k.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tracefp4.align.watchdog import Event, Watch, WatchConfig
from tracefp4.assets import builtin_model_path
from tracefp4.config import StrictModel, config_hash, resolved
from tracefp4.errors import TracefpError
from tracefp4.guidance.store import MemoryStore
from tracefp4.methods import QuantConfig, get_method
from tracefp4.nn.loading import checkpoint_directory, load_policy, read_config
from tracefp4.report import EventLog, RunLogger, progress, read_jsonl, write_json_atomic
from tracefp4.report.logger import METRICS
from tracefp4.report.provenance import provenance
from tracefp4.rollout.engine import RolloutConfig, RolloutEngine
from tracefp4.tasks import AnyTaskConfig, CountingTask, Prompt, PromptEncoder, Task, make_task, score_all
from tracefp4.tasks.running_sums import RunningSumsConfig
from tracefp4.train.checkpoint import check_config, load_latest, save_state
from tracefp4.train.trainer import GRPOTrainer, TrainConfig
from tracefp4.types import GuidanceHandle, Request, RolloutBatch, SamplingParams, Trajectory

STATES = "states"


class ModelConfig(StrictModel):
    """path: a local Hugging Face checkpoint directory, or "builtin:NAME" of one that ships with the package."""

    path: str = "builtin:sums-moe"


class MethodConfig(StrictModel):
    """name: a mode, see ``tracefp4 methods``."""

    name: str = "trace"


class SamplingConfig(StrictModel):
    """prompts_per_step groups of samples_per_prompt responses each; max_new_tokens and temperature of each.
    max_prompt_tokens: longest prompt, 0 for rollout.max_model_len - max_new_tokens; overlong_prompts: what becomes of
    longer ones; "truncate" keeps the last tokens of plain text. chat_template: use the tokenizer's where it has one
    ("auto"), require it, or take the plain text."""

    prompts_per_step: int = Field(16, ge=1)
    samples_per_prompt: int = Field(8, ge=2)
    max_new_tokens: int = Field(96, ge=1)
    temperature: float = Field(1.0, gt=0)
    max_prompt_tokens: int = Field(0, ge=0)
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    chat_template: Literal["auto", "on", "off"] = "auto"


class LoopConfig(StrictModel):
    """steps: RL steps. seed: of everything random. eval_prompts: held-out problems, 0 to skip; evaluated before the
    first and after the last step, and every eval_every steps where that is not 0. probe_trajectories: responses per
    probed step whose full codes are kept for the mismatch metrics; probe_every: probe every n-th step, 0 never.
    threads: of torch, 0 leaves its choice. save_every: write the policy to checkpoint/ every n-th step as well as at
    the end, each time in place of the last. state_every: write what a resumed run needs every n-th step, 0 never;
    keep_states: how many of them stay."""

    steps: int = Field(60, ge=1)
    seed: int = Field(0, ge=0, lt=2**30)
    eval_prompts: int = Field(0, ge=0)
    eval_every: int = Field(0, ge=0)
    probe_trajectories: int = Field(8, ge=0)
    probe_every: int = Field(1, ge=0)
    threads: int = Field(0, ge=0)
    tensorboard: bool = True
    save_every: int = Field(0, ge=0)
    state_every: int = Field(10, ge=0)
    keep_states: int = Field(2, ge=1)


class RunConfig(StrictModel):
    """A recipe: one section a component."""

    model: ModelConfig = ModelConfig()
    task: AnyTaskConfig = RunningSumsConfig()
    method: MethodConfig = MethodConfig()
    quant: QuantConfig = QuantConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    run: LoopConfig = LoopConfig()
    watch: WatchConfig = WatchConfig()

    @model_validator(mode="after")
    def _known_method(self) -> RunConfig:
        get_method(self.method.name)
        if self.rollout.dtype != self.train.dtype:
            raise ValueError(
                f"rollout.dtype {self.rollout.dtype} and train.dtype {self.train.dtype} differ: the two paths would "
                "quantize different weights"
            )
        return self


def model_path(path: str) -> Path:
    """Directory of a local or built-in checkpoint. Raises TracefpError where it is none."""
    if path.startswith("builtin:"):
        return builtin_model_path(path.removeprefix("builtin:"))
    return checkpoint_directory(path)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on all parts; equal parts give equal seeds on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def make_encoder(tokenizer: Any, config: RunConfig) -> PromptEncoder:
    """The encoder of a run's prompts. Raises TracefpError where they and a response exceed rollout.max_model_len."""
    s, limit = config.sampling, config.rollout.max_model_len
    room = limit - s.max_new_tokens
    if room < max(1, s.max_prompt_tokens):
        what = f"sampling.max_new_tokens {s.max_new_tokens} leaves no room for a prompt in"
        if s.max_prompt_tokens:
            what = (
                f"sampling.max_prompt_tokens {s.max_prompt_tokens} + sampling.max_new_tokens {s.max_new_tokens} exceed"
            )
        raise TracefpError(f"{what} rollout.max_model_len {limit}: raise it, or allow fewer tokens")
    return PromptEncoder(tokenizer, s.max_prompt_tokens or room, s.overlong_prompts, s.chat_template)


def check_supply(task: Task, config: RunConfig) -> None:
    """Raises TracefpError, naming the setting, where a step or an evaluation wants more problems than the task has."""
    wanted = (
        ("sampling.prompts_per_step", config.sampling.prompts_per_step, lambda n: task.train_prompts(0, n)),
        ("run.eval_prompts", config.run.eval_prompts, task.test_prompts),
    )
    for key, n, supply in wanted:
        try:
            got = len(supply(n)) if n else 0
        except TracefpError as error:
            raise TracefpError(f"{key} = {n} cannot be met: {error}") from error
        if got != n:
            raise TracefpError(f"{key} = {n} cannot be met: the task gives {got} problems")


class TrainingRun:
    """A run's parts, and its step. ``run_training`` drives one; use it directly for a loop of your own.

    task: a task of your own, used as it is in place of the one that ``config.task`` names.
    """

    def __init__(self, config: RunConfig, task: Task | None = None) -> None:
        self.config = config
        if config.run.threads > (os.cpu_count() or 1):
            raise TracefpError(f"run.threads {config.run.threads} exceeds this machine's {os.cpu_count()} cores")
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        torch.manual_seed(config.run.seed)
        disable_progress_bar()
        rollout, train = config.rollout, config.train
        path = model_path(config.model.path)
        hf_config = read_config(path)
        self.method = get_method(config.method.name)
        if self.method.dtype is not None:
            rollout = rollout.model_copy(update={"dtype": self.method.dtype})
            train = train.model_copy(update={"dtype": self.method.dtype})
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise TracefpError(f"the tokenizer in {path} cannot be read: {error}") from error
        for name in ("pad_token_id", "eos_token_id"):
            if getattr(self.tokenizer, name) is None:
                raise TracefpError(f"the tokenizer in {path} has no {name}; set one in its tokenizer_config.json")
        # Another seed is another run: other problems too, not only other samples of the same ones.
        seeded = config.task.model_copy(update={"seed": config.task.seed + config.run.seed})
        self.task: Task = make_task(seeded) if task is None else task
        check_supply(self.task, config)
        self.encoder = make_encoder(self.tokenizer, config)
        self.encoder.encode(
            self.task.train_prompts(0, 1)[0]
        )  # a tokenizer that cannot write the task's text shows here
        self.store = MemoryStore()
        if len(self.tokenizer) > hf_config.vocab_size:
            raise TracefpError(
                f"the tokenizer in {path} has {len(self.tokenizer)} tokens, the model only {hf_config.vocab_size}"
            )
        self.recipe = self.method.recipe(config.quant, hf_config.num_hidden_layers)
        self.engine = RolloutEngine(hf_config, self.recipe, rollout, self.store)
        self.trainer = GRPOTrainer(
            load_policy(path, train.dtype),
            self.recipe,
            self.method.forward,
            train,
            self.store,
            temperature=config.sampling.temperature,
            pad_id=self.tokenizer.pad_token_id,
            seed=derive_seed(config.run.seed, "minibatches"),
        )
        self.engine.update_weights(self.trainer.named_weights(), self.trainer.version)

    def encode(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[tuple[int, ...]]]:
        """The prompts that fit and their token ids, in order. Raises TracefpError where none fits."""
        kept = [(p, ids) for p in prompts if (ids := self.encoder.encode(p)) is not None]
        if not kept:
            raise TracefpError(
                f"every prompt exceeds {self.encoder.max_prompt_tokens} tokens: raise rollout.max_model_len, and "
                "sampling.max_prompt_tokens where it is set"
            )
        return [p for p, _ in kept], [ids for _, ids in kept]

    def requests(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        tag: str,
        probes: int = 0,
        encoded: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Request]:
        """``samples`` requests a prompt, prompt by prompt. probes of them, spread evenly, keep their full codes.

        encoded: the prompts' token ids as ``encode`` gave them; left out, every prompt must fit.
        """
        if encoded is None:
            kept, encoded = self.encode(prompts)
            if len(kept) != len(prompts):
                raise TracefpError(
                    f"{len(prompts) - len(kept)} of {len(prompts)} prompts do not fit; encode them first"
                )
        s, seed = self.config.sampling, self.config.run.seed
        total = len(prompts) * samples
        stride = total / probes if probes else 0
        probed = {int(i * stride) for i in range(min(probes, total))}
        out: list[Request] = []
        for p, ids in zip(prompts, encoded, strict=True):
            for j in range(samples):
                sampling = SamplingParams(
                    temperature=s.temperature,
                    max_new_tokens=s.max_new_tokens,
                    stop_token_ids=(self.tokenizer.eos_token_id,),
                    seed=derive_seed(seed, tag, p.id, j),
                )
                out.append(Request(f"{tag}/{p.id}/{j}", ids, sampling, probe=len(out) in probed))
        return out

    def score(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float]:
        """Rewards, one a trajectory, in order.

        A response that was cut off has not said that it is finished, whatever it has written so far: reward 0.
        """
        ended = [i for i, t in enumerate(trajectories) if t.finish_reason == "stop"]
        texts = [
            str(self.tokenizer.decode(list(trajectories[i].response_ids), skip_special_tokens=True)) for i in ended
        ]
        rewards = [0.0] * len(trajectories)
        for i, reward in zip(ended, score_all(self.task, [prompts[i] for i in ended], texts), strict=True):
            rewards[i] = reward
        return rewards

    def step(self, index: int) -> tuple[dict[str, float], dict[str, float]]:
        """One RL step; returns (metrics, wall-clock figures)."""
        c = self.config
        n = c.sampling.samples_per_prompt
        asked_for = self.task.train_prompts(index, c.sampling.prompts_per_step)
        truncated = self.encoder.truncated
        prompts, encoded = self.encode(asked_for)
        truncated = self.encoder.truncated - truncated
        probing = c.run.probe_every and index % c.run.probe_every == 0
        requests = self.requests(prompts, n, f"step{index}", c.run.probe_trajectories if probing else 0, encoded)
        clock = [time.perf_counter()]
        preemptions = self.engine.scheduler.num_preemptions
        trajectories = self.engine.generate(requests)
        clock.append(time.perf_counter())
        try:
            asked = [p for p in prompts for _ in range(n)]
            for i, (t, reward) in enumerate(zip(trajectories, self.score(asked, trajectories), strict=True)):
                t.group, t.reward = i // n, reward
            metrics = self._rollout_metrics(trajectories)
            if isinstance(self.task, CountingTask):
                metrics |= self.task.metrics()
            metrics |= {
                "prompt/dropped": float(len(asked_for) - len(prompts)),
                "prompt/truncated": float(truncated),
                "prompt/length_mean": sum(map(len, encoded)) / len(encoded),
                "prompt/length_max": float(max(map(len, encoded))),
            }
            metrics["rollout/preemptions"] = float(self.engine.scheduler.num_preemptions - preemptions)
            metrics |= self.trainer.update(RolloutBatch(trajectories, self.engine.version))
        finally:
            handles: list[GuidanceHandle] = [h for t in trajectories for h in (t.guidance, t.probe) if h is not None]
            self.store.discard(handles)
        clock.append(time.perf_counter())
        self.engine.update_weights(self.trainer.named_weights(), self.trainer.version)
        clock.append(time.perf_counter())
        tokens = sum(t.num_sampled for t in trajectories)
        taught = sum(t.num_sampled for t in trajectories if t.advantage)
        rollout_s, train_s, sync_s = (b - a for a, b in pairwise(clock))
        timing = {
            "rollout_seconds": rollout_s,
            "train_seconds": train_s,
            "weight_sync_seconds": sync_s,
            "rollout_tokens_per_second": tokens / rollout_s,
            "train_tokens_per_second": taught / train_s,
        }
        return metrics, timing

    def _rollout_metrics(self, trajectories: list[Trajectory]) -> dict[str, float]:
        count = len(trajectories)
        rewards = [t.reward for t in trajectories]
        lengths = [t.num_sampled for t in trajectories]
        rows = sum(t.num_rows for t in trajectories)
        stored = sum(t.guidance.nbytes for t in trajectories if t.guidance is not None)
        return {
            "reward/mean": sum(rewards) / count,
            "response/length_mean": sum(lengths) / count,
            "response/length_max": float(max(lengths)),
            "response/truncated_share": sum(t.finish_reason == "length" for t in trajectories) / count,
            "policy/lag": float(self.trainer.version - self.engine.version),
            "guidance/bytes_per_token": stored / rows,
        }

    def save(self, directory: Path) -> None:
        """Writes weights (compute dtype), config and tokenizer as a Hugging Face directory, whole or not at all."""
        staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            self.trainer.model.save_pretrained(staging)
            self.tokenizer.save_pretrained(staging)
            staging.chmod(0o755)  # mkdtemp makes it private
            old = directory.with_name(f".{directory.name}-old")
            shutil.rmtree(old, ignore_errors=True)
            if directory.exists():
                directory.rename(old)  # a kill between the two renames leaves the old one under this name
            staging.rename(directory)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def evaluate(self, tag: str) -> float | None:
        """Pass rate on held-out problems, one sampled response each, in the mode's own rollout form.

        A problem whose prompt does not fit cannot be answered and counts as failed.
        """
        n = self.config.run.eval_prompts
        if not n:
            return None
        prompts, encoded = self.encode(self.task.test_prompts(n))
        trajectories = self.engine.generate(self.requests(prompts, 1, f"eval-{tag}", encoded=encoded))
        handles = [t.guidance for t in trajectories if t.guidance is not None]
        self.store.discard(handles)
        return sum(self.score(prompts, trajectories)) / n


FREE_ON_RESUME = frozenset(
    [f"run.{key}" for key in ("steps", "save_every", "state_every", "keep_states", "tensorboard", "threads")]
    + [f"watch.{key}" for key in WatchConfig.model_fields]
)
"""Settings that a resumed run may change."""


def _save_state(run: TrainingRun, run_dir: Path, finished: int, start: float | None) -> None:
    tensors, counters = run.trainer.state()
    facts = {
        "config": resolved(run.config),
        "recipe_hash": run.recipe.hash,
        "counters": counters,
        "pass_rate_start": start,
    }
    save_state(run_dir / STATES, finished, tensors, facts, run.config.run.keep_states)


def _resume(run: TrainingRun, run_dir: Path) -> tuple[int, float | None]:
    """Loads the newest state; returns (finished steps, pass rate at the start). (0, None) where there is no state."""
    loaded = load_latest(run_dir / STATES)
    if loaded is None:
        return 0, None
    tensors, facts = loaded
    check_config(facts["config"], resolved(run.config), FREE_ON_RESUME)
    run.trainer.load_state(tensors, facts["counters"])
    run.engine.update_weights(run.trainer.named_weights(), run.trainer.version)
    return facts["step"], facts["pass_rate_start"]


def _watch(config: RunConfig, run_dir: Path, first: int, say: Callable[[str], None]) -> Watch:
    """The run's watchdogs, in the state they were in after the steps that metrics.jsonl holds."""
    log = EventLog(run_dir, first)

    def report(event: Event) -> None:
        log.write(asdict(event))
        say(f"{'stop' if event.level == 'stop' else 'warning'}: {event.name}: {event.message}")

    watch = Watch(config.watch, resolved(config), report)
    watch.replay(read_jsonl(run_dir / METRICS))
    return watch


def run_training(
    config: RunConfig,
    run_dir: Path,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Trains one method as configured and writes metrics.jsonl, timing.jsonl, run.json and checkpoint/ to run_dir.

    resume: go on from the newest state in run_dir; the metrics are then those of a run that was never interrupted.
    Returns the run's summary: held-out pass rate before and after, with its n; where a watchdog ended the run,
    "stopped_by" says which and why, "steps" are those done, and there is no pass rate after. Raises TracefpError for
    what the user can mend, FloatingPointError where the numbers broke.
    """
    run = TrainingRun(config)
    first, start = _resume(run, run_dir) if resume else (0, None)
    write_json_atomic(
        run_dir / "run.json",
        provenance()
        | {
            "recipe_hash": run.recipe.hash,
            "config_hash": config_hash(config),
            "method": run.method.name,
            "seed": config.run.seed,
            "threads": torch.get_num_threads(),
            "task": getattr(run.task, "description", config.task.name),
        },
    )
    summary: dict[str, Any] = {"method": run.method.name, "seed": config.run.seed, "steps": config.run.steps}
    if not first:
        start = run.evaluate("start")
    with (
        RunLogger(run_dir, tensorboard=config.run.tensorboard, first_step=first) as logger,
        progress(config.run.steps - first, f"{run.method.name}, seed {config.run.seed}") as bar,
    ):
        watch = _watch(config, run_dir, first, bar.say)
        for index in range(first, config.run.steps):
            metrics, timing = run.step(index)
            every = config.run.eval_every
            if every and (index + 1) % every == 0 and index + 1 < config.run.steps:
                rate = run.evaluate(f"step{index}")
                if rate is not None:
                    metrics["eval/pass_rate"] = rate
            logger.log(index, metrics, timing)
            bar.step(reward=metrics["reward/mean"], diff=metrics.get("mismatch/logprob_abs_diff_mean", 0.0))
            stop = watch.check(index, metrics)
            if config.run.save_every and (index + 1) % config.run.save_every == 0:
                run.save(run_dir / "checkpoint")
            last = stop or index + 1 == config.run.steps
            if config.run.state_every and ((index + 1) % config.run.state_every == 0 or last):
                _save_state(run, run_dir, index + 1, start)
            if on_step:
                on_step(index, metrics)
            if stop:
                break
    run.save(run_dir / "checkpoint")
    end = run.evaluate("end") if watch.stopped is None else None
    if start is not None:
        summary |= {
            "eval/pass_rate_start": start,
            "eval/pass_rate_end": end,
            "eval/n": config.run.eval_prompts,
        }
    return summary | watch.summary()
