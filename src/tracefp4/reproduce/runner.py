"""One process a run, several side by side, until all are done or the time is up. Every process can be killed: the next
invocation goes on where its run stood."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tracefp4 import signals
from tracefp4.compare import Child, CompareError, child_environment, end_children
from tracefp4.config import resolved
from tracefp4.device import visible_gpus
from tracefp4.errors import TracefpError
from tracefp4.evaluate import EVAL, answered
from tracefp4.files import append_text
from tracefp4.report import ensure_dir, write_json_atomic
from tracefp4.report.logger import TIMING, logged_steps
from tracefp4.report.provenance import usable_cores
from tracefp4.reproduce.places import Hold, Place, Places
from tracefp4.reproduce.plan import Plan, Spec, scores_of, write_scores
from tracefp4.reproduce.reuse import adopt
from tracefp4.reproduce.rung import RungConfig

POLL_SECONDS = 0.2
GRACE_SECONDS = 45.0
"""A step of a large rung, with a GPU that is shared, ends before a run writes its state."""
EARLY_STEPS = 3
INVOCATIONS, INVOCATION_NOW = "invocations.jsonl", "invocation.json"
TICK_SECONDS = 5.0
STARTED = "warmstart.json"
WARMSTART = [sys.executable, "-m", "tracefp4.train.warmstart"]
Say = Callable[[str], None]

_DIVERGED = re.compile(r"error: (the run diverged in step (\d+): .*)")
_STOPPED_BY_WATCH = 3
_NO_MEMORY = re.compile(r"OutOfMemoryError|out of memory|_STATUS_ALLOC_FAILED")
"""Of torch, of the driver ("CUDA error: out of memory", where not even a context fits) and of its libraries."""


@dataclass
class Outcome:
    """What one invocation came to. failed: runs whose process failed otherwise than by diverging, with the reason;
    refused: those of them whose settings were, before the first step."""

    in_time: bool = True
    refused: list[Spec] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class Limits:
    """jobs: processes at once. deadline: time.monotonic() at which all stop, None for never. whole: start only runs
    that are expected to end before it. places: a folder; all commands that name it hold ``jobs`` places together."""

    jobs: int
    deadline: float | None = None
    whole: bool = False
    places: Path | None = None

    @property
    def left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()


def default_jobs(plan: Plan) -> int:
    """On a CPU as many as cores; on a GPU, whose kernels are small at this size, a process for every two cores."""
    cores = usable_cores()
    return min(len(plan.specs), cores if plan.device == "cpu" else max(1, cores // 2))


def run_plan(plan: Plan, limits: Limits, say: Say) -> Outcome:
    """Makes the warm starts and runs what is left; a run begins once its start is there.

    Raises:
        CompareError: every row refused its settings, and none has trained.
        signals.Stopped: after a signal has ended all processes, their states saved.
    """
    outcome, clock = Outcome(), _Clock(plan, limits.jobs)
    try:
        with signals.stoppable():
            _run_all(plan, limits, outcome, say, clock)
    finally:
        clock.end()
    rows = {spec.folder for spec in outcome.refused}
    if rows and all(spec.folder in rows and not spec.trained for spec in plan.specs if spec.trains):
        first = outcome.refused[0].name
        raise CompareError(f"{first}: {outcome.failed[first]}")
    return outcome


class _Clock:
    """Device time of an invocation, told even of one that is killed: by the next, up to its last few seconds."""

    def __init__(self, plan: Plan, jobs: int) -> None:
        self._log, self._now = plan.out / INVOCATIONS, plan.out / INVOCATION_NOW
        self._facts = {"jobs": jobs, "device": plan.device}
        if self._now.exists():
            self._close()
        self._started = self._told = time.monotonic()

    def tick(self) -> None:
        if time.monotonic() - self._told >= TICK_SECONDS:
            self._tell()

    def end(self) -> None:
        self._tell()
        self._close()

    def _tell(self) -> None:
        self._told = time.monotonic()
        write_json_atomic(self._now, {"seconds": self._told - self._started, **self._facts})

    def _close(self) -> None:
        line = json.dumps(json.loads(self._now.read_bytes())) + "\n"
        if self._log.exists() and not self._log.read_bytes().endswith(b"\n"):  # a power failure cut its last line off
            line = "\n" + line
        append_text(self._log, line)
        self._now.unlink()


def start_made(path: Path) -> bool:
    """Whether a warm start is complete."""
    return (path / STARTED).is_file()


_PROGRESS = re.compile(r"^step +(\d+) .*held-out pass rate ([.\d]+)", re.MULTILINE)


def start_state(path: Path, rung: RungConfig) -> str:
    """Where a warm start stands: its last score and the band that it is to end in."""
    stop = rung.start.stop
    band = f"band {stop.pass_rate_low:g} to {stop.pass_rate_high:g}"
    if start_made(path):
        facts = json.loads((path / STARTED).read_bytes())
        rate = facts["pass_rate"]
        made = f"pass rate {rate['value']:.3f} (n = {rate['n']}) after {facts['steps']} steps, {facts['seconds']:.0f} s"
        return f"made, {made}, {band}"
    try:
        found = _PROGRESS.findall(path.with_name(f"{path.name}.log").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = []
    if not found:
        return f"not made yet, {band}"
    step, rate = found[-1]
    return f"step {step} of at most {rung.start.optimizer.max_steps}, pass rate {rate}, {band}"


@dataclass
class _Job:
    """A process: of a run's training and evaluation, or of a warm start."""

    child: Child
    spec: Spec | None
    start: Path
    place: Place
    hold: Hold
    told: bool = False

    def end(self, places: Places) -> None:
        """Gives back what it held."""
        places.release(self.place)
        self.hold.release()


