"""The RL loop: wires a Rollout and a Trainer, which know nothing of each other.

One step: prompts, rollout, rewards, update, weights to the rollout. Synchronous: the rollout of step k runs under
the weights of step k.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator

from tracefp4.assets import builtin_model_path
from tracefp4.config import StrictModel, config_hash, resolved
from tracefp4.errors import TracefpError
from tracefp4.files import replaced_dir, warn
from tracefp4.guidance.store import MemoryStore
from tracefp4.methods import Method, QuantConfig, get_method
from tracefp4.nn.checkpoint_files import count_weights, read_hf_config, read_tokenizer
from tracefp4.nn.loading import load_policy
from tracefp4.recipe import QuantRecipe
from tracefp4.report import RunLogger, progress, write_json_atomic
from tracefp4.report.logger import CONFIG, FINAL, RUN
from tracefp4.report.provenance import append_resume, checkpoint_fingerprint, provenance
from tracefp4.rollout.engine import RolloutConfig, RolloutEngine
from tracefp4.rollout.model import ModelShape
from tracefp4.saves import BEST_FACTS, CHECKPOINT, STATES, Position, Saves, SaveSizes, check_space, space_missing
from tracefp4.signals import Stopped, hold, release
from tracefp4.tasks import Prompt, Task, TaskConfig, make_task, score_all
from tracefp4.train.checkpoint import check_config, latest_facts, load_latest, save_state
from tracefp4.train.trainer import GRPOTrainer, TrainConfig
from tracefp4.types import GuidanceHandle, Request, RolloutBatch, SamplingParams, Trajectory


class ModelConfig(StrictModel):
    """path: a local Hugging Face checkpoint directory, or "builtin:NAME" of one that ships with the package."""

    path: str = "builtin:sums-moe"


class MethodConfig(StrictModel):
    """name: a mode, see ``tracefp4 methods``."""

    name: str = "trace"


class SamplingConfig(StrictModel):
    """prompts_per_step groups of samples_per_prompt responses each; max_new_tokens and temperature of each."""

    prompts_per_step: int = Field(16, ge=1)
    samples_per_prompt: int = Field(8, ge=2)
    max_new_tokens: int = Field(96, ge=1)
    temperature: float = Field(1.0, gt=0)


class LoopConfig(StrictModel):
    """steps: RL steps. seed: of everything random. eval_prompts: held-out problems, 0 to skip; evaluated before the
    first and after the last step, and every eval_every steps where that is not 0. probe_trajectories: responses per
    probed step whose full codes are kept for the mismatch metrics; probe_every: probe every n-th step, 0 never.
    threads: of torch, 0 leaves its choice. save_every: write the policy to checkpoint/ every n-th step as well as at
    the end, each time in place of the last. state_every: write what a resumed run needs every n-th step, 0 never;
    keep_states: how many of them stay. keep_best: 1 keeps the policy of the best held-out pass rate in
    checkpoint-best/, by the evaluations of eval_every and the last one."""

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
    keep_best: int = Field(0, ge=0, le=1)

    @model_validator(mode="after")
    def _evaluations_are_there(self) -> LoopConfig:
        if self.eval_every and not self.eval_prompts:
            raise ValueError("run.eval_every evaluates nothing while run.eval_prompts is 0: set it, e.g. to 128")
        if self.keep_best and not self.eval_every:
            raise ValueError("run.keep_best compares evaluations: set run.eval_every and run.eval_prompts too")
        return self


class RunConfig(StrictModel):
    """A recipe: one section a component."""

    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    method: MethodConfig = MethodConfig()
    quant: QuantConfig = QuantConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    run: LoopConfig = LoopConfig()

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
    """Directory of a checkpoint. Raises TracefpError where it is none."""
    if path.startswith("builtin:"):
        return builtin_model_path(path.removeprefix("builtin:"))
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise TracefpError(f"model.path {path} is no Hugging Face checkpoint directory (it has no config.json)")
    return directory


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on all parts; equal parts give equal seeds on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass(frozen=True)
class Parts:
    """What a run is made of before its weights are read."""

    path: Path
    method: Method
    rollout: RolloutConfig
    train: TrainConfig
    tokenizer: Any
    task: Task
    hf_config: Any
    recipe: QuantRecipe
    sizes: SaveSizes


def preflight(config: RunConfig) -> Parts:
    """Makes all that is cheap and checks the rest, without reading the weights.

    Raises TracefpError for whatever would stop this run at its start.
    """
    if config.run.threads > (os.cpu_count() or 1):
        raise TracefpError(f"run.threads {config.run.threads} exceeds this machine's {os.cpu_count()} cores")
    rollout, train = config.rollout, config.train
    path = model_path(config.model.path)
    method = get_method(config.method.name)
    if method.dtype is not None:
        rollout = rollout.model_copy(update={"dtype": method.dtype})
        train = train.model_copy(update={"dtype": method.dtype})
    hf_config = read_hf_config(path)
    tokenizer = read_tokenizer(path, hf_config)
    # Another seed is another run: other problems too, not only other samples of the same ones.
    task = make_task(config.task.model_copy(update={"seed": config.task.seed + config.run.seed}))
    # The shape and its limits; on the meta device nothing is allocated.
    ModelShape.from_hf(hf_config)
    recipe = method.recipe(config.quant, hf_config.num_hidden_layers)
    _check_prompts(config, task, tokenizer, RolloutEngine(hf_config, recipe, rollout, device="meta"), path)
    sizes = SaveSizes.of(count_weights(path), getattr(torch, train.dtype).itemsize)
    return Parts(path, method, rollout, train, tokenizer, task, hf_config, recipe, sizes)


def _check_prompts(config: RunConfig, task: Task, tokenizer: Any, engine: RolloutEngine, path: Path) -> None:
    """Whether the task has the problems that the run asks for, and the engine takes the longest of them."""
    prompts = task.train_prompts(0, config.sampling.prompts_per_step)
    if config.run.eval_prompts:
        prompts = prompts + task.test_prompts(config.run.eval_prompts)
    ids = [tuple(tokenizer(p.text, add_special_tokens=False)["input_ids"]) for p in prompts]
    if not ids[0]:
        raise TracefpError(f"the tokenizer in {path} turns a prompt into nothing; does the folder lack its files?")
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    sampling = SamplingParams(max_new_tokens=config.sampling.max_new_tokens)
    engine.add_request(Request(prompts[longest].id, ids[longest], sampling))


class TrainingRun:
    """A run's parts, and its step. ``run_training`` drives one; use it directly for a loop of your own."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        parts = preflight(config)
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        torch.manual_seed(config.run.seed)
        self.method, self.tokenizer, self.task, self.recipe = parts.method, parts.tokenizer, parts.task, parts.recipe
        self.path, self.sizes = parts.path, parts.sizes
        self.store = MemoryStore()
        self.engine = RolloutEngine(parts.hf_config, self.recipe, parts.rollout, self.store)
        self.trainer = GRPOTrainer(
            load_policy(parts.path, parts.train.dtype),
            self.recipe,
            self.method.forward,
            parts.train,
            self.store,
            temperature=config.sampling.temperature,
            pad_id=self.tokenizer.pad_token_id,
            seed=derive_seed(config.run.seed, "minibatches"),
        )
        try:
            self.engine.update_weights(self.trainer.named_weights(), self.trainer.version)
        except TracefpError as error:
            raise TracefpError(f"checkpoint {parts.path} cannot be used: {error}") from error

    def requests(self, prompts: list[Prompt], samples: int, tag: str, probes: int = 0) -> list[Request]:
        """``samples`` requests a prompt, prompt by prompt. probes of them, spread evenly, keep their full codes."""
        s, seed = self.config.sampling, self.config.run.seed
        total = len(prompts) * samples
        stride = total / probes if probes else 0
        probed = {int(i * stride) for i in range(min(probes, total))}
        out: list[Request] = []
        for p in prompts:
            ids = tuple(self.tokenizer(p.text, add_special_tokens=False)["input_ids"])
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
        prompts = self.task.train_prompts(index, c.sampling.prompts_per_step)
        probing = c.run.probe_every and index % c.run.probe_every == 0
        requests = self.requests(prompts, n, f"step{index}", c.run.probe_trajectories if probing else 0)
        clock = [time.perf_counter()]
        preemptions = self.engine.scheduler.num_preemptions
        trajectories = self.engine.generate(requests)
        clock.append(time.perf_counter())
        try:
            asked = [p for p in prompts for _ in range(n)]
            for i, (t, reward) in enumerate(zip(trajectories, self.score(asked, trajectories), strict=True)):
                t.group, t.reward = i // n, reward
            metrics = self._rollout_metrics(trajectories)
            metrics["rollout/preemptions"] = float(self.engine.scheduler.num_preemptions - preemptions)
            hold()  # a policy that is half updated is no state to go on from; run_training releases
            metrics |= self.trainer.update(RolloutBatch(trajectories, self.engine.version))
        finally:
            handles: list[GuidanceHandle] = [h for t in trajectories for h in (t.guidance, t.probe) if h is not None]
            self.store.discard(handles)
        clock.append(time.perf_counter())
        self.engine.update_weights(self.trainer.named_weights(), self.trainer.version)
        clock.append(time.perf_counter())
        tokens = sum(len(t.response_ids) for t in trajectories)
        taught = sum(len(t.response_ids) for t in trajectories if t.advantage)
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
        lengths = [len(t.response_ids) for t in trajectories]
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

    def save(self, directory: Path, facts: dict[str, Any] | None = None) -> None:
        """Writes weights (compute dtype), config and tokenizer as a Hugging Face directory, whole or not at all.

        facts: for a best.json beside them. Raises StorageError where the disk refuses; what was there stays.
        """
        with replaced_dir(directory) as staging:
            self.trainer.model.save_pretrained(staging)
            self.tokenizer.save_pretrained(staging)
            if facts is not None:
                write_json_atomic(staging / BEST_FACTS, facts)

    def evaluate(self, tag: str) -> float | None:
        """Pass rate on held-out problems, one sampled response each, in the mode's own rollout form."""
        n = self.config.run.eval_prompts
        if not n:
            return None
        prompts = self.task.test_prompts(n)
        trajectories = self.engine.generate(self.requests(prompts, 1, f"eval-{tag}"))
        handles = [t.guidance for t in trajectories if t.guidance is not None]
        self.store.discard(handles)
        return sum(self.score(prompts, trajectories)) / n


