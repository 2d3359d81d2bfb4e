"""`tracefp4 meter`: trainer against rollout, live or from trace files. Exit code 0 within the band, 1 outside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

LIVE = "live"


class _LiveByDefault(TyperGroup):
    """`tracefp4 meter RUN` and `tracefp4 meter --train A` are `tracefp4 meter live ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [LIVE, *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(
    cls=_LiveByDefault,
    help="Find where trainer and rollout part: by site and layer (live), or from two log-prob traces (traces).",
    no_args_is_help=True,
)

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for meter.json and meter.html.")]
Band = Annotated[float, typer.Option("--band", metavar="X", help="Largest distance that passes, in floors.")]


@app.command()
def live(
    target: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run folder or TOML recipe.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, e.g. quant.kv=none.")
    ] = None,
    *,
    train: Annotated[
        str | None, typer.Option(metavar="DIR|builtin:NAME", help="The trainer's weights; the run's unless told.")
    ] = None,
    rollout: Annotated[
        str | None, typer.Option(metavar="DIR|builtin:NAME", help="The rollout's weights; the trainer's unless told.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="See `tracefp4 methods`; the run's, or trace, unless told.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts: .jsonl, .csv, .parquet or .txt; the task's unless told."),
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", help="Prompts to take.")] = 16,
    samples: Annotated[int, typer.Option(metavar="K", help="Responses to each.")] = 2,
    train_logprobs: Annotated[
        str, typer.Option(metavar="processed|raw", help="By the temperature, or not.")
    ] = "processed",
    rollout_logprobs: Annotated[
        str, typer.Option(metavar="processed|raw", help="The same of the rollout.")
    ] = "processed",
    device: Annotated[
        str | None, typer.Option(metavar="auto|cpu|cuda", help="Of both; the run's run.device, or auto, unless told.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers/--no-layers", help="Switch layer by layer too.")] = True,
    band: Band = 1.2,
    out: Out = Path("meter"),
) -> None:
    """Switch one site at a time between trainer and rollout engine, and name the causes."""
    from tracefp4 import signals
    from tracefp4.errors import TracefpError
    from tracefp4.meter.live.plan import LiveRequest, load_run

    if device is not None and device not in ("auto", "cpu", "cuda"):
        raise TracefpError(f"--device must be auto, cpu or cuda, got {device}")
    if target is not None and "=" in target and not Path(target).exists():
        overrides, target = [target, *(overrides or [])], None
    settings = [*(overrides or []), *([] if device is None else [f"run.device={device}"])]
    config = load_run(target, settings, train, method)
    request = LiveRequest(config, rollout, prompts, count, samples, band, layers, train_logprobs, rollout_logprobs)
    from tracefp4.meter.live.run import meter_live  # after the request is known to be good: it imports torch

    with signals.stoppable():
        result = meter_live(request, lambda text: typer.echo(text, err=True))
    _finish(result.as_dict(), out)


@app.command()
def traces(
    train: Annotated[Path, typer.Argument(metavar="A.jsonl", help="The trainer's log-probs, or both in one file.")],
    rollout: Annotated[
        Path | None, typer.Argument(metavar="B.jsonl", help="The rollout's log-probs.", show_default=False)
    ] = None,
    *,
    floor: Annotated[
        float | None, typer.Option(metavar="X", help="Mean |log-prob difference| of a BF16 pair; without it .1 passes.")
    ] = None,
    band: Band = 1.2,
    train_field: Annotated[str | None, typer.Option(metavar="NAME", help="Field of the trainer's log-probs.")] = None,
    rollout_field: Annotated[str | None, typer.Option(metavar="NAME", help="Field of the rollout's.")] = None,
    tokens_field: Annotated[str | None, typer.Option(metavar="NAME", help="Field of the token ids.")] = None,
    id_field: Annotated[str | None, typer.Option(metavar="NAME", help="Field that names a sample.")] = None,
    step_field: Annotated[str | None, typer.Option(metavar="NAME", help="Field of the training step.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="A tokenizer's folder, to show tokens as text.")
    ] = None,
    max_broken: Annotated[float, typer.Option(metavar="SHARE", help="Lines that may be no records.")] = 0.01,
    out: Out = Path("meter"),
) -> None:
    """Compare two log-probs of the same tokens, and name the fault that their difference looks like."""
    from tracefp4.meter.traces.layouts import Names
    from tracefp4.meter.traces.run import TraceRequest, meter_traces

    decode = None if tokenizer is None else _decoder(tokenizer)
    names = Names(train_field, rollout_field, tokens_field, id_field, step_field)
    result = meter_traces(TraceRequest(train, rollout, names, floor, band, max_broken)).as_dict()
    if decode is not None:
        for outlier in result["outliers"]:
            if "token" in outlier:
                outlier["text"] = decode([outlier["token"]])
                outlier["text_before"], outlier["text_after"] = decode(outlier["before"]), decode(outlier["after"])
    _finish(result, out)


def _decoder(folder: str) -> Any:
    from transformers import AutoTokenizer

    from tracefp4.errors import TracefpError
    from tracefp4.loop.parts import model_path

    path = model_path(folder) if folder.startswith("builtin:") else Path(folder)
    if not path.is_dir():
        raise TracefpError(f"--tokenizer {folder} is no folder")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True).decode
    except Exception as error:  # tokenizers raises plain Exception, transformers KeyError and others
        raise TracefpError(f"--tokenizer {folder} cannot be read: {' '.join(str(error).split())}") from error


def _finish(result: dict[str, Any], out: Path) -> None:
    """Writes both files, prints the essence, and exits by the verdict."""
    from tracefp4.files import write_text_atomic
    from tracefp4.meter.page import printable, render, to_json
    from tracefp4.meter.summary import summary
    from tracefp4.report.logger import ensure_dir
    from tracefp4.report.provenance import provenance

    result = printable(result | {"provenance": provenance()})
    ensure_dir(out)
    write_text_atomic(out / "meter.json", to_json(result))
    write_text_atomic(out / "meter.html", render(result))
    for line in summary(result):
        typer.echo(line)
    typer.echo(printable(f"written: {out / 'meter.json'}, {out / 'meter.html'}"))
    if not result["verdict"]["passed"]:
        raise typer.Exit(1)
