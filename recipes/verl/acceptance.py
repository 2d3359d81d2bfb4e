"""GRPO through verl in several modes, each a Ray job of its own, and the bounds that a working adapter keeps.

    python recipes/verl/acceptance.py runs/verl [--steps 20] [--modes bf16,qat,trace] [--shapes sync:1] [--device cpu]
        [--jobs 1] [--seconds 0] [key=value ...]

Prints one row a shape and mode, writes them to OUT/table.json and OUT/table.md, and exits with 1 where a bound is
broken: guided rows at least 99 % of the eligible ones; in sync shapes TRACE's mean |log-prob difference| at most 1.5
times that of bf16, vanilla QAT's at least 3 times. Arguments with a "=" go to verl.

--device gpu runs on this machine's GPUs, with a larger policy (run_gpu.sh). --seconds ends everything after so long: a
run that is stopped then, or not begun since the longest so far would not fit, is a broken bound too. --jobs runs so
many modes of a shape at a time: worth while only on a machine of many cores, such as one with GPUs (the jobs then share
the first of these), and what it says of time is no longer that of a run by itself. However this script ends, unless by
SIGKILL, its jobs end with it.

A shape is a trainer mode of verl (sync, colocate_async, separate_async, or turns: colocate_async with an agent loop of
two turns) and a number of trainer ranks. "--shapes all" is every mode on 1 and on 2 ranks, turns on 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import mean

from tracefp4 import signals
from tracefp4.compare import Child
from tracefp4.errors import TracefpError
from tracefp4.methods import get_method
from tracefp4.report.provenance import provenance

Steps = list[dict[str, float]]
"""Metrics of every step of a run."""

DIFF, SHARE = "mismatch/logprob_abs_diff_mean", "guidance/guided_share"
METHOD_KEY = "actor_rollout_ref.model.override_config.tracefp4.method"
POLL_SECONDS, GRACE_SECONDS = 0.2, 25.0
TRACE_AT_MOST, QAT_AT_LEAST, GUIDED_AT_LEAST = 1.5, 3.0, 0.99
SEGMENTS, LAG = "guidance/segments_mean", "guidance/version_lag_max"
MODES = ("sync", "colocate_async", "separate_async", "turns")
ALL = ("sync:1", "sync:2", "colocate_async:1", "colocate_async:2", "separate_async:1", "separate_async:2", "turns:1")


def shape_overrides(shape: str) -> list[str]:
    """verl's keys for a shape. Raises SystemExit for one that is none."""
    mode, _, ranks = shape.partition(":")
    if mode not in MODES or not ranks.isdigit() or not int(ranks):
        raise SystemExit(f"{shape!r} is no shape: name one of {', '.join(MODES)}, a colon, and a number of ranks")
    rollout, stock = "actor_rollout_ref.rollout", "colocate_async" if mode == "turns" else mode
    keys = [
        f"trainer.v1.trainer_mode=tracefp4_{stock}",
        f"trainer.n_gpus_per_node={ranks}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={max(1, 16 // int(ranks))}",
    ]
    if mode != "sync":  # few at a time and enough to do, so that weight updates find responses half done
        keys += [f"{rollout}.max_num_seqs=8", f"trainer.v1.{stock}.num_warmup_batches=2"]
    if mode == "separate_async":  # one rank more, for a rollout of its own; a mini-batch of 16 at a time
        keys += [f"{rollout}.log_prob_micro_batch_size_per_gpu={max(1, 16 // int(ranks))}"]
        keys += [f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=1", f"{rollout}.checkpoint_engine.backend=tracefp4"]
        keys += [f"ray_kwargs.ray_init.num_gpus={int(ranks) + 1}"]
    if mode == "turns":
        agents = Path(__file__).with_name("agents.yaml")
        keys += [f"{rollout}.agent.agent_loop_config_path={agents}", f"{rollout}.agent.default_agent_loop=two_turns"]
    return keys


class Clock:
    """What is left of the time for all runs; 0 seconds: no end."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds if seconds else None
        self._longest = 0.0

    @property
    def left(self) -> float | None:
        return None if self._end is None else self._end - time.monotonic()

    def note(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)

    def allows_another(self) -> bool:
        return self.left is None or self.left > self._longest


class Run:
    """One run of verl with a Ray cluster of its own; its output goes to FOLDER/log.txt.

    seconds: the longest it may take; None is no limit.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        steps: int,
        overrides: Sequence[str],
        device: str = "cpu",
        seconds: float | None = None,
    ) -> None:
        self.mode, self.folder, self._device, self._limit = mode, folder, device, seconds
        self._failed = False
        # Short, as the sockets in it have names of 107 characters at most. A folder of its own, since in Ray's usual
        # one the newest cluster's logs would pass for those of this one.
        self._ray = Path(tempfile.mkdtemp(prefix="ray"))
        command = [str(Path(__file__).with_name(f"run_{device}.sh")), str(folder), f"{METHOD_KEY}={mode}"]
        command += [f"trainer.total_training_steps={steps}", f"++ray_kwargs.ray_init._temp_dir={self._ray}"]
        self.child = Child(mode, [*command, *overrides], folder, seeds=())

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return self.child.seconds

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "metrics.jsonl").unlink(missing_ok=True)
        environment = os.environ | {"PYTHON": sys.executable}
        if self._device == "gpu":
            environment["SUMS_MODEL"] = str(policy_folder(self.folder.parent))
        self.child.start(environment)

    def result(self) -> Steps | None:
        """Its steps; None while it goes on. Raises SystemExit where verl failed, after the ends of its logs, and
        TimeoutError where it ran past its time."""
        code = self.child.poll()
        if code is None:
            if self._limit is None or self.seconds < self._limit:
                return None
            self.end()
            raise TimeoutError(f"mode {self.mode} was stopped after {self._limit:.0f} s")
        if code:
            self._failed = True
            print(log_ends(self.folder, self._ray / "session_latest" / "logs"), file=sys.stderr)
            raise SystemExit(f"mode {self.mode} ended with code {code}; see {self.child.log_path} and {self._ray}")
        self.end()
        return read_metrics(self.folder / "metrics.jsonl")

    def end(self) -> None:
        end_runs([self])

    def forget(self) -> None:
        """Removes what Ray wrote, unless the run failed."""
        if not self._failed:
            shutil.rmtree(self._ray, ignore_errors=True)


