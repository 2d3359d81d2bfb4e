"""The commands of `tracefp4`: train, compare, status, eval, gap, meter, reproduce, report, bench, guidance and more.

A user's error is one sentence on standard error and exit code 2; an unexpected exception keeps its traceback.
Commands import what they run on use, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tracefp4 import __version__, signals
from tracefp4.config import ConfigError, load_config, resolved
from tracefp4.errors import TracefpError
from tracefp4.files import StorageError, folder_lock
from tracefp4.gap.cli import GapCommand, gap
from tracefp4.guidance_cli import app as guidance_app
from tracefp4.meter.cli import app as meter_app
from tracefp4.options import parse_numbers, parse_seeds
from tracefp4.reproduce.cli import app as reproduce_app
from tracefp4.terminal import print_error, say, system_refusal

if TYPE_CHECKING:
    from tracefp4.loop import RunConfig
    from tracefp4.recipe import QuantRecipe

app = typer.Typer(
    help="FP4 rollouts for LLM reinforcement learning, with the trainer rounding as the rollout did.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.add_typer(guidance_app, name="guidance")
app.add_typer(meter_app, name="meter")
app.add_typer(reproduce_app, name="reproduce")
app.command("gap", cls=GapCommand)(gap)

_STOPPED = 3
_INTERRUPTED = 130
MODES, SEEDS = "bf16,naive,qat,trace,trace-all", "0,1,2"

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the recipe to change, e.g. train.lr=1e-4."),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write.", show_default=False)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run from its newest state.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the runs that are in the folder.")]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs a command line and exits.

    0 done, 1 a run failed or diverged, 2 a user's error, 3 a watchdog that is set to "stop" ended a run (its state and
    checkpoint are saved, final.json says why), 128 + n signal n.
    """
    try:
        code = app(arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except Exception as error:
        if isinstance(error, TracefpError):
            print_error(str(error))
            sys.exit(error.exit_code)
        if hasattr(error, "format_message"):  # typer's own, for a command line it cannot read
            if error.format_message():  # empty where no command was given and the help was shown
                print_error(f"{error.format_message()} ({_help_for(getattr(error, 'ctx', None))})")
            sys.exit(2)
        if (refusal := system_refusal(error)) is not None:
            print_error(refusal)
            sys.exit(2)
        raise
    if code == _INTERRUPTED:  # typer's newer versions turn Ctrl-C into this code, older ones into Abort
        print("interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _help_for(context: Any) -> str:
    """Which --help has what a command line lacks. context: typer's own, of that command, or None."""
    names, kind = [], "options" if context is not None and not hasattr(context.command, "commands") else "commands"
    while context is not None and context.parent is not None:
        names.append(context.info_name or "")
        context = context.parent
    return f"{' '.join(['tracefp4', *reversed(names)])} --help shows the {kind}"


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"tracefp4 {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    out: Out,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="0,1,2", help="Train once per seed, into DIR/seed<k>; without it once, into DIR."),
    ] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    end_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Train one method as the recipe says."""
    from tracefp4.compare import SEED_KEY
    from tracefp4.report.logger import check_not_a_run

    if end_with_stdin:
        signals.end_with_stdin()
    _refuse_both(resume, overwrite)
    _refuse_foreign_name(out)
    settings = list(overrides or [])
    if seeds is None:
        planned = [(out, _run_config(recipe, settings))]
    else:
        if any(text.partition("=")[0].strip() == SEED_KEY for text in settings):
            raise ConfigError(f"both --seeds and an override set {SEED_KEY}: leave one out")
        _refuse_pipe(recipe)
        check_not_a_run(out)
        planned = [
            (out / f"seed{seed}", _run_config(recipe, [*settings, f"{SEED_KEY}={seed}"])) for seed in parse_seeds(seeds)
        ]
    seeds_given = [] if seeds is None else ["--seeds", seeds]
    again = ["train", recipe, *settings, "--out", str(out), *seeds_given, "--resume"]
    _train_all(planned, overwrite, resume, again)


@app.command()
def compare(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    out: Out,
    modes: Annotated[
        str | None, typer.Option(metavar="A,B", help=f"Methods, see `tracefp4 methods`; {MODES} unless told.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="0,1,2", help=f"Seeds that every method runs; {SEEDS} unless told.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Processes at once; as many as cores unless told.")
    ] = None,
    overwrite: Overwrite = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted comparison, by its own modes and seeds.")
    ] = False,
) -> None:
    """Train several methods on the same recipe and seeds, and print one table."""
    from tracefp4 import compare as comparison

    _refuse_both(resume, overwrite)
    _refuse_foreign_name(out)
    _refuse_pipe(recipe)
    before = comparison.read_request(out) if resume else {}
    names = [n.strip() for n in modes.split(",") if n.strip()] if modes is not None else before.get("modes")
    numbers = parse_seeds(seeds) if seeds is not None else before.get("seeds")
    names, numbers = names if names is not None else MODES.split(","), numbers or parse_seeds(SEEDS)
    if resume and not before:
        say(f"{out}: no comparison to go on with, starts anew", sys.stderr)
    settings = list(overrides or [])
    comparison.check_request(names, numbers, settings, jobs, before)
    planned = [
        (
            _run_config(recipe, [*settings, f"{comparison.METHOD_KEY}={name}", f"{comparison.SEED_KEY}={seed}"]),
            comparison.run_folder(out, name, seed),
        )
        for name in names
        for seed in numbers
    ]
    _check_start(planned, resume)  # what would stop a run shows at once and here, not minutes later in its log
    steps = planned[0][0].run.steps
    again = ["compare", recipe, *settings, "--out", str(out), "--modes", ",".join(names)]
    again += ["--seeds", ",".join(map(str, numbers)), *(["--jobs", str(jobs)] if jobs else []), "--resume"]
    try:
        comparison.compare(recipe, names, numbers, out, settings, jobs, overwrite=overwrite, resume=resume, steps=steps)
    except signals.Stopped as stop:
        _exit_stopped(stop, "", again)


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A run folder or a TOML recipe.", show_default=False)],
    overrides: Overrides = None,
    *,
    out: Out,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="best|DIR", help="Other weights than the run's checkpoint/ or the recipe's model.path."),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(metavar="N", help="Held-out problems; run.eval_prompts or 256 unless told.")
    ] = None,
    samples: Annotated[int, typer.Option(metavar="K", help="Responses to each problem.")] = 4,
    k: Annotated[str | None, typer.Option("--k", metavar="1,4", help="k of pass@k; 1 and K unless told.")] = None,
    forms: Annotated[
        str, typer.Option(metavar="A,B", help="bf16, fp4 (by quant.*) or methods; differences are to the first.")
    ] = "bf16,fp4",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted evaluation.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the evaluation in the folder.")] = False,
    end_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Pass rates of a policy on held-out problems in BF16 and in FP4, and their difference."""
    from tracefp4 import evaluate as evaluation
    from tracefp4.evaluate.target import load_target

    if end_with_stdin:
        signals.end_with_stdin()
    _refuse_both(resume, overwrite)
    names = tuple(name.strip() for name in forms.split(",") if name.strip())
    settings = list(overrides or [])
    config = load_target(target, settings, checkpoint)  # before torch is imported
    request = evaluation.EvalRequest(problems, samples, tuple(parse_numbers("--k", k)) if k is not None else (), names)
    try:
        with signals.stoppable():
            facts = evaluation.evaluate(config, out, request, resume=resume, overwrite=overwrite)
    except signals.Stopped as stop:
        asked = {"--out": out, "--checkpoint": checkpoint, "--problems": problems, "--samples": samples, "--k": k}
        options = [text for name, value in asked.items() if value is not None for text in (name, str(value))]
        done = ", ".join(f"{count} of {name}" for name, count in evaluation.answered(out, names).items())
        again = ["eval", target, *settings, *options, "--forms", ",".join(names), "--resume"]
        _exit_stopped(stop, f" with problems answered: {done}", again)
    _print_evaluation(facts, out / evaluation.EVAL)


def _print_evaluation(facts: dict[str, Any], path: Path) -> None:
    from rich.console import Console

    from tracefp4.report.eval_table import eval_table
    from tracefp4.report.table import provenance_lines

    console = Console()
    if not console.is_terminal:  # rich assumes 80 columns then, which folds the cells
        console = Console(width=200)
    console.print(eval_table(facts))
    for line in [*provenance_lines(facts), f"written: {path}"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command(hidden=True)
def chain(commands: Annotated[list[str], typer.Argument(metavar="COMMAND ARG... [+ COMMAND ARG...]...")]) -> None:
    """Run several commands in one process, each after the one before has succeeded. Put -- in front of them."""
    from itertools import groupby

    for last, words in groupby(commands, key=lambda word: word == "+"):
        if not last and (code := app(list(words), standalone_mode=False)):
            raise typer.Exit(code)


@app.command()
def status(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.", show_default=False)
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Show where runs stand: steps, time left, recent figures, warnings."""
    from rich.console import Console

    from tracefp4.report.status import status_objects, status_table, statuses, warning_lines

    rows = statuses(runs)
    if as_json:
        print(json.dumps(status_objects(rows), indent=2, sort_keys=True))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(status_table(rows))
    for line in warning_lines(rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.", show_default=False)
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="The page to write; report.html in RUN, or here for several."),
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="Write each plot as a PNG too.")] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every logged value as one long table.")
    ] = None,
) -> None:
    """Write one HTML file with plots, tables and checks of runs, finished or not."""
    from tracefp4.report.html import report as write_report

    page, *others = write_report(runs, out, png, csv)
    say(f"written: {page}" + (f" and {len(others)} more" if others else ""))


@app.command()
def warmstart(
    recipe: Recipe,
    out_dir: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="The checkpoint to write.")],
) -> None:
    """Make the small policy that the demo starts from, by supervised training."""
    from tracefp4.train import warmstart as command

    raise typer.Exit(command.main([recipe, str(out_dir)]))


@app.command()
def methods() -> None:
    """List the methods, one line each."""
    from tracefp4.methods import list_methods

    known = list_methods()
    width = max(len(method.name) for method in known)
    for method in known:
        print(f"{method.name:<{width}}  {method.description}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Check and time kernels, rollout or training on this machine: bench {kernels, rollout, train}."""
    from tracefp4.bench.cli import run

    raise typer.Exit(run(context.args))


@app.command()
def plan(
    *,
    model: Annotated[
        str, typer.Option(metavar="NAME|DIR", help="A known name, a config.json or its folder.", show_default=False)
    ],
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of a trajectory.", show_default=False)],
    trajectories: Annotated[int, typer.Option(metavar="N", help="Trajectories of a step.", show_default=False)],
    link: Annotated[float, typer.Option(metavar="GBPS", help="Bandwidth of the link, GB/s.")] = 300.0,
    disk: Annotated[float, typer.Option(metavar="GBPS", help="Bandwidth of the disk, GB/s.")] = 5.0,
    memory: Annotated[float, typer.Option(metavar="GB", help="Memory of weights and KV cache, GB.")] = 130.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Size the guidance of every mode, and the KV cache, before a run."""
    from rich.console import Console

    from tracefp4.guidance import plan as sizing
    from tracefp4.report.plan_table import capacity_table, guidance_table

    shape = sizing.find_model(model)
    result = sizing.plan(shape, _guided_recipes(shape.num_layers), context, trajectories, link, disk, memory)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    console = Console()
    if not console.is_terminal:  # rich assumes 80 columns then, which folds the headings to shreds
        console = Console(width=200)
    console.print(guidance_table(result, transposed=console.width < 140))
    console.print(capacity_table(result))


def _guided_recipes(num_layers: int) -> list[tuple[str, QuantRecipe]]:
    """Every guided mode, widest first, and the narrowest record that no mode uses."""
    from dataclasses import replace

    from tracefp4.methods import QuantConfig, list_methods

    modes = [(m.name, m.recipe(QuantConfig(), num_layers)) for m in list_methods() if m.guidance is not None]
    modes += [(f"{name}, 1.0625", replace(recipe, bits=1.0625)) for name, recipe in modes if recipe.bits == 1.125]
    return sorted(modes, key=lambda mode: -mode[1].bits * len(mode[1].guided_layers))


def _run_config(recipe: str, overrides: list[str]) -> RunConfig:
    from tracefp4.loop.config import RunConfig

    return load_config(recipe, overrides, RunConfig)


def _refuse_both(resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise ConfigError("--resume goes on with a run and --overwrite removes it: give one of them")


def _refuse_pipe(recipe: str) -> None:
    """A recipe that is read once a run must be there the second time."""
    path = Path(recipe)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{recipe} is no file: it is read anew for each run, so save the recipe to a file first")


def _refuse_foreign_name(out: Path) -> None:
    """The libraries that write a checkpoint take UTF-8 names only, which would show at the end of a run."""
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--out {str(out)!a} is not UTF-8: choose another name") from None
    if out == Path():  # as an unset variable leaves it
        raise ConfigError("--out is empty or the current folder: name a folder of its own for the run")


def _check_start(planned: list[tuple[RunConfig, Path]], resume: bool) -> None:
    from tracefp4.loop import check_start

    check_start(planned, resume)


def _train_all(planned: list[tuple[Path, RunConfig]], overwrite: bool, resume: bool, again: list[str]) -> None:
    """Runs one after another; every folder is checked, locked and made before the first run starts."""
    from tracefp4.report import create_run_dir, ensure_dir
    from tracefp4.report.logger import is_complete, logged_steps
    from tracefp4.saves import STATES

    _check_start([(config, run_dir) for run_dir, config in planned], resume)
    with ExitStack() as locks:
        for run_dir, _ in planned:
            locks.enter_context(folder_lock(ensure_dir(run_dir)))
        for run_dir, config in planned:
            kept = resume and (any(run_dir.glob(f"{STATES}/step-*")) or is_complete(run_dir, config.run.steps))
            if not kept:  # stopped before its first state: from the start
                if resume:
                    steps = logged_steps(run_dir)
                    lost = f"its {steps} logged steps are lost and it" if steps else "it"
                    say(f"{run_dir}: no state to go on from, {lost} starts anew", sys.stderr)
                create_run_dir(run_dir, overwrite=overwrite or resume)
        locks.enter_context(signals.stoppable())
        stopped = False
        for run_dir, config in planned:
            if resume and is_complete(run_dir, config.run.steps):
                say(f"{run_dir}: complete already")
                continue
            try:
                stopped |= not _train_one(run_dir, config, resume)
            except signals.Stopped as stop:
                _exit_stopped(stop, _saved_steps(run_dir / STATES), again)
    if stopped:
        raise typer.Exit(_STOPPED)


def _train_one(run_dir: Path, config: RunConfig, resume: bool) -> bool:
    """Whether the run took all its steps; else a watchdog ended it."""
    from tracefp4.loop import run_training
    from tracefp4.report import create_run_dir, write_json_atomic
    from tracefp4.report.logger import CONFIG, FINAL, METRICS
    from tracefp4.saves import STATES

    started = time.monotonic()
    had_states = resume and any(run_dir.glob(f"{STATES}/step-*"))
    try:
        if not had_states:  # else the run does, once it holds a state
            write_json_atomic(run_dir / CONFIG, resolved(config))
        if config.run.asynchronous:
            from tracefp4.asynchronous.training import run_asynchronous

            final = run_asynchronous(config, run_dir, resume=resume)
        else:
            final = run_training(config, run_dir, resume=resume)
    except BaseException:
        metrics = run_dir / METRICS
        if not had_states and (not metrics.exists() or not metrics.stat().st_size):
            with suppress(StorageError):  # the error that stopped the run is the one to report
                create_run_dir(run_dir, overwrite=True)  # nothing was learned: the same command may try again
        raise
    if not (run_dir / FINAL).exists():
        write_json_atomic(run_dir / FINAL, final)
    if why := final.get("stopped_by"):
        say(f"{run_dir}: stopped by watch.{why['name']} after step {why['step']}; --resume goes on")
        return False
    start, end = (final.get(f"eval/pass_rate_{when}") for when in ("start", "end"))
    rates = "" if start is None or end is None else f", held-out pass rate {start:.3f} -> {end:.3f}"
    say(f"{run_dir}: done in {time.monotonic() - started:.1f} s{rates}")
    return True


def _saved_steps(states: Path) -> str:
    from tracefp4.train.checkpoint import latest_facts

    facts = latest_facts(states)
    if facts is None:
        return " before a state was written"
    return f" with {facts['step'] + bool(facts.get('pending'))} steps saved"


def _exit_stopped(stop: signals.Stopped, how_far: str, again: list[str]) -> NoReturn:
    """Says how to go on, and exits as a shell expects of a process that a signal ended."""
    say(f"stopped by {stop}{how_far}; go on with: {shlex.join(['tracefp4', *again])}", sys.stderr)
    raise SystemExit(stop.exit_code)