FREE_ON_RESUME = frozenset(
    f"run.{key}" for key in ("steps", "save_every", "state_every", "keep_states", "keep_best", "tensorboard", "threads")
)
"""Settings that a resumed run may change."""


class DivergedError(TracefpError, FloatingPointError):
    """The numbers of a run broke; the message names the step and the last state."""

    exit_code = 1


def check_start(planned: Sequence[tuple[RunConfig, Path]], resume: bool = False) -> None:
    """What can be known before any of these runs starts: each config's ``preflight``, what a folder to resume holds,
    and the space that all of them need. Raises TracefpError; touches no folder."""
    need = 0
    for config, run_dir in planned:
        sizes = preflight(config).sizes
        if resume:
            check_resumable(config, run_dir)
        need += space_missing(run_dir, sizes, config.run)
    check_space(Path(os.path.commonpath([run_dir.absolute() for _, run_dir in planned])), need)


def check_resumable(config: RunConfig, run_dir: Path) -> None:
    """Raises TracefpError where ``run_dir`` holds a run of other settings, or of more steps than are asked for."""
    facts = latest_facts(run_dir / STATES)
    if facts is None and (run_dir / FINAL).is_file() and (run_dir / CONFIG).is_file():
        facts = {"config": json.loads((run_dir / CONFIG).read_text(encoding="utf-8")), "step": 0}
    if facts is not None:
        check_config(facts["config"], resolved(config), FREE_ON_RESUME)
        done = facts["step"] + bool(facts.get("pending"))
        if done > config.run.steps:
            raise TracefpError(f"{run_dir} has {done} steps already: run.steps {config.run.steps} is too few")


