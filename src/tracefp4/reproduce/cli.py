"""`tracefp4 reproduce NAME`, `reproduce search RUNG`, `reproduce status | table DIR`, `reproduce pack DIR PACK`,
`reproduce unpack PACK DIR`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracefp4 import signals
from tracefp4.config import ConfigError
from tracefp4.files import folder_lock
from tracefp4.options import parse_seeds
from tracefp4.reproduce.experiments import EXPERIMENTS
from tracefp4.terminal import say

if TYPE_CHECKING:
    from tracefp4.reproduce.plan import Plan, Request
    from tracefp4.reproduce.runner import Limits

app = typer.Typer(
    help="The paper's tables in miniature: train every mode, evaluate, print a table.", no_args_is_help=True
)

NOT_FINISHED = 4
"""Exit code where the time was up first: the same command goes on."""
FAILED = 1

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a reproduction.", show_default=False)]
PackFolder = Annotated[Path, typer.Argument(metavar="PACK", help="The folder of the pack.", show_default=False)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the rung's recipe to change, e.g. train.lr=1e-4."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The folder to write or go on with; runs/reproduce/NAME unless told."),
]
Rung = Annotated[
    str | None, typer.Option(metavar="RUNG", help="A rung of the ladder or a .toml file; ladder-6 unless told.")
]
Profile = Annotated[str, typer.Option(metavar="full|tiny", help="tiny: a minute or two on a CPU, to see it work.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where the runs are.")]
Modes = Annotated[str | None, typer.Option(metavar="A,B", help="These rows only, or other modes.")]
Seeds = Annotated[str | None, typer.Option(metavar="0,1,2", help="Seeds that every mode runs.")]
Steps = Annotated[int | None, typer.Option(metavar="N", help="RL steps of a run.", min=1)]
Jobs = Annotated[int | None, typer.Option(metavar="J", help="Runs at once.", min=1)]
MaxMinutes = Annotated[
    float | None, typer.Option(metavar="M", help="Stop then, states saved; the same command goes on.", min=0)
]
PlacesFolder = Annotated[
    Path | None,
    typer.Option(
        "--places", metavar="DIR", help="Commands that name the same folder run at most --jobs processes together."
    ),
]
Whole = Annotated[
    bool, typer.Option("--whole", help="With --max-minutes: start only runs that are expected to end in time.")
]


def _command(name: str) -> Callable[..., None]:
    def command(
        overrides: Overrides = None,
        *,
        out: Out = None,
        recipe: Rung = None,
        profile: Profile = "full",
        device: Device = "auto",
        modes: Modes = None,
        seeds: Seeds = None,
        steps: Steps = None,
        jobs: Jobs = None,
        max_minutes: MaxMinutes = None,
        whole: Whole = False,
        places: PlacesFolder = None,
    ) -> None:
        from tracefp4.reproduce.plan import Request

        if profile not in ("full", "tiny"):
            raise ConfigError(f"--profile must be full or tiny, got {profile!r}")
        numbers = tuple(parse_seeds(seeds)) if seeds is not None else ()
        request = Request(
            name, recipe, _names(modes), numbers, steps, profile == "tiny", device, tuple(overrides or ())
        )
        deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        _reproduce(request, out or Path("runs", "reproduce", name), jobs, deadline, whole, places)

    command.__doc__ = EXPERIMENTS[name].summary[0].upper() + EXPERIMENTS[name].summary[1:] + "."
    return command


for _name in EXPERIMENTS:
    app.command(_name)(_command(_name))


@app.command()
def search(
    rung: Annotated[str, typer.Argument(metavar="RUNG", help="A rung of the ladder or a .toml file.")],
    overrides: Overrides = None,
    *,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B",
            help="Settings to try, all combinations of several --vary; 'K=A L=B; K=C L=D' changes keys together.",
        ),
    ] = None,
    out: Out = None,
    profile: Profile = "full",
    device: Device = "auto",
    modes: Modes = "bf16",
    seeds: Seeds = "0",
    steps: Annotated[int, typer.Option(metavar="N", help="RL steps of a run.", min=1)] = 100,
    jobs: Jobs = None,
    max_minutes: MaxMinutes = None,
    places: PlacesFolder = None,
) -> None:
    """Short runs of the control under variants of a rung's recipe: which settings are stable."""
    from tracefp4.reproduce.search import make_search, make_variants

    if profile not in ("full", "tiny"):
        raise ConfigError(f"--profile must be full or tiny, got {profile!r}")
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    plan = make_search(
        rung,
        make_variants(vary or ()),
        out or Path("runs", "reproduce", f"search-{Path(rung).stem}"),
        modes=_names(modes),
        seeds=parse_seeds(seeds or ""),
        steps=steps,
        settings=overrides or (),
        tiny=profile == "tiny",
        device=device,
    )
    _search(plan, jobs, deadline, places)


