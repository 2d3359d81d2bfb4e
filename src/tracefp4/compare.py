"""Methods side by side: one process per method, then one table.

Layout: `out_dir/compare.json` (what was asked for, and from which commit), `out_dir/<method>/log.txt` and
`out_dir/<method>/seed<k>/` (a run folder each), then `out_dir/summary.json` and `out_dir/table.md`. The processes share
nothing; a method's seeds run one after another in its process. Each gets cores // jobs threads: more would only have
them wait for each other. However this process dies, its children end too, after saving their states.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress, TaskID

from tracefp4 import signals
from tracefp4.config import ConfigError
from tracefp4.device import least_busy, visible_gpus
from tracefp4.errors import TracefpError
from tracefp4.files import folder_lock, storage_errors, sweep_files, warn, write_text_atomic
from tracefp4.report import (
    create_run_dir,
    ensure_dir,
    markdown_table,
    provenance,
    rich_table,
    summarize,
    write_json_atomic,
)
from tracefp4.report.logger import CONFIG, METRICS, is_complete
from tracefp4.report.progress import bar_columns
from tracefp4.report.provenance import append_resume, usable_cores
from tracefp4.report.table import provenance_lines

METHOD_KEY, SEED_KEY = "method.name", "run.seed"
LOG, SUMMARY, TABLE, REQUEST = "log.txt", "summary.json", "table.md", "compare.json"
POLL_SECONDS = 0.2
GRACE_SECONDS = 25.0  # a child ends its update and writes a state; clusters give 30
TAIL_LINES = 20

Command = Callable[[str, str, Sequence[int], Path, Sequence[str]], list[str]]
"""(recipe, mode, seeds, folder of the mode, overrides) to the command line that trains it."""


class CompareError(TracefpError):
    """A method's process failed; its last lines have been shown."""

    exit_code = 1


def train_command(recipe: str, mode: str, seeds: Sequence[int], mode_dir: Path, overrides: Sequence[str]) -> list[str]:
    """`tracefp4 train` of one method, with the interpreter that runs the comparison.

    --end-with-stdin: this process holds the other end of the child's standard input, and takes it along when it dies.
    """
    names = ",".join(str(seed) for seed in seeds)
    method = f"{METHOD_KEY}={mode}"
    arguments = ["train", recipe, *overrides, method, "--out", str(mode_dir), "--seeds", names, "--end-with-stdin"]
    return [sys.executable, "-m", "tracefp4", *arguments]


