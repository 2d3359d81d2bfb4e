"""A run from its first step to final.json: its folder, states, resume, evaluations, watchdogs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tracefp4.align.watchdog import Event, Watch, WatchConfig
from tracefp4.config import config_hash, resolved
from tracefp4.errors import TracefpError
from tracefp4.files import StorageError, same_disk, warn
from tracefp4.guidance.disk import GuidanceStoreConfig
from tracefp4.loop.config import RunConfig
from tracefp4.loop.parts import Parts, preflight
from tracefp4.loop.training import TrainingRun, response_samples
from tracefp4.methods import get_method
from tracefp4.report import RunLogger, StepLog, progress, read_jsonl, write_json_atomic
from tracefp4.report.events import lines_before
from tracefp4.report.logger import (
    CONFIG,
    EVENTS,
    FINAL,
    METRICS,
    RUN,
    SAMPLES,
    TIMING,
    RunFolderError,
    check_own,
    steps_before,
)
from tracefp4.report.notify import Notifier, for_run
from tracefp4.report.provenance import append_resume, checkpoint_fingerprint, provenance
from tracefp4.saves import CHECKPOINT, STATES, Position, Saves, check_guidance_space, check_space, space_missing
from tracefp4.signals import Stopped, release
from tracefp4.tasks import Task
from tracefp4.train.checkpoint import check_config, latest_facts, load_latest, save_state
from tracefp4.train.trainer import GRPOTrainer
from tracefp4.types import Trajectory

_FREE_RUN_KEYS = (
    "steps",
    "save_every",
    "state_every",
    "keep_states",
    "keep_best",
    "sample_every",
    "sample_responses",
    "tensorboard",
    "threads",
    "hang_seconds",
    "start_seconds",
    "max_restarts",
)
FREE_ON_RESUME = frozenset(
    [f"run.{key}" for key in _FREE_RUN_KEYS]
    + ["train.keep_quantized_weights"]
    + [f"watch.{key}" for key in WatchConfig.model_fields]
    + [f"guidance.{key}" for key in GuidanceStoreConfig.model_fields]
)
"""Settings that a resumed run may change."""

STATE_FACTS = ("config", "counters", "pass_rate_start", "recipe_hash")
"""What the state.json of a run holds besides."""


class DivergedError(TracefpError, FloatingPointError):
    """The numbers of a run broke; the message names the step and the last state."""

    exit_code = 1


def check_start(planned: Sequence[tuple[RunConfig, Path]], resume: bool = False) -> None:
    """What can be known before any of these runs starts: each config's ``preflight``, what a folder to resume holds,
    and the space that all of them need. Raises TracefpError; touches no folder."""
    top = Path(os.path.commonpath([run_dir.absolute() for _, run_dir in planned]))
    need = 0
    weights, guidance, elsewhere = Counter[str](), Counter[str](), Counter[Path]()
    for config, run_dir in planned:
        parts = preflight(config)
        parts.close()
        if resume:
            check_own(run_dir)
            check_resumable(config, run_dir)
        need += space_missing(run_dir, parts.sizes, config.run)
        # What is on its way goes with the run. Runs of several methods may run together, those of several seeds do not.
        weights |= Counter({config.method.name: parts.sizes.published(config.run)})
        place = local_folder(config.guidance.url, top)
        if place is not None and same_disk(place, top):
            guidance |= Counter({config.method.name: parts.guidance_bytes()})
        elif place is not None:
            elsewhere |= Counter({place / config.method.name: parts.guidance_bytes()})
    check_space(top, need, weights.total(), guidance.total())
    for place in {path.parent for path in elsewhere}:
        check_guidance_space(place, sum(n for path, n in elsewhere.items() if path.parent == place))


def local_folder(url: str, run_dir: Path) -> Path | None:
    """The folder of a guidance.url, that of the run for "memory"; None where it is on no disk of this machine."""
    if url == "memory":
        return run_dir
    return None if "://" in url and not url.startswith("file://") else Path(url.removeprefix("file://"))


def check_resumable(config: RunConfig, run_dir: Path) -> None:
    """Raises TracefpError where ``run_dir`` holds a run of other settings, of more steps than are asked for, or one
    that cannot go on: complete without a state, or with states of which none is whole."""
    facts = latest_facts(run_dir / STATES, STATE_FACTS)
    if facts is None and any(run_dir.glob(f"{STATES}/step-*")):
        raise _no_whole_state(run_dir)
    if facts is None and (run_dir / FINAL).is_file() and (run_dir / CONFIG).is_file():
        config_now, final = _read_object(run_dir / CONFIG), _read_object(run_dir / FINAL)
        if final.get("steps") != config.run.steps:
            raise TracefpError(
                f"{run_dir} is complete after {final.get('steps')} steps and has no state to go on from: train into "
                "another folder, or pass --overwrite to start anew"
            )
        facts = {"config": config_now, "step": 0}
    if facts is not None:
        defaults = resolved(RunConfig())
        defaults.pop("task")  # of one task only
        before, now = (_band_in_force(one, config) for one in (facts["config"], resolved(config)))
        check_config(before, now, FREE_ON_RESUME, defaults)
        done = facts["step"] + bool(facts.get("pending"))
        if done > config.run.steps:
            raise TracefpError(f"{run_dir} has {done} steps already: run.steps {config.run.steps} is too few")


def _band_in_force(settings: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """Settings with the ``method.band`` that they come to: the mode's own, or what was the rule before there were any
    ("none"). Where every record is of the newest weights no band has an effect, and it is left out."""
    method = dict(settings.get("method", {}))
    given, own = method.pop("band", "none"), get_method(config.method.name).guidance
    if own is not None and (config.run.lag or config.run.asynchronous):
        method["band"] = given if given is not None else own.band or "none"
    return settings | {"method": method}


def _no_whole_state(run_dir: Path) -> TracefpError:
    return TracefpError(
        f"none of the states in {run_dir / STATES} is whole, so the run cannot go on: train into another folder, or "
        "pass --overwrite to start anew"
    )


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON file of a run to resume. Raises TracefpError where it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TracefpError(f"{path} cannot be read ({error}): mend it, or train into another folder") from None
    if not isinstance(content, dict) or not isinstance(content.get("resumes", []), list):
        raise TracefpError(f"{path} is not what a run writes: mend it, or train into another folder")
    return content


def run_training(
    config: RunConfig,
    run_dir: Path,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
    resume: bool = False,
    task: Task | None = None,
) -> dict[str, Any]:
    """Trains one method as configured and writes metrics.jsonl, timing.jsonl, run.json and checkpoint/ to run_dir.

    resume: go on from the newest state in run_dir; the metrics are then those of a run that was never interrupted.
    task: one of your own. Returns the run's summary: held-out pass rate before and after, with its n; where a watchdog
    ended the run, "stopped_by" says which and why, "steps" are those done, and there is no pass rate after. Raises
    TracefpError for what the user can mend, DivergedError where the numbers broke, and passes signals.Stopped on after
    a last state is written.
    """
    run = TrainingRun(config, task)
    try:
        return drive(run, run_dir, on_step, resume)
    finally:
        run.close()


class Steps(Protocol):
    """What ``drive`` drives: a run that can take a step, evaluate and save. See ``TrainingRun``."""

    config: RunConfig
    parts: Parts
    trainer: GRPOTrainer
    totals: dict[str, float]
    """Figures that add up over the run: kept in its states, and set before ``begin`` where it goes on from one."""

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """Of the last step."""
        ...

    def begin(self, resumed: bool) -> None: ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]: ...

    def load_state(self, tensors: dict[str, Tensor], counters: dict[str, int]) -> None: ...

    def step(self, index: int) -> tuple[dict[str, float], dict[str, float]]: ...

    def evaluate(self, tag: str) -> float | None: ...

    def save(self, directory: Path, facts: dict[str, Any] | None = None) -> None: ...


def drive(
    run: Steps, run_dir: Path, on_step: Callable[[int, dict[str, float]], None] | None, resume: bool
) -> dict[str, Any]:
    """Drives a run from where it stands to its summary, see ``run_training``, and tells ``watch.command`` how it
    ended."""
    c = run.config
    notifier = for_run(run_dir, run.parts.method.name, c.run.seed, c.watch.command, c.watch.command_seconds)
    try:
        summary = _drive(run, run_dir, on_step, resume, notifier)
    except Stopped as stop:
        notifier.send("stopped", f"stopped by {stop}")
        raise
    except BaseException as error:
        notifier.send("failed", " ".join(str(error).split()) or type(error).__name__)
        raise
    else:
        if stopped := summary.get("stopped_by"):
            notifier.send("stopped", f"watch.{stopped['name']}: {stopped['message']}", final=summary)
        else:
            notifier.send("done", _ending(summary), final=summary)
        return summary
    finally:
        notifier.close()


def _ending(summary: dict[str, Any]) -> str:
    text = f"done after {summary['steps']} steps"
    if summary.get("eval/pass_rate_end") is None:
        return text
    start, end = (summary[f"eval/pass_rate_{when}"] for when in ("start", "end"))
    return f"{text}: held-out pass rate {start:.3f} -> {end:.3f}"


def _drive(
    run: Steps,
    run_dir: Path,
    on_step: Callable[[int, dict[str, float]], None] | None,
    resume: bool,
    notifier: Notifier,
) -> dict[str, Any]:
    config = run.config
    at = _resume(run, run_dir) if resume else Position()
    if at.trained:  # not before: what cannot go on stays as it is
        (run_dir / FINAL).unlink(missing_ok=True)
        write_json_atomic(run_dir / CONFIG, resolved(config))
    run.begin(resumed=at.trained > 0)
    saves = Saves(run_dir, run.parts.sizes, lambda sentence: notifier.send("warning", sentence))
    write_run_json(run.parts, run_dir, at)
    try:
        if not at.trained:
            at.start = run.evaluate("start")
        watch = _train(run, run_dir, at, saves, on_step, notifier)
        run.save(run_dir / CHECKPOINT)
        end = run.evaluate("end") if watch.stopped is None else None
        saves.sum_up()
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
    summary: dict[str, Any] = {"method": run.parts.method.name, "seed": config.run.seed, "steps": config.run.steps}
    if at.start is not None:
        summary |= {"eval/pass_rate_start": at.start, "eval/pass_rate_end": end, "eval/n": config.run.eval_prompts}
    if config.run.keep_best and end is not None:
        saves.best(config.run.steps, end, config.run.eval_prompts, run.save)
    if config.run.keep_best:
        summary["best"] = saves.best_facts()
    return summary | watch.summary()


def _train(
    run: Steps,
    run_dir: Path,
    at: Position,
    saves: Saves,
    on_step: Callable[[int, dict[str, float]], None] | None,
    notifier: Notifier,
) -> Watch:
    """The steps that are left; ``at`` says at every moment which are done."""
    c = run.config.run
    with (
        RunLogger(run_dir, c.tensorboard, first_step=at.finished, resumed=at.trained > 0) as logger,
        progress(c.steps, f"{run.parts.method.name}, seed {c.seed}", done=at.finished) as bar,
    ):
        watch = make_watch(run.config, run_dir, at.finished, bar.say, notifier)
        samples = StepLog(run_dir, at.finished, SAMPLES)
        for index in range(at.finished, c.steps):
            if at.unlogged is None:
                metrics, timing = run.step(index)
                count = c.sample_responses if c.sample_every and index % c.sample_every == 0 else 0
                at.pending = (index, metrics, timing, response_samples(run.parts, run.trajectories, count, index))
                release()
            assert at.pending is not None
            _, metrics, timing, lines = at.pending
            if c.eval_every and (index + 1) % c.eval_every == 0 and index + 1 < c.steps:
                rate = run.evaluate(f"step{index}")
                if rate is not None:
                    metrics = {**metrics, "eval/pass_rate": rate}
                    if c.keep_best:
                        saves.best(index + 1, rate, c.eval_prompts, run.save)
            logger.log(index, metrics, {**timing, "failed_saves": float(saves.failed)})
            _write_samples(samples, lines)
            at.finished = index + 1
            bar.step(reward=metrics["reward/mean"], diff=metrics.get("mismatch/logprob_abs_diff_mean", 0.0))
            stop = watch.check(index, metrics)
            if c.save_every and (index + 1) % c.save_every == 0:
                saves.checkpoint(run.save)
            if c.state_every and ((index + 1) % c.state_every == 0 or index + 1 == c.steps or stop):
                saves.state(lambda: _save_state(run, run_dir, at))
            if on_step:
                on_step(index, metrics)
            if stop:
                break
    return watch


def _write_samples(log: StepLog, lines: list[dict[str, Any]]) -> None:
    """Samples are for reading: a disk that refuses them does not end a run."""
    try:
        log.write(*lines)
    except StorageError as error:
        warn(f"the step's sampled responses are not written: {error}")


def make_watch(
    config: RunConfig, run_dir: Path, first: int, say: Callable[[str], None], notifier: Notifier | None = None
) -> Watch:
    """The run's watchdogs, in the state they were in after the steps that metrics.jsonl holds."""
    log = StepLog(run_dir, first)

    def report(event: Event) -> None:
        log.write(asdict(event))
        say(f"{'stop' if event.level == 'stop' else 'warning'}: {event.name}: {event.message}")
        if notifier is not None and event.level != "stop":  # of a stop the run's end tells
            notifier.send("warning", f"{event.name}: {event.message}", event=asdict(event))

    watch = Watch(config.watch, resolved(config), report)
    watch.replay(read_jsonl(run_dir / METRICS))
    return watch


