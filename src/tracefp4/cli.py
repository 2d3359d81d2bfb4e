"""The command line: `tracefp4 train | compare | warmstart | methods | guidance`.

A user's error is one sentence on standard error and exit code 2; an unexpected exception keeps its traceback.
Commands import what they run on use, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tracefp4 import __version__
from tracefp4.config import ConfigError, load_config, resolved
from tracefp4.errors import TracefpError
from tracefp4.guidance_cli import app as guidance_app

if TYPE_CHECKING:
    from tracefp4.loop import RunConfig

app = typer.Typer(
    help="FP4 rollouts for LLM reinforcement learning, with the trainer rounding as the rollout did.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.add_typer(guidance_app, name="guidance")

_INTERRUPTED = 130

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the recipe to change, e.g. train.lr=1e-4."),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write.", show_default=False)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run from its newest state.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the runs that are in the folder.")]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs a command line and exits: 0 done, 1 a compared run failed, 2 a user's error, 130 Ctrl-C."""
    try:
        code = app(arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except FloatingPointError as error:
        _print_error(f"the run diverged: {error}; lower train.lr, or go on from an earlier state with --resume")
        sys.exit(1)
    except Exception as error:
        if isinstance(error, TracefpError):
            _print_error(str(error))
            sys.exit(error.exit_code)
        if hasattr(error, "format_message"):  # typer's own, for a command line it cannot read
            if error.format_message():  # empty where no command was given and the help was shown
                _print_error(f"{error.format_message()} (tracefp4 --help shows the commands)")
            sys.exit(2)
        raise
    if code == _INTERRUPTED:  # typer's newer versions turn Ctrl-C into this code, older ones into Abort
        print("interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


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
) -> None:
    """Train one method as the recipe says."""
    from tracefp4.compare import SEED_KEY

    if resume and overwrite:
        raise ConfigError("--resume goes on with a run and --overwrite removes it: give one of them")
    settings = list(overrides or [])
    if seeds is None:
        planned = [(out, _run_config(recipe, settings))]
    else:
        if any(text.partition("=")[0].strip() == SEED_KEY for text in settings):
            raise ConfigError(f"both --seeds and an override set {SEED_KEY}: leave one out")
        planned = [
            (out / f"seed{seed}", _run_config(recipe, [*settings, f"{SEED_KEY}={seed}"])) for seed in parse_seeds(seeds)
        ]
    _train_all(planned, overwrite, resume)


@app.command()
def compare(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    out: Out,
    modes: Annotated[str, typer.Option(metavar="A,B", help="Methods, see `tracefp4 methods`.")] = (
        "bf16,naive,qat,trace,trace-all"
    ),
    seeds: Annotated[str, typer.Option(metavar="0,1,2", help="Seeds that every method runs.")] = "0,1,2",
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Processes at once; as many as cores unless told.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Train several methods on the same recipe and seeds, and print one table."""
    from tracefp4 import compare as comparison

    names = [name.strip() for name in modes.split(",") if name.strip()]
    settings = list(overrides or [])
    for name in names:  # a typo shows at once and here, not minutes later in a child's log
        _run_config(recipe, [*settings, f"{comparison.METHOD_KEY}={name}"])
    comparison.compare(recipe, names, parse_seeds(seeds), out, settings, jobs, overwrite=overwrite)


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


def parse_seeds(text: str) -> list[int]:
    """'0,1,2' to numbers; ConfigError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise ConfigError(f"--seeds must be whole numbers joined by commas, such as 0,1,2, got '{text}'")
        if parts.count(part) > 1:
            raise ConfigError(f"--seeds names {part} twice")
    return [int(part) for part in parts]


def _run_config(recipe: str, overrides: list[str]) -> RunConfig:
    from tracefp4.loop import RunConfig

    return load_config(recipe, overrides, RunConfig)


def _train_all(planned: list[tuple[Path, RunConfig]], overwrite: bool, resume: bool) -> None:
    """Runs one after another; every folder is made, or refused, before the first run starts."""
    from tracefp4.loop import STATES, run_training
    from tracefp4.report import create_run_dir, write_json_atomic
    from tracefp4.report.logger import CONFIG, FINAL, METRICS

    for run_dir, _ in planned:
        if not (resume and any(run_dir.glob(f"{STATES}/step-*"))):
            create_run_dir(run_dir, overwrite=overwrite or resume)  # stopped before its first state: from the start
    for run_dir, config in planned:
        if resume and (run_dir / FINAL).exists():
            steps = json.loads((run_dir / FINAL).read_text(encoding="utf-8")).get("steps")
            if steps == config.run.steps:
                print(f"{run_dir}: complete already", flush=True)
                continue
            (run_dir / FINAL).unlink()  # goes on to more steps
        started = time.monotonic()
        write_json_atomic(run_dir / CONFIG, resolved(config))
        try:
            final = run_training(config, run_dir, resume=resume)
        except BaseException:
            metrics = run_dir / METRICS
            if not metrics.exists() or not metrics.stat().st_size:
                create_run_dir(run_dir, overwrite=True)  # nothing was learned: the same command may try again
            raise
        if not (run_dir / FINAL).exists():
            write_json_atomic(run_dir / FINAL, final)
        print(f"{run_dir}: done in {time.monotonic() - started:.1f} s", flush=True)


def _print_error(message: str) -> None:
    """One line, whatever line breaks the message holds."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