@app.command()
def status(folder: Folder) -> None:
    """What a folder holds: its warm start, steps, seconds a step, what is left."""
    from tracefp4.reproduce.runner import expected_seconds, start_state, step_seconds, steps_done

    plan = _stored(folder)
    for start, rung in plan.starts.items():
        print(f"warm start {start.name}: {start_state(start, rung)}")
    width = max(len(spec.name) for spec in plan.specs)
    left = 0.0
    for spec in plan.specs:
        seconds, expected = step_seconds(spec), expected_seconds(spec, plan)
        state = f"step {steps_done(spec)}/{spec.steps}" if spec.trains else f"policy of {spec.arm.policy_of}"
        state += ", failed" if spec.failed else ", evaluated" if spec.evaluated else ", trained" if spec.trained else ""
        if seconds is not None:
            state += f", {seconds:.2f} s a step"
        if not spec.done and expected:
            state += f", {expected / 60:.1f} min left"
            left += expected
        print(f"{spec.name:<{width}}  {state}")
    done = sum(spec.done for spec in plan.specs)
    rest = f"; about {left / 60:.0f} min of single runs left" if left else ""
    print(f"{done} of {len(plan.specs)} runs done{rest}")


@app.command()
def table(
    folder: Folder,
    until: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only figures of the first N steps, e.g. of runs that have not ended.", min=1),
    ] = None,
) -> None:
    """Print and write the tables and plots of what a folder holds; runs nothing."""
    from tracefp4.reproduce.page import write_first_steps, write_results
    from tracefp4.reproduce.plan import read_plan
    from tracefp4.reproduce.results import gather
    from tracefp4.reproduce.runner import steps_done

    plan = _stored(folder)
    with folder_lock(folder):
        results = gather(plan, until)
        if until is not None and not any(arm["done"] for t in results["tables"].values() for arm in t["arms"].values()):
            furthest = max(steps_done(spec) for spec in plan.specs)
            raise ConfigError(f"no run in {folder} has come to step {until}: the furthest has {furthest} steps")
        facts = read_plan(folder)
        written = write_results(plan, facts, results) if until is None else [write_first_steps(plan, facts, results)]
    _print(results)
    print(f"written in {folder}: {', '.join(written)}")


@app.command()
def pack(
    folder: Folder,
    target: PackFolder,
    megabytes: Annotated[float, typer.Option("--mb", metavar="N", help="Most that it may take.", min=1)] = 60.0,
) -> None:
    """Write what is needed to go on elsewhere: figures, warm starts, states of unfinished runs that fit."""
    from tracefp4.reproduce.pack import pack as write

    plan = _stored(folder)
    with folder_lock(folder):
        facts: dict[str, Any] = write(plan, target, megabytes)
    print(f"{target}: {facts['bytes'] / 1e6:.1f} MB in {facts['parts']} parts, states of {len(facts['states'])} runs")
    if facts["anew"]:
        print(f"start anew, as their states do not fit: {'; '.join(facts['anew'])}")


@app.command()
def unpack(source: PackFolder, folder: Folder) -> None:
    """Put a pack into a folder; the command that made it goes on there."""
    from tracefp4.reproduce.pack import unpack as read

    read(source, folder)
    print(f"{folder}: unpacked; {_again(_stored(folder).request, folder)}")


def _reproduce(
    request: Request, out: Path, jobs: int | None, deadline: float | None, whole: bool, places: Path | None
) -> None:
    from tracefp4.report import ensure_dir
    from tracefp4.reproduce.page import write_results
    from tracefp4.reproduce.plan import make_plan, open_plan
    from tracefp4.reproduce.results import gather
    from tracefp4.reproduce.runner import Limits, default_jobs, run_plan

    plan = make_plan(request, out)
    _check_places(places, out)
    limits = Limits(jobs or default_jobs(plan), deadline, whole, places)
    with folder_lock(ensure_dir(out)):
        facts = open_plan(plan)
        _announce(plan, limits)
        try:
            outcome = run_plan(plan, limits, _say)
        except signals.Stopped as stop:
            _say(f"stopped by {stop}, what is done is saved; {_again(request, out, jobs, places)}")
            raise SystemExit(stop.exit_code) from None
        results = gather(plan)
        written = write_results(plan, facts, results)
    _print(results)
    print(f"written in {out}: {', '.join(written)}")
    for run, why in outcome.failed.items():
        _say(f"{run}: {why}")
    if outcome.failed:
        raise typer.Exit(FAILED)
    if not plan.complete:
        done = sum(spec.done for spec in plan.specs)
        _say(f"{done} of {len(plan.specs)} runs done; {_again(request, out, jobs, places)}")
        raise typer.Exit(NOT_FINISHED)