def end_runs(runs: Sequence[Run]) -> None:
    """Ends runs that go on: their drivers are asked, then killed. What is left of the groups they lead goes with them.

    Asked first, a driver ends its cluster before itself. Ray's workers lead groups of their own: those of a cluster
    that is killed live on for seconds, until they notice.
    """
    drivers = [run.child.process for run in runs if run.child.process is not None]
    for driver in drivers:
        driver.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        while any(driver.poll() is None for driver in drivers) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:  # a second signal cuts the wait short
        for driver in drivers:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
        for run in runs:
            run.forget()


def run_modes(
    modes: Sequence[str],
    jobs: int,
    make: Callable[[str], Run],
    clock: Clock,
    done: Callable[[str, Steps | str, float], None],
) -> None:
    """Runs modes, at most ``jobs`` at a time; whatever ends this function, none of them outlives it.

    done: called as they end, with the mode, its steps or else a sentence why there are none, and its seconds.
    """
    waiting, running = list(modes), list[Run]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mode = waiting.pop(0)
                if clock.allows_another():
                    running.append(make(mode))
                    running[-1].start()
                else:
                    done(mode, f"no time left for {mode}", 0.0)
            for run in list(running):
                try:
                    steps: Steps | str | None = run.result()
                except TimeoutError as error:
                    steps = str(error)
                if steps is not None:
                    running.remove(run)
                    clock.note(run.seconds)
                    done(run.mode, steps, run.seconds)
            if running:
                time.sleep(POLL_SECONDS)
    finally:
        end_runs(running)


def policy_folder(out: Path) -> Path:
    """Where the one policy of all modes lies on GPUs."""
    return Path(os.environ.get("SUMS_MODEL") or out.resolve() / "policy")


def make_policy(folder: Path) -> None:
    """As run_gpu.sh makes it, but before several of them look for it. Raises CalledProcessError where that fails."""
    if not (folder / "config.json").exists():
        script = Path(__file__).resolve().parents[2] / "benchmarks" / "larger_policy.py"
        subprocess.run([sys.executable, str(script), str(folder)], check=True)


def log_ends(folder: Path, ray_logs: Path, lines: int = 60) -> str:
    """The last lines of a run's log, and of each log of a worker of its cluster that has a traceback."""
    texts = [folder / "log.txt"]
    for path in sorted(ray_logs.glob("worker-*.err")) + sorted(ray_logs.glob("worker-*.out")):
        if "Traceback (most" in path.read_text(errors="replace"):
            texts.append(path)
    ends = [(path, path.read_text(errors="replace").splitlines()[-lines:]) for path in texts[:6]]
    return "\n".join(line for path, end in ends for line in (f"==> {path} <==", *end))