@dataclass
class _Queue:
    """What waits: warm starts that no folder holds yet, then runs in the order of the plan. most: runs at once, where
    the device's memory has shown that it does not hold as many as there are places."""

    starts: list[Path]
    specs: list[Spec]
    most: int

    def __bool__(self) -> bool:
        return bool(self.starts or self.specs)


def _run_all(plan: Plan, limits: Limits, outcome: Outcome, say: Say, clock: _Clock) -> None:
    specs = [spec for spec in plan.specs if not spec.done]
    needed = dict.fromkeys(spec.start for spec in specs if spec.needs_start and not start_made(spec.start))
    queue = _Queue(list(needed), specs, limits.jobs)
    environment = child_environment(max(1, usable_cores() // limits.jobs))
    running: list[_Job] = []
    places, told = Places(limits.jobs, limits.places, visible_gpus() if plan.device == "cuda" else []), ""
    try:
        while queue or running:
            waits = _begin_starts(plan, queue, running, places, limits, say)
            more = _begin_runs(plan, queue, running, places, limits, outcome, environment, say)
            waits = waits or more
            if waits and not running and waits != told:
                say(f"waits for {waits}")
            told = waits if not running else ""
            if limits.left <= 0 or not (running or waits):
                # An evaluation whose policy failed is not late.
                late = running or queue.starts or any(spec.trains or spec.trained for spec in queue.specs)
                outcome.in_time = outcome.in_time and not late
                return
            time.sleep(POLL_SECONDS)
            clock.tick()
            for job in list(running):
                if (code := job.child.poll()) is None:
                    _tell_early(job, say)
                    continue
                running.remove(job)
                job.end(places)
                if job.spec is None:
                    _start_ended(job, code, queue, outcome, say)
                else:
                    _ended(job.spec, job.child, code, queue, len(running), outcome, say)
    finally:
        end_children([job.child for job in running], GRACE_SECONDS)
        for job in running:
            job.end(places)
            if job.spec is None:
                say(f"{job.start.name}: stopped; the next call goes on from its last evaluation")
            else:
                say(f"{job.spec.name}: stopped after {job.child.steps_done()} of {job.spec.steps} steps")


def _begin_starts(plan: Plan, queue: _Queue, running: list[_Job], places: Places, limits: Limits, say: Say) -> str:
    """Begins warm starts as long as there are places. Returns what another command holds that this one waits for."""
    waits = ""
    for path in list(queue.starts):
        if limits.left <= 0:
            break
        if (hold := places.hold(path.name)) is None:
            waits = f"the warm start {path.name}, which another command makes"
        elif start_made(path):  # by another command, meanwhile
            queue.starts.remove(path)
            hold.release()
        elif (place := places.take()) is None:
            hold.release()
            return places.full
        else:
            queue.starts.remove(path)
            running.append(_starting(path, plan.starts[path], plan.device, place, hold, say))
    return waits


def _begin_runs(
    plan: Plan,
    queue: _Queue,
    running: list[_Job],
    places: Places,
    limits: Limits,
    outcome: Outcome,
    environment: dict[str, str],
    say: Say,
) -> str:
    """Begins runs as long as there are places. Returns what another command holds that this one waits for."""
    elsewhere: dict[str, str] = {}
    while len(running) < queue.most and (spec := _next(queue.specs, running, plan, limits, outcome, elsewhere)):
        if (hold := places.hold(run_key(spec))) is None:
            elsewhere[spec.config] = spec.name
            continue
        if (place := places.take()) is None:
            hold.release()
            return places.full
        queue.specs.remove(spec)
        if (twin := adopt(spec)) is not None:
            say(f"{spec.name}: the same run as {twin.relative_to(plan.out.parent)}, taken over")
        if spec.done:
            places.release(place)
            hold.release()
        else:
            running.append(_started(spec, environment, place, hold, say))
    return f"{next(iter(elsewhere.values()))}, which another command has under way" if elsewhere else ""


def run_key(spec: Spec) -> str:
    """The name under which commands claim a run: equal for equal runs, whatever the command."""
    return f"run-{hashlib.sha256(spec.config.encode()).hexdigest()[:16]}"


def _starting(path: Path, rung: RungConfig, device: str, place: Place, hold: Hold, say: Say) -> _Job:
    """Begins a warm start, or goes on with it."""
    ensure_dir(path.parent)
    recipe = path.with_name(f"{path.name}.json")
    write_json_atomic(recipe, resolved(rung.warmstart(device)))
    command = [*WARMSTART, str(recipe), str(path), "--resume"]
    child = Child(path.name, command, path.parent, (), append=True, log_name=f"{path.name}.log")
    child.gpu, child.descriptors = place.gpu, (*place.descriptors, *hold.descriptors)
    say(f"{path.name}: making the warm start, see {child.log_path}")
    child.start(child_environment(rung.start.threads))
    return _Job(child, None, path, place, hold)


def _start_ended(job: _Job, code: int, queue: _Queue, outcome: Outcome, say: Say) -> None:
    """Takes note of how a warm start ended; runs that need one that failed are not begun."""
    tail = job.child.tail()
    if code == 0:
        say(f"{job.start.name}: {tail[-1]} in {job.child.seconds:.0f} s")
        return
    queue.specs[:] = [spec for spec in queue.specs if spec.start != job.start]
    outcome.failed[job.start.name] = f"the warm start failed with exit code {code}: {' '.join(tail[-1:])}"
    say(f"{job.start.name}: {outcome.failed[job.start.name]}; its log is {job.child.log_path}")


def _next(
    waiting: Sequence[Spec],
    running: Sequence[_Job],
    plan: Plan,
    limits: Limits,
    outcome: Outcome,
    elsewhere: Collection[str],
) -> Spec | None:
    """The next run whose policy, where it takes another's, is there; None where none may start now."""
    if limits.left <= 0:
        return None
    starting = {job.start for job in running if job.spec is None}
    busy = {job.spec.config for job in running if job.spec is not None and job.spec.trains}
    for spec in waiting:
        if spec.config in elsewhere:
            continue  # the same run is under way by another command, and will be taken over
        if spec.needs_start and spec.config in busy and not spec.run_dir.exists():
            continue  # the same run is under way, and will be taken over
        if spec.needs_start and (spec.start in starting or not start_made(spec.start)):
            continue
        if not spec.trains and not spec.trained:
            continue  # the policy that it evaluates is still to come, or has failed
        expected = expected_seconds(spec, plan)
        if limits.whole and expected is not None and expected + _evaluation_seconds(spec, plan) > limits.left:
            outcome.in_time = False
            continue
        return spec
    return None


def _started(spec: Spec, environment: dict[str, str], place: Place, hold: Hold, say: Say) -> _Job:
    log = f"seed{spec.seed}.log"
    child = Child(spec.name, spec.command(), spec.folder, (spec.seed,), append=True, log_name=log)
    child.gpu, child.descriptors = place.gpu, (*place.descriptors, *hold.descriptors)
    done = child.steps_done()
    what = "training" if not done else f"going on after step {done}"
    say(f"{spec.name}: {what if spec.trains and not spec.trained else 'evaluating'}")
    child.start(environment)
    return _Job(child, spec, spec.start, place, hold)


def _ended(spec: Spec, child: Child, code: int, queue: _Queue, others: int, outcome: Outcome, say: Say) -> None:
    """Takes note of how a run's process ended. others: how many of this command's are still under way.

    Where the device's memory gave out beside others, fewer run at once from here on, and the run goes on later. A row
    whose settings are refused is left out; the rest goes on. Once a step or an answer is there the settings have been
    taken: what ends the run then, such as a full disk or a broken state, is its own.
    """
    tail = child.tail()
    diverged = _DIVERGED.search("\n".join(tail))
    if code == 0 and spec.trained and _evaluation_complete(spec):
        if spec.evaluation:
            write_scores(spec)
        seconds = step_seconds(spec) if spec.trains else None
        say(f"{spec.name}: done" + ("" if seconds is None else f", {seconds:.2f} s a step"))
    elif diverged or code == _STOPPED_BY_WATCH:
        why = diverged[1] if diverged else (tail[-1] if tail else "a watchdog ended it")
        step = int(diverged[2]) if diverged else child.steps_done()
        write_json_atomic(spec.failure, {"step": step, "reason": why})
        say(f"{spec.name}: {why}")
    elif code == TracefpError.exit_code and not _begun(spec):  # settings: all other runs of the row would end so too
        queue.specs[:] = [s for s in queue.specs if s.folder != spec.folder]
        outcome.failed[spec.name] = f"was refused: {' '.join(tail[-1:])}"
        outcome.refused.append(spec)
        say(f"{spec.name}: {outcome.failed[spec.name]}")
    elif others and _NO_MEMORY.search("\n".join(tail)):
        queue.most = min(queue.most, others)  # warm starts beside it may be more than the runs that are allowed
        queue.specs.append(spec)
        fewer = f"from here on at most {queue.most} at once, it goes on later"
        say(f"{spec.name}: out of memory beside {others} other{'s' if others > 1 else ''}; {fewer}")
    elif code == TracefpError.exit_code:  # its last line is a sentence for the user
        what = "in its evaluation" if spec.trained else f"after {child.steps_done()} of {spec.steps} steps"
        outcome.failed[spec.name] = f"failed {what}: {' '.join(tail[-1:])}; its log is {child.log_path}"
        say(f"{spec.name}: {outcome.failed[spec.name]}")
    else:
        outcome.failed[spec.name] = f"ended with exit code {code}; its log is {child.log_path}"
        for line in tail[-5:]:
            say(f"  {line}")
        say(f"{spec.name}: {outcome.failed[spec.name]}")


def _begun(spec: Spec) -> bool:
    """Whether a step of its training is logged, or an answer of its evaluation."""
    return steps_done(spec) > 0 or any(answered(spec.eval_dir, spec.forms).values())


def _evaluation_complete(spec: Spec) -> bool:
    if spec.evaluation is None:
        return True
    path = spec.eval_dir / EVAL
    return path.is_file() and bool(json.loads(path.read_bytes()).get("complete"))


def _tell_early(job: _Job, say: Say) -> None:
    """Seconds a step, and what they add up to, as soon as a few steps are measured."""
    spec = job.spec
    if job.told or spec is None or not spec.trains or spec.trained or job.child.steps_done() < EARLY_STEPS:
        return
    job.told = True
    if (seconds := step_seconds(spec)) is not None:
        left = (spec.steps - job.child.steps_done()) * seconds / 60
        say(f"{spec.name}: {seconds:.2f} s a step, {left:.1f} min for the steps left")


def _evaluation_seconds(spec: Spec, plan: Plan) -> float:
    """The most that another run of the table took."""
    known = [scores["seconds"] for other in plan.of_table(spec.table.key) if (scores := scores_of(other))]
    return float(max(known, default=0.0))


# Times


def steps_done(spec: Spec) -> int:
    """Lines in a run's metrics.jsonl."""
    return logged_steps(spec.run_dir)


def timings(run_dir: Path) -> list[dict[str, float]]:
    """Whole lines of a run's timing.jsonl."""
    try:
        lines = (run_dir / TIMING).read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def step_time(line: dict[str, float]) -> float:
    """Seconds of one step: rollout (or, asynchronously, the wait for it), training, weights."""
    return sum(line.get(f"{name}_seconds", 0.0) for name in ("rollout", "wait", "train", "weight_sync"))


def step_seconds(spec: Spec) -> float | None:
    """Median seconds of a step; None before the first."""
    times = [step_time(line) for line in timings(spec.run_dir)]
    return statistics.median(times) if times else None


def expected_seconds(spec: Spec, plan: Plan) -> float | None:
    """Of the steps that a run has left, by its own steps or those of its table's other runs; None if there are none."""
    own = timings(spec.run_dir)
    if spec.trained or not spec.trains:
        return 0.0
    others = [s for other in plan.of_table(spec.table.key) if (s := step_seconds(other)) is not None]
    seconds = step_seconds(spec) or (max(others) if others else None)
    return None if seconds is None else (spec.steps - len(own)) * seconds