def _search(plan: Plan, jobs: int | None, deadline: float | None, places: Path | None) -> None:
    from tracefp4.report import ensure_dir
    from tracefp4.reproduce.runner import Limits, default_jobs, run_plan
    from tracefp4.reproduce.search import headings, open_search, summary_rows

    _check_places(places, plan.out)
    limits = Limits(jobs or default_jobs(plan), deadline, places=places)
    with folder_lock(ensure_dir(plan.out)):
        open_search(plan)
        _say(
            f"{len(plan.experiment.tables)} variants, {len(plan.specs)} runs of {plan.steps} steps, "
            f"{limits.jobs} at once on the {plan.device}"
        )
        try:
            outcome = run_plan(plan, limits, _say)
        except signals.Stopped as stop:
            _say(f"stopped by {stop}, what is done is saved; the same command goes on")
            raise SystemExit(stop.exit_code) from None
    rows = [headings(plan.steps), *summary_rows(plan)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for run, why in outcome.failed.items():
        _say(f"{run}: {why}")
    if outcome.failed:
        raise typer.Exit(FAILED)
    if not plan.complete:
        raise typer.Exit(NOT_FINISHED)


def _check_places(places: Path | None, out: Path) -> None:
    """Before anything is written. Raises ConfigError or StorageError where the folder cannot be shared."""
    from tracefp4.report import ensure_dir

    if places is not None:
        if places.resolve() in (Path.cwd(), out.resolve()):
            raise ConfigError(f"--places {places} must be a folder of its own, such as runs/places")
        ensure_dir(places)


def _announce(plan: Plan, limits: Limits) -> None:
    left = sum(not spec.done for spec in plan.specs)
    tables = ", ".join(f"{t.key} ({len(t.arms)} rows)" for t in plan.experiment.tables)
    _say(
        f"{plan.experiment.name}: {tables}; seeds {', '.join(map(str, plan.seeds))}; {plan.steps} steps; {left} of "
        f"{len(plan.specs)} runs left, {limits.jobs} at once on the {plan.device}"
    )


def _print(results: dict[str, Any]) -> None:
    from rich.console import Console

    from tracefp4.reproduce.page import rich_tables

    console = Console()
    if not console.is_terminal:  # rich assumes 80 columns then, which folds the cells
        console = Console(width=250)
    for part in rich_tables(results):
        console.print(part, markup=False, highlight=False)


def _stored(folder: Path) -> Plan:
    from tracefp4.reproduce.plan import make_plan, read_plan, stored_request
    from tracefp4.reproduce.search import SEARCH

    facts = read_plan(folder)
    if not facts and (folder / SEARCH).is_file():
        raise ConfigError(f"{folder} is a search: its command with --max-minutes 0 prints its table again")
    if not facts:
        if (folder / "results.md").is_file():
            raise ConfigError(
                f"{folder} holds finished tables and no runs: read its results.md, or open its results.html"
            )
        raise ConfigError(f"{folder} holds no reproduction: give a folder that reproduce wrote, which has a plan.json")
    return make_plan(stored_request(facts), folder, to_run=False)


def _again(request: Request, out: Path, jobs: int | None = None, places: Path | None = None) -> str:
    words = ["tracefp4", "reproduce", request.experiment, *request.settings, "--out", str(out)]
    for option, value in (
        ("--recipe", request.recipe),
        ("--profile", "tiny" if request.tiny else None),
        ("--device", None if request.device == "auto" else request.device),
        ("--modes", ",".join(request.modes) or None),
        ("--seeds", ",".join(map(str, request.seeds)) or None),
        ("--steps", request.steps),
        ("--jobs", jobs),
        ("--places", places),
    ):
        if value is not None:
            words += [option, str(value)]
    return f"go on with: {shlex.join(words)}"


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _say(line: str) -> None:
    say(line, sys.stderr)
