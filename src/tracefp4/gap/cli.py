"""`tracefp4 gap`: its options, exit codes and what it prints."""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tracefp4 import signals
from tracefp4.errors import TracefpError
from tracefp4.terminal import say

if TYPE_CHECKING:
    from tracefp4.gap.run import GapRequest

USER_ERROR, INTERNAL_ERROR = 64, 70
"""EX_USAGE and EX_SOFTWARE of sysexits.h: 0, 1 and 2 are the gate's."""

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")


class GapCommand(TyperCommand):
    """Its errors of usage exit with USER_ERROR too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            raise _as_user_error(
                TracefpError(f"{error.format_message()} (tracefp4 gap --help shows the options)")
            ) from None


def gap(
    *,
    train_form: Annotated[str, typer.Option(metavar="FORM", help="The form that was trained.", show_default=False)],
    serve_form: Annotated[str, typer.Option(metavar="FORM", help="The form to be served.", show_default=False)],
    inquiries: Annotated[
        Path, typer.Option(metavar="FILE", help="JSON lines, CSV or Parquet, see docs/gap.md.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder to write; gap-NAME of the file unless told.")
    ] = None,
    samples: Annotated[int, typer.Option(metavar="K", help="Answers to each inquiry.")] = 1,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(metavar="P")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of an answer.")] = 512,
    seed: Annotated[int, typer.Option(metavar="N", help="Both forms draw with the same seeds.")] = 0,
    system: Annotated[str, typer.Option(metavar="TEXT", help="A system message for rows without one.")] = "",
    chat: Annotated[str, typer.Option(metavar="auto|on|off", help="Whether the chat template is used.")] = "auto",
    check: Annotated[
        str | None, typer.Option(metavar="KIND|JSON", help="The check of rows without one.", show_default=False)
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="ENDPOINT", help="The judge model of checks of kind judge.", show_default=False),
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let checks named in the file run functions and commands.")
    ] = False,
    encoding: Annotated[str, typer.Option(metavar="NAME", help="Of the file, where it is not UTF-8.")] = "",
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave out rows that cannot be used.")] = False,
    limit: Annotated[int | None, typer.Option(metavar="N", help="The first N inquiries.")] = None,
    max_drop: Annotated[
        str | None, typer.Option(metavar="2%", help="The gate: the largest drop that is allowed.", show_default=False)
    ] = None,
    confidence: Annotated[str, typer.Option(metavar="95%", help="Of the intervals and the gate.")] = "95%",
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where forms of this machine run.")] = "auto",
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="auto: as the weights are stored.")] = "auto",
    batch_size: Annotated[int, typer.Option(metavar="N", help="Answers decoded together here.")] = 16,
    concurrency: Annotated[int, typer.Option(metavar="N", help="Requests at a time to an endpoint.")] = 8,
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds of one request.")] = 120.0,
    retries: Annotated[int, typer.Option(metavar="N", help="Tries of a request after the first.")] = 5,
    logprobs: Annotated[
        int, typer.Option(metavar="N", help="Answers of each form compared token by token; 0: none.")
    ] = 200,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the estimate and ask nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted check.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the check in the folder.")] = False,
    recheck: Annotated[bool, typer.Option("--recheck", help="Mark all answers anew; with --resume.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print gap.json or, with --dry-run, the estimate.")] = False,
) -> None:
    """Compare two forms of a model on the same inquiries: the check before one is deployed in place of the other.

    Exit code: 0 the gate passed or there was none, 1 it failed, 2 not enough inquiries to tell, 64 an error of the
    user's, 70 an error of this program.
    """
    raise typer.Exit(_code(dict(locals())))


def _code(given: dict[str, Any]) -> int:
    """The exit code of a gate; other endings are raised. given: the options by name."""
    try:
        request, out = _request(given), given["out"] or Path(f"gap-{given['inquiries'].name.split('.')[0]}")
        flags = {name: given[name] for name in ("dry_run", "resume", "overwrite", "recheck", "as_json")}
        with signals.stoppable():
            return _run(request, out, **flags)
    except signals.Stopped as stop:
        say(f"stopped by {stop}; go on with the same command and --resume", sys.stderr)
        raise SystemExit(stop.exit_code) from None
    except TracefpError as error:
        raise _as_user_error(error) from None
    except OSError as error:
        what = f"{error.filename} cannot be used" if error.filename else "the output cannot be written"
        raise _as_user_error(TracefpError(f"{what} ({error.strerror or error})")) from error
    except Exception:
        traceback.print_exc()
        raise typer.Exit(INTERNAL_ERROR) from None


def _request(given: dict[str, Any]) -> GapRequest:
    """The options as a request. Raises TracefpError for what is wrong with them."""
    from tracefp4.gap.answers import Sampling
    from tracefp4.gap.forms import EndpointForm, parse_form
    from tracefp4.gap.gate import Gate, parse_share
    from tracefp4.gap.inquiries import ReadOptions, parse_checks, read_inquiries
    from tracefp4.gap.run import GapOptions, GapRequest

    _check_numbers(given)
    if given["resume"] and given["overwrite"]:
        raise TracefpError("--resume goes on with a check and --overwrite removes it: give one of them")
    confidence = parse_share("--confidence", given["confidence"], 0.5, 0.9999)
    drop = given["max_drop"]
    gate = None if drop is None else Gate(parse_share("--max-drop", drop, 1e-6, 1.0), confidence)
    judge = None if given["judge"] is None else parse_form("--judge", given["judge"])
    if judge is not None and not isinstance(judge, EndpointForm):
        raise TracefpError("--judge must be an endpoint such as http://localhost:8000/v1?model=NAME")
    checks = () if given["check"] is None else parse_checks(given["check"])
    train = parse_form("--train-form", given["train_form"])
    serve = parse_form("--serve-form", given["serve_form"])
    file = read_inquiries(
        given["inquiries"],
        ReadOptions(
            checks, given["system"], given["encoding"], given["allow_code"], given["skip_broken"], given["limit"]
        ),
    )
    return GapRequest(
        train,
        serve,
        file,
        Sampling(*(given[name] for name in ("samples", "temperature", "top_p", "max_new_tokens", "seed", "chat"))),
        GapOptions(
            *(
                given[name]
                for name in ("device", "dtype", "batch_size", "concurrency", "timeout", "retries", "logprobs")
            )
        ),
        confidence,
        gate,
        judge,
    )


def _check_numbers(given: dict[str, Any]) -> None:
    least = {
        "samples": 1,
        "max_new_tokens": 1,
        "batch_size": 1,
        "concurrency": 1,
        "limit": 1,
        "retries": 0,
        "logprobs": 0,
    }
    for name, low in least.items():
        if given[name] is not None and given[name] < low:
            raise TracefpError(f"--{name.replace('_', '-')} must be at least {low}, got {given[name]}")
    for name, good, what in (
        ("temperature", 0 <= given["temperature"] <= 100, "from 0 to 100"),
        ("top_p", 0 < given["top_p"] <= 1, "above 0 and at most 1"),
        ("timeout", 0 < given["timeout"] <= 86400, "above 0 and at most 86400"),
        ("chat", given["chat"] in ("auto", "on", "off"), "auto, on or off"),
        ("dtype", given["dtype"] in DTYPES, f"one of {', '.join(DTYPES)}"),
        ("device", given["device"] in DEVICES, f"one of {', '.join(DEVICES)}"),
    ):
        if not good:
            raise TracefpError(f"--{name.replace('_', '-')} must be {what}, got {given[name]}")


def _run(
    request: GapRequest, out: Path, *, dry_run: bool, resume: bool, overwrite: bool, recheck: bool, as_json: bool
) -> int:
    from tracefp4.gap.estimate import estimate, estimate_lines
    from tracefp4.gap.folder import SIDES, GapFolder
    from tracefp4.gap.gate import Verdict
    from tracefp4.gap.run import check_forms
    from tracefp4.gap.run import gap as run_gap

    if dry_run:
        check_forms(request)
    had = {side: GapFolder(out).answers(side) for side in SIDES} if resume and out.is_dir() else {}
    expected = estimate(request, had)
    if not (dry_run and as_json):
        for line in [*request.file.notices, *estimate_lines(expected)]:
            say(line, None if dry_run else sys.stderr)
    if dry_run:
        if as_json:
            print(json.dumps(expected, indent=2))
        return 0
    facts = run_gap(request, out, resume=resume, overwrite=overwrite, recheck=recheck)
    if as_json:
        print(json.dumps(facts, indent=2, sort_keys=True))
    else:
        for line in summary(facts, out):
            say(line)
    if facts["gate"]:
        return int(facts["gate"]["exit_code"])
    return 0 if facts["difference"] else int(Verdict.UNDECIDED)


def summary(facts: dict[str, Any], out: Path) -> list[str]:
    """The outcome in a few lines."""
    from tracefp4.gap.folder import GAP, REPORT, SIDES

    lines = []
    for side in SIDES:
        form = facts["forms"][side]
        if form["pass_rate"]:
            rate = form["pass_rate"]
            lines.append(
                f"{side} form: {100 * rate['value']:.1f} % pass [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"
                f"  {form['form']}"
            )
    if facts["difference"]:
        d, p = facts["difference"], facts["pairs"]
        lines.append(
            f"serve - train: {100 * d['value']:+.1f} points [{100 * d['low']:+.1f}, {100 * d['high']:+.1f}] at "
            f"{100 * facts['confidence']:g} % confidence, {d['inquiries']} inquiries; {p['lost']} lost, "
            f"{p['gained']} gained of {p['pairs']} pairs"
        )
    elif not facts["gate"]:
        lines.append("UNDECIDED: no inquiry has answers of both forms, so nothing is compared")
    if facts["distance"].get("tokens"):
        lines.append(
            f"mean |log p difference| {facts['distance']['mean_abs']:.3g} over {facts['distance']['tokens']} tokens"
        )
    if missing := facts["inquiries"]["missing"]:
        lack = "inquiry lacks" if missing == 1 else "inquiries lack"
        lines.append(
            f"{missing} {lack} an answer or its check{_most_frequent(facts)}; --resume asks again where that can help"
        )
    if facts["gate"]:
        lines.append(f"gate: {facts['gate']['verdict'].upper()}: {facts['gate']['reason']}")
    return [*lines, f"written: {out / REPORT} and {out / GAP}"]


def _most_frequent(facts: dict[str, Any]) -> str:
    """Why most of the answers or checks are missing."""
    reasons: Counter[str] = Counter()
    for form in facts["forms"].values():
        reasons.update(form["failures"])
        reasons.update(form["unchecked"])
    return "".join(f" ({reason}, {count} time{'s' * (count > 1)})" for reason, count in reasons.most_common(1))


def _as_user_error(error: TracefpError) -> TracefpError:
    error.exit_code = USER_ERROR
    return error