def _save_state(run: Steps, run_dir: Path, at: Position) -> None:
    tensors, counters = run.state()
    facts = {
        "config": resolved(run.config),
        "recipe_hash": run.parts.recipe.hash,
        "counters": counters,
        "totals": run.totals,
        "pass_rate_start": at.start,
        "pending": at.unlogged,
    }
    save_state(run_dir / STATES, at.finished, tensors, facts, run.config.run.keep_states)
    at.saved = at.trained


def _resume(run: Steps, run_dir: Path) -> Position:
    """Loads the newest state whose steps are all logged, if there is a state. Writes nothing; raises TracefpError where
    the run cannot go on."""

    def logged(facts: dict[str, Any]) -> None:
        for name in (METRICS, TIMING):
            steps_before(run_dir / name, facts["step"])

    try:
        loaded = load_latest(run_dir / STATES, STATE_FACTS, logged)
    except RunFolderError as error:
        raise RunFolderError(f"{error}, nor from an earlier one: start it anew") from None
    if loaded is None:
        if any(run_dir.glob(f"{STATES}/step-*")):
            raise _no_whole_state(run_dir)
        return Position()
    tensors, facts = loaded
    check_resumable(run.config, run_dir)
    if facts["recipe_hash"] != run.parts.recipe.hash:
        raise TracefpError(
            f"{run_dir} was written under the recipe hash {facts['recipe_hash']}, the same settings now mean "
            f"{run.parts.recipe.hash}: go on with the version that its run.json names, or train into another folder"
        )
    for name in (EVENTS, SAMPLES):
        lines_before(run_dir, facts["step"], name)
    if (run_dir / RUN).is_file():
        _read_object(run_dir / RUN)
    try:
        run.load_state(tensors, facts["counters"])
    except KeyError as error:
        raise TracefpError(
            f"the newest state in {run_dir / STATES} lacks {error}: go on with the version that its run.json names, or "
            "train into another folder"
        ) from None
    run.totals = facts.get("totals", {})  # a state of an older version has none
    pending = facts.get("pending")
    at = Position(facts["step"], facts["pass_rate_start"], tuple(pending) if pending else None)
    at.saved = at.trained
    return at


def write_run_json(parts: Parts, run_dir: Path, at: Position) -> None:
    """Where the run's numbers come from; a resumed run adds an entry to "resumes" and says what has changed."""
    threads = {"torch": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS")}
    now = provenance() | {"device": parts.device, "threads": threads}
    path, config = run_dir / RUN, parts.config
    if at.trained and path.is_file():
        facts = _read_object(path)
        if changed := append_resume(facts, now, step=at.trained):
            warn(f"{run_dir} goes on with {changed}: its metrics may not be those of an unbroken run")
    else:
        facts = now | {
            "recipe_hash": parts.recipe.hash,
            "recipe": asdict(parts.recipe),
            "config_hash": config_hash(config),
            "checkpoint": {"path": config.model.path, **checkpoint_fingerprint(parts.path)},
            "task": getattr(parts.task, "description", config.task.name),
            "method": parts.method.name,
            "seed": config.run.seed,
            "resumes": [],
        }
    write_json_atomic(path, facts)