def compare(
    recipe: str | Path,
    modes: Sequence[str],
    seeds: Sequence[int],
    out_dir: str | Path,
    overrides: Sequence[str] = (),
    jobs: int | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    steps: int | None = None,
    command: Command = train_command,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains every (mode, seed), writes summary.json and table.md, prints the table, returns the summary.

    jobs: processes at once; the smaller of the number of modes and of cores unless told. overwrite: remove
    the runs of these modes and seeds that `out_dir` holds; other files there stay. resume: go on with them instead;
    where `steps` says how many steps a run has, modes whose runs are all complete start no process. Raises
    CompareError after a failing process has been shown and the others ended, signals.Stopped once a signal has ended
    them all.
    """
    console = console or Console(stderr=True)
    out_dir = Path(out_dir)
    before = read_request(out_dir) if resume else {}
    check_request(modes, seeds, overrides, jobs, before)
    with folder_lock(ensure_dir(out_dir)):
        _prepare(out_dir, modes, seeds, overwrite, resume)
        origin = _write_request(out_dir, modes, seeds, before)  # now: the sources may be edited while the runs go on
        jobs = min(len(modes), jobs or usable_cores())
        threads = max(1, usable_cores() // jobs)
        more = ["--resume"] if resume else []
        children = [
            Child(
                mode,
                [*command(str(recipe), mode, seeds, out_dir / mode, overrides), *more],
                out_dir / mode,
                seeds,
                append=resume,
            )
            for mode in modes
            if not (resume and all(is_complete(run_folder(out_dir, mode, seed), steps) for seed in seeds))
        ]
        started = time.monotonic()
        with signals.stoppable(), _display(console, children) as show:
            _run_all(children, jobs, child_environment(threads), show, console)
        summary = {**summarize(out_dir, modes, seeds), **origin, "jobs": jobs, "threads_per_run": threads}
        summary["wall_seconds"] = {"total": time.monotonic() - started, **{c.mode: c.seconds for c in children}}
        write_json_atomic(out_dir / SUMMARY, summary)
        write_text_atomic(out_dir / TABLE, markdown_table(summary))
    _print_result(summary, out_dir)
    return summary


def run_folder(out_dir: Path, mode: str, seed: int) -> Path:
    """Where a comparison keeps the run of a mode and seed."""
    return out_dir / mode / f"seed{seed}"


def read_request(out_dir: Path) -> dict[str, Any]:
    """The compare.json of a folder: {"modes", "seeds", commit, versions ...}; {} where there is none yet."""
    path = out_dir / REQUEST
    try:
        request: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return request
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): compare into another --out") from None


def check_request(
    modes: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    jobs: int | None,
    before: dict[str, Any],
) -> None:
    """Refuses what would only fail, or mislead, after the first run. before: the request to resume, {} for none."""
    for name, values in (("--modes", modes), ("--seeds", seeds)):
        if not values:
            raise ConfigError(f"{name} names nothing to run")
        if len(set(values)) < len(values):
            raise ConfigError(f"{name} names {next(v for v in values if list(values).count(v) > 1)} twice")
        known = before.get(name.removeprefix("--"), [])
        if missing := [str(v) for v in known if v not in values]:
            raise ConfigError(
                f"the comparison to resume has {', '.join(missing)} too, which {name} leaves out: give all of "
                f"{','.join(map(str, known))}, more if you like, or leave {name} away"
            )
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in (METHOD_KEY, SEED_KEY):
            flag = "--modes" if key == METHOD_KEY else "--seeds"
            raise ConfigError(f"the override '{override}' contradicts {flag}, which sets {key} in a comparison")


def _prepare(out_dir: Path, modes: Sequence[str], seeds: Sequence[int], overwrite: bool, resume: bool) -> None:
    """Makes room in a folder that this process has locked."""
    if not overwrite and not resume:
        create_run_dir(out_dir)
        return
    for folder in (run_folder(out_dir, mode, seed) for mode in modes for seed in seeds):
        if overwrite and folder.exists():
            with folder_lock(folder):
                create_run_dir(folder, overwrite=True)
    with storage_errors(str(out_dir)):
        sweep_files(out_dir)
        for name in (SUMMARY, TABLE):
            (out_dir / name).unlink(missing_ok=True)  # else a failed comparison shows the table of the last one


def _write_request(out_dir: Path, modes: Sequence[str], seeds: Sequence[int], before: dict[str, Any]) -> dict[str, Any]:
    """Writes compare.json; returns what the summary says of the origin of its numbers."""
    now = provenance()
    origin = {key: before[key] for key in now if key in before} | {"resumes": before.get("resumes", [])}
    if not before:
        origin = {**now, "resumes": []}
    elif changed := append_resume(origin, now):
        warn(f"{out_dir} goes on with {changed}: its table may not be that of an unbroken comparison")
    write_json_atomic(out_dir / REQUEST, {**origin, "modes": list(modes), "seeds": list(seeds)})
    return origin


def child_environment(threads: int) -> dict[str, str]:
    # torch takes its thread count from OMP_NUM_THREADS. Unbuffered, so that log.txt is whole if a child dies;
    # without tqdm's bars, which are noise in a file.
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "TQDM_DISABLE": "1",
    }


# Processes


@dataclass
class Child:
    """One method's process."""

    mode: str
    command: list[str]
    folder: Path
    seeds: Sequence[int]
    process: subprocess.Popen[bytes] | None = None
    append: bool = False
    """Whether its log goes on behind an earlier one."""
    started: float = 0.0
    seconds: float = 0.0
    log: IO[bytes] | None = field(default=None, repr=False)
    earlier: int = 0
    """Bytes that its log held before it began."""
    log_name: str = LOG
    gpu: str | None = None
    """The one GPU that it is to see; None for all of them."""
    descriptors: tuple[int, ...] = ()
    """Open files that it shares, and with them their locks: as long as it lives they are held."""

    @property
    def log_path(self) -> Path:
        return self.folder / self.log_name

    def start(self, environment: dict[str, str]) -> None:
        """Runs it in a session of its own, so that a Ctrl-C reaches it through `end` alone, and only once."""
        if self.gpu is not None:
            environment = environment | {"CUDA_VISIBLE_DEVICES": self.gpu}
        with storage_errors(str(self.log_path)):
            self.folder.mkdir(parents=True, exist_ok=True)
            log = open(self.log_path, "ab" if self.append else "wb")  # noqa: SIM115
            self.earlier = log.seek(0, os.SEEK_END)
        self.started = time.monotonic()
        with log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,  # nothing is written: it closes when this process ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                pass_fds=self.descriptors,
            )

    def poll(self) -> int | None:
        """The exit code once it is known, negative for a signal."""
        assert self.process is not None
        code = self.process.poll()
        self.seconds = time.monotonic() - self.started
        return code

    def steps_done(self) -> int:
        """Lines logged so far over all seeds."""
        total = 0
        for seed in self.seeds:
            try:
                total += (self.folder / f"seed{seed}" / METRICS).read_bytes().count(b"\n")
            except OSError:
                break
        return total

    def steps_planned(self) -> int | None:
        """The steps of all seeds, as the first run's config.json tells; None until it is there."""
        try:
            config = json.loads((self.folder / f"seed{self.seeds[0]}" / CONFIG).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return None
        for section in ("run", "train"):
            steps = config.get(section, {}).get("steps")
            if isinstance(steps, int):
                return steps * len(self.seeds)
        return None

    def tail(self) -> list[str]:
        """The last lines of its log, of this process alone."""
        lines = self.log_path.read_bytes()[self.earlier :].decode("utf-8", "replace").splitlines()
        return [line for line in lines if line.strip()][-TAIL_LINES:]


def _run_all(
    children: list[Child],
    jobs: int,
    environment: dict[str, str],
    show: Callable[[Child, str], None],
    console: Console,
) -> None:
    """Runs all children, at most `jobs` at once; whatever ends this function, none of them outlives it."""
    waiting, running, gpus = list(children), list[Child](), visible_gpus()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                child = waiting.pop(0)
                child.gpu = least_busy(gpus, (other.gpu for other in running))
                running.append(child)
                child.start(environment)
                show(child, "started")
            time.sleep(POLL_SECONDS)
            for child in list(running):
                code = child.poll()
                if code is None:
                    show(child, "running")
                    continue
                running.remove(child)
                if code:
                    raise _failure(child, code, console)
                show(child, "done")
    finally:
        end_children(running)


def _failure(child: Child, code: int, console: Console) -> CompareError:
    console.print(f"last lines of {child.log_path}:", markup=False, highlight=False, soft_wrap=True)
    for line in child.tail():
        console.print("  " + line, markup=False, highlight=False, soft_wrap=True)
    what = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    hint = "go on with --resume once that is mended"
    return CompareError(f"the run of {child.mode} {what}; its whole log is {child.log_path}; {hint}")


def end_children(children: Sequence[Child], grace_seconds: float | None = None) -> None:
    """Ends the process groups of these children: asked first, killed after a grace period (GRACE_SECONDS)."""
    patience = GRACE_SECONDS if grace_seconds is None else grace_seconds
    for signum, grace in ((signal.SIGTERM, patience), (signal.SIGKILL, GRACE_SECONDS)):
        alive = [c for c in children if c.process is not None and c.process.poll() is None]
        for child in alive:
            _signal_group(child, signum)
        deadline = time.monotonic() + grace
        while any(c.poll() is None for c in alive) and time.monotonic() < deadline:
            try:
                time.sleep(0.02)
            except KeyboardInterrupt:  # an impatient second Ctrl-C: no more grace
                deadline = 0.0


def _signal_group(child: Child, signum: signal.Signals) -> None:
    assert child.process is not None
    with suppress(ProcessLookupError):
        os.killpg(child.process.pid, signum)  # the child leads the group that start_new_session made


# What a person sees


@contextmanager
def _display(console: Console, children: list[Child]) -> Iterator[Callable[[Child, str], None]]:
    """A bar per method on a terminal; elsewhere a line at the start, each fifth of the way and the end."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Progress(*bar_columns(), console=console, transient=True) as bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.tasks: dict[str, TaskID] = {}

    def __call__(self, child: Child, state: str) -> None:
        if child.mode not in self.tasks:
            self.tasks[child.mode] = self.bars.add_task(child.mode, total=None, figures="")
        text = f"done in {child.seconds:.0f} s" if state == "done" else f"{child.seconds:.0f} s"
        self.bars.update(
            self.tasks[child.mode], total=child.steps_planned(), completed=child.steps_done(), figures=text
        )


class _Lines:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.shown: dict[str, int] = {}

    def __call__(self, child: Child, state: str) -> None:
        if state == "running":
            planned = child.steps_planned()
            fifths = 5 * child.steps_done() // planned if planned else 0
            if fifths <= self.shown.get(child.mode, 0) or fifths >= 5:
                return
            self.shown[child.mode] = fifths
            state = f"step {child.steps_done()}/{planned}"
        text = f"{child.mode}: {state}" + (f" ({child.seconds:.0f} s)" if child.seconds else "")
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _print_result(summary: dict[str, Any], out_dir: Path) -> None:
    """The table and where its numbers come from, on standard output."""
    console = Console()
    if not console.is_terminal:  # rich assumes 80 columns then, which folds the headings to shreds
        console = Console(width=200)
    console.print(rich_table(summary, transposed=console.width < 140))
    for line in [*provenance_lines(summary), f"written: {out_dir / SUMMARY}, {out_dir / TABLE}"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