def read_metrics(path: Path) -> Steps:
    """The lines of verl's file logger that hold a training step."""
    lines = [json.loads(line)["data"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if DIFF in line]


def broken_bounds(steps: dict[str, Steps], lagging: bool = False) -> list[str]:
    """A sentence for each bound that these runs break; bounds of modes that did not run are not checked.

    lagging: of an asynchronous shape, where differences hold the policy's own movement too: they are not compared.
    """
    diff = {mode: mean(s[DIFF] for s in lines) for mode, lines in steps.items()}
    out = []
    for mode, lines in steps.items():
        worst = min((s[SHARE] for s in lines if SHARE in s), default=None)
        if mode.startswith("trace") and worst is None:
            out.append(f"{mode} logged no {SHARE}")
        elif worst is not None and worst < GUIDED_AT_LEAST:
            out.append(f"{mode}: only {worst:.2%} of the eligible rows were guided in one step")
    if "bf16" in diff and not lagging:
        for mode in [m for m in diff if m.startswith("trace") and diff[m] > TRACE_AT_MOST * diff["bf16"]]:
            out.append(f"{mode}: {diff[mode] / diff['bf16']:.2f} times the difference of bf16, over {TRACE_AT_MOST}")
        if "qat" in diff and diff["qat"] < QAT_AT_LEAST * diff["bf16"]:
            out.append(f"qat: {diff['qat'] / diff['bf16']:.2f} times the difference of bf16, under {QAT_AT_LEAST}")
    return out


@dataclass(frozen=True)
class Row:
    """One run: diff, mean |log-prob difference|; over_bf16, its ratio to bf16's; guided, least share of any step;
    segments and lag, pieces a response and most versions a row was behind; rewards of the first and the last five
    steps; step_seconds, of one step without the first; minutes of the whole run."""

    shape: str
    mode: str
    steps: int
    diff: float
    over_bf16: float | None
    guided: float | None
    segments: float
    lag: float
    reward_first: float
    reward_last: float
    step_seconds: float | None
    minutes: float

    @staticmethod
    def of(shape: str, mode: str, lines: Steps, minutes: float) -> Row:
        diff = mean(s[DIFF] for s in lines)
        rewards = [s.get("critic/score/mean", float("nan")) for s in lines]
        seconds = [s["timing_s/step"] for s in lines[1:] if "timing_s/step" in s]
        return Row(
            shape=shape,
            mode=mode,
            steps=len(lines),
            diff=diff,
            over_bf16=None,
            guided=min((s[SHARE] for s in lines if SHARE in s), default=None),
            segments=mean(s.get(SEGMENTS, 1.0) for s in lines),
            lag=max(s.get(LAG, 0.0) for s in lines),
            reward_first=mean(rewards[:5]),
            reward_last=mean(rewards[-5:]),
            step_seconds=mean(seconds) if seconds else None,
            minutes=minutes,
        )

    def cells(self) -> list[str]:
        ratio = "" if self.over_bf16 is None else f"{self.over_bf16:.2f}x"
        guided = "" if self.guided is None else f"{self.guided:.2%}"
        pieces, lag = f"{self.segments:.2f}", f"{self.lag:.0f}"
        reward = f"{self.reward_first:.2f} -> {self.reward_last:.2f}"
        numbers = [str(self.steps), f"{self.diff:.5f}", ratio, guided, pieces, lag, reward]
        step = "" if self.step_seconds is None else f"{self.step_seconds:.1f}"
        return [self.shape, self.mode, *numbers, step, f"{self.minutes:.1f}"]


HEADS = (
    ("shape", 17), ("mode", 11), ("steps", 5), ("mean |dlogp|", 12), ("over bf16", 9), ("guided", 8), ("segments", 8),
    ("lag", 3), ("reward", 12), ("s/step", 6), ("min", 5),
)  # fmt: skip
HEAD_CELLS = [head for head, _ in HEADS]


def aligned(cells: list[str]) -> str:
    padded = [f"{c:{w}}" if i < 2 else f"{c:>{w}}" for i, (c, (_, w)) in enumerate(zip(cells, HEADS, strict=True))]
    return "  ".join(padded)


def write_tables(out: Path, rows: list[Row]) -> None:
    """OUT/table.json with what the figures were measured on, and OUT/table.md."""
    facts = provenance()
    facts["versions"] |= {name: metadata.version(name) for name in ("verl", "ray", "TransferQueue")}
    text = json.dumps({"rows": [asdict(row) for row in rows], "provenance": facts}, indent=1)
    (out / "table.json").write_text(text + "\n", encoding="utf-8")
    heads = [head.replace("|", r"\|") for head in HEAD_CELLS]
    lines = [heads, ["---"] * 2 + ["---:"] * (len(HEADS) - 2), *(row.cells() for row in rows)]
    (out / "table.md").write_text("".join(f"| {' | '.join(cells)} |\n" for cells in lines), encoding="utf-8")


class Table:
    """Rows as runs end; each over the bf16 of its shape once that is there, in the order of shapes and modes."""

    def __init__(self, out: Path, shapes: Sequence[str], modes: Sequence[str]) -> None:
        self._out, self._order = out, list(product(shapes, modes))
        self._rows: dict[tuple[str, str], Row] = {}
        self._printed: list[list[str]] = []
        self._print(HEAD_CELLS)

    @property
    def rows(self) -> list[Row]:
        floors = {shape: row.diff for (shape, mode), row in self._rows.items() if mode == "bf16" and row.diff}
        found = [self._rows[key] for key in self._order if key in self._rows]
        return [replace(r, over_bf16=r.diff / floors[r.shape]) if r.shape in floors else r for r in found]

    def add(self, row: Row) -> None:
        """Prints it and writes the files anew."""
        self._rows[row.shape, row.mode] = row
        write_tables(self._out, self.rows)
        (cells,) = (r.cells() for r in self.rows if (r.shape, r.mode) == (row.shape, row.mode))
        self._print(cells)

    def finish(self) -> None:
        """Prints the table once more where its rows came in another order, or before the bf16 of their shape."""
        final = [HEAD_CELLS, *(row.cells() for row in self.rows)]
        if self._printed != final:
            print()
            for cells in final:
                self._print(cells)

    def _print(self, cells: list[str]) -> None:
        self._printed.append(cells)
        print(aligned(cells), flush=True)


def run_shape(
    shape: str, folders: dict[str, Path], options: argparse.Namespace, clock: Clock, table: Table
) -> list[str]:
    """Runs a shape in all modes, and returns a sentence for every bound that is broken. folders: of the modes."""
    overrides = [*shape_overrides(shape), *options.overrides]
    steps: dict[str, Steps] = {}
    broken: list[str] = []

    def make(mode: str) -> Run:
        return Run(folders[mode], mode, options.steps, overrides, options.device, clock.left)

    def done(mode: str, lines: Steps | str, seconds: float) -> None:
        if isinstance(lines, str):
            broken.append(lines)
            return
        steps[mode] = lines
        table.add(Row.of(shape, mode, lines, seconds / 60))

    run_modes(list(folders), options.jobs, make, clock, done)
    return [f"{shape}: {s}" for s in broken + broken_bounds(steps, lagging=not shape.startswith("sync:"))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--modes", default="bf16,qat,trace", help="names of `tracefp4 methods`")
    parser.add_argument("--shapes", default="sync:1")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("overrides", nargs="*", help="key=value for verl")
    options = parser.parse_intermixed_args()  # overrides may follow options
    options.modes = options.modes.split(",")
    options.shapes = list(ALL) if options.shapes == "all" else options.shapes.split(",")
    for name, values in (("--modes", options.modes), ("--shapes", options.shapes)):
        if len(set(values)) < len(values):
            parser.error(f"{name} names one twice")  # two runs in one folder
    try:
        for mode in options.modes:
            get_method(mode)
    except TracefpError as error:
        parser.error(f"--modes: {error}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    for shape in options.shapes:
        shape_overrides(shape)
    return options


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(options.seconds)
    broken: list[str] = []
    try:
        with signals.stoppable():
            if options.device == "gpu":
                make_policy(policy_folder(options.out))
            table = Table(options.out, options.shapes, options.modes)
            for shape in options.shapes:
                prefix = "" if len(options.shapes) == 1 else f"{shape.replace(':', '-')}-"
                folders = {mode: options.out / f"{prefix}{mode}" for mode in options.modes}
                broken += run_shape(shape, folders, options, clock, table)
            table.finish()
    except signals.Stopped as stopped:
        sys.exit(stopped.exit_code)
    for sentence in broken:
        print(f"broken: {sentence}", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