def _save_state(run: TrainingRun, run_dir: Path, at: Position) -> None:
    tensors, counters = run.trainer.state()
    facts = {
        "config": resolved(run.config),
        "recipe_hash": run.recipe.hash,
        "counters": counters,
        "pass_rate_start": at.start,
        "pending": at.unlogged,
    }
    save_state(run_dir / STATES, at.finished, tensors, facts, run.config.run.keep_states)
    at.saved = at.trained


def _resume(run: TrainingRun, run_dir: Path) -> Position:
    """Loads the newest state, if there is one."""
    loaded = load_latest(run_dir / STATES)
    if loaded is None:
        return Position()
    tensors, facts = loaded
    check_resumable(run.config, run_dir)
    run.trainer.load_state(tensors, facts["counters"])
    run.engine.update_weights(run.trainer.named_weights(), run.trainer.version)
    pending = facts.get("pending")
    at = Position(facts["step"], facts["pass_rate_start"], tuple(pending) if pending else None)
    at.saved = at.trained
    return at


def _write_run_json(run: TrainingRun, run_dir: Path, at: Position) -> None:
    """Where the run's numbers come from; a resumed run adds an entry to "resumes" and says what has changed."""
    now = provenance() | {"threads": {"torch": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS")}}
    path = run_dir / RUN
    if at.trained and path.is_file():
        facts = json.loads(path.read_text(encoding="utf-8"))
        if changed := append_resume(facts, now, step=at.trained):
            warn(f"{run_dir} goes on with {changed}: its metrics may not be those of an unbroken run")
    else:
        facts = now | {
            "recipe_hash": run.recipe.hash,
            "recipe": asdict(run.recipe),
            "config_hash": config_hash(run.config),
            "checkpoint": {"path": run.config.model.path, **checkpoint_fingerprint(run.path)},
            "method": run.method.name,
            "seed": run.config.run.seed,
            "resumes": [],
        }
    write_json_atomic(path, facts)


def run_training(
    config: RunConfig,
    run_dir: Path,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Trains one method as configured and writes metrics.jsonl, timing.jsonl, run.json and checkpoint/ to run_dir.

    resume: go on from the newest state in run_dir; the metrics are then those of a run that was never interrupted.
    Returns the run's summary: held-out pass rate before and after, with its n. Raises TracefpError for what the user
    can mend, DivergedError where the numbers broke, and passes signals.Stopped on after a last state is written.
    """
    run = TrainingRun(config)
    at = _resume(run, run_dir) if resume else Position()
    saves = Saves(run_dir, run.sizes)
    _write_run_json(run, run_dir, at)
    try:
        if not at.trained:
            at.start = run.evaluate("start")
        _train(run, run_dir, at, saves, on_step)
        run.save(run_dir / CHECKPOINT)
        end = run.evaluate("end")
    except Stopped as stop:
        if not stop.at_once and config.run.state_every and at.trained > at.saved:
            saves.state(lambda: _save_state(run, run_dir, at))
        raise
    except FloatingPointError as error:
        states = sorted((run_dir / STATES).glob("step-*"))
        last = f"its last state is {states[-1]}" if states else "it has no state yet"
        raise DivergedError(
            f"the run diverged in step {at.finished}: {error}; {last}; lower train.lr and train into another folder"
        ) from error
    summary: dict[str, Any] = {"method": run.method.name, "seed": config.run.seed, "steps": config.run.steps}
    if at.start is not None:
        summary |= {"eval/pass_rate_start": at.start, "eval/pass_rate_end": end, "eval/n": config.run.eval_prompts}
    if config.run.keep_best and end is not None:
        saves.best(config.run.steps, end, config.run.eval_prompts, run.save)
        summary["best"] = saves.best_facts()
    return summary


def _train(
    run: TrainingRun,
    run_dir: Path,
    at: Position,
    saves: Saves,
    on_step: Callable[[int, dict[str, float]], None] | None,
) -> None:
    """The steps that are left; ``at`` says at every moment which are done."""
    c = run.config.run
    with (
        RunLogger(run_dir, tensorboard=c.tensorboard, first_step=at.finished) as logger,
        progress(c.steps - at.finished, f"{run.method.name}, seed {c.seed}") as bar,
    ):
        for index in range(at.finished, c.steps):
            if at.unlogged is None:
                at.pending = (index, *run.step(index))
                release()
            assert at.pending is not None
            _, metrics, timing = at.pending
            if c.eval_every and (index + 1) % c.eval_every == 0 and index + 1 < c.steps:
                rate = run.evaluate(f"step{index}")
                if rate is not None:
                    metrics = {**metrics, "eval/pass_rate": rate}
                    if c.keep_best:
                        saves.best(index + 1, rate, c.eval_prompts, run.save)
            logger.log(index, metrics, {**timing, "failed_saves": float(saves.failed)})
            at.finished = index + 1
            bar.step(reward=metrics["reward/mean"], diff=metrics.get("mismatch/logprob_abs_diff_mean", 0.0))
            if c.save_every and (index + 1) % c.save_every == 0:
                saves.checkpoint(run.save)
            if c.state_every and ((index + 1) % c.state_every == 0 or index + 1 == c.steps):
                saves.state(lambda: _save_state(run, run_dir, at))
            if on_step:
                on_step(index, metrics)
