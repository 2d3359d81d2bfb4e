"""What a check will ask for, before it asks: requests, tokens, money, and how many inquiries its gate needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracefp4.gap.answers import Answer, Job
from tracefp4.gap.checks import JudgeConfig
from tracefp4.gap.folder import SIDES
from tracefp4.gap.forms import EndpointForm
from tracefp4.gap.judge import MAX_TOKENS
from tracefp4.gap.run import GapRequest
from tracefp4.gap.statistics import planned_inquiries

CHARACTERS_PER_TOKEN = 4
FLIPS = (0.0, 0.05, 0.1)
"""Shares of outcomes that flip by chance for which the gate's number of inquiries is given."""


def estimate(request: GapRequest, had: dict[str, dict[Any, Any]]) -> dict[str, Any]:
    """Upper bounds of what is still to be done; had: answers of each side so far.

    Input tokens are estimated at four characters each; output tokens are the limit times the answers, and a judge's
    its own limit. "cost" is None where a price is unknown.
    """
    sides = {side: _side(request, side, _open_jobs(request, had.get(side, {}))) for side in SIDES}
    judged = [
        (len(q.text), len(spec.config.rubric))
        for q in request.file.inquiries
        for spec in q.checks
        if isinstance(spec.config, JudgeConfig)
    ]
    judge = None
    if judged and request.judge is not None:
        calls = 2 * request.sampling.samples * len(judged)
        read = sum(q + r + 700 for q, r in judged) * 2 * request.sampling.samples // CHARACTERS_PER_TOKEN
        read += calls * request.sampling.max_new_tokens
        judge = _priced(request.judge, calls, read, calls * MAX_TOKENS)
    plan = None
    if request.gate is not None:
        plan = {
            f"{flips:g}": planned_inquiries(request.gate.max_drop, request.gate.confidence, flips) for flips in FLIPS
        }
    return {
        "inquiries": len(request.file.inquiries),
        "samples": request.sampling.samples,
        "sides": sides,
        "judge": judge,
        "inquiries_to_pass": plan,
    }


def _open_jobs(request: GapRequest, had: dict[Any, Any]) -> list[Job]:
    return [job for job in request.jobs if not isinstance(had.get(job.key), Answer)]


def _side(request: GapRequest, side: str, jobs: Sequence[Job]) -> dict[str, Any]:
    form = request.form(side)
    read = sum(len(request.file.inquiries[job.inquiry].text) for job in jobs) // CHARACTERS_PER_TOKEN
    written = len(jobs) * request.sampling.max_new_tokens
    if isinstance(form, EndpointForm):
        return _priced(form, len(jobs), read, written)
    return {
        "form": form.text,
        "answers": len(jobs),
        "requests": 0,
        "tokens_in": read,
        "tokens_out_at_most": written,
        "cost": 0.0,
    }


def _priced(form: EndpointForm, calls: int, read: int, written: int) -> dict[str, Any]:
    known = form.price_in is not None and form.price_out is not None
    cost = ((form.price_in or 0) * read + (form.price_out or 0) * written) / 1e6 if known else None
    return {
        "form": form.text,
        "answers": calls,
        "requests": calls,
        "tokens_in": read,
        "tokens_out_at_most": written,
        "cost": cost,
    }


def estimate_lines(found: dict[str, Any]) -> list[str]:
    """The estimate as lines to print."""
    samples = found["samples"]
    lines = [f"{found['inquiries']:,} inquiries, {samples} answer{'s' * (samples > 1)} to each by each form"]
    for name, part in [(f"{side} form", found["sides"][side]) for side in SIDES] + [("judge", found["judge"])]:
        if part is None:
            continue
        if not part["answers"]:
            lines.append(f"{name}: all answers are there ({part['form']})")
            continue
        thing = "request" if part["requests"] else "answer"
        what = f"{part['answers']:,} {thing}{'s' * (part['answers'] != 1)}" + " to decode here" * (thing == "answer")
        line = (
            f"{name}: {what}, about {part['tokens_in']:,} tokens in, at most {part['tokens_out_at_most']:,} out"
            f" ({part['form']})"
        )
        if part["requests"]:
            line += ", cost unknown (price_in, price_out)" if part["cost"] is None else f", at most {part['cost']:,.2f}"
        lines.append(line)
    if found["inquiries_to_pass"]:
        numbers = ", ".join(
            f"{count:,} if {100 * float(flips):g} %" if count else f"more than any if {100 * float(flips):g} %"
            for flips, count in found["inquiries_to_pass"].items()
        )
        lines.append(
            f"to pass (80 % of the time) with nothing lost, the gate needs about {numbers} of outcomes flip by chance"
        )
    return lines
