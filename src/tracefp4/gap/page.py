"""The page of a deployment check: one HTML file in plain words, to be read, printed and signed.

Whatever models, files or servers wrote is escaped, and the page's own policy forbids scripts and requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from tracefp4.gap.distance import FORCED
from tracefp4.gap.folder import FLIPS, SERVE, SIDES, TRAIN
from tracefp4.gap.statistics import BOOTSTRAP, PER_INQUIRY, SCORE
from tracefp4.report.axes import linear_axis, number
from tracefp4.report.pages import render_page
from tracefp4.report.svg import tag

SHOWN_FLIPS = 100
LONGEST_TEXT = 6000
WIDTH, HEIGHT, LEFT, RIGHT = 360, 130, 18, 18

_METHODS = {
    SCORE: "score interval for paired proportions (Tango) with continuity correction",
    BOOTSTRAP: "bootstrap over inquiries, stretched for their number",
    PER_INQUIRY: "score interval that counts each inquiry once, since few inquiries differ; wider than needed",
}


def render(facts: dict[str, Any], flips: Sequence[dict[str, Any]]) -> str:
    """The page. facts: the content of a complete gap.json; flips: the lines of flips.jsonl."""
    forms, difference = facts["forms"], facts["difference"]
    return render_page(
        "gap.html",
        ("tracefp4.gap", "page_files"),
        style="gap.css",
        title="Deployment check",
        asked=_plural(facts["inquiries"]["asked"], "inquiry", "inquiries"),
        train=forms[TRAIN],
        serve=forms[SERVE],
        verdict=_verdict(facts),
        difference=difference,
        picture=_picture(facts) if difference else "",
        difference_sentence=_difference_sentence(facts) if difference else "",
        rates=_rates(facts) if difference else [],
        interval_note=_interval_note(facts) if difference else "",
        pairs=_pairs(facts) if difference else [],
        pairs_note=_pairs_note(facts) if difference else "",
        categories=[
            (c["category"], c["inquiries"], _percent(c[TRAIN]), _percent(c[SERVE])) for c in facts["categories"]
        ],
        flips=[_flip(flip, facts) for flip in flips[:SHOWN_FLIPS]],
        more_flips=f"{len(flips) - SHOWN_FLIPS} more are in {FLIPS}." if len(flips) > SHOWN_FLIPS else "",
        other=_other(facts),
        distance=_distance(facts["distance"]),
        missing=_missing(facts),
        how=_how(facts),
    )


# -- verdict and difference -------------------------------------------------------------------------------------------


def _verdict(facts: dict[str, Any]) -> dict[str, Any]:
    gate, found = facts["gate"], facts["inquiries"]
    left_out = []
    if found["missing"]:
        left_out = [
            f"Only {found['compared']:,} of {found['asked']:,} inquiries are compared: the others lack an answer or "
            "its check (see What is missing)."
        ]
    if gate is None and not found["compared"]:
        return {"kind": "undecided", "heading": "Open: no inquiry has answers of both forms", "sentences": left_out}
    if gate is None:
        return {
            "kind": "none",
            "heading": "Measured; no limit was set",
            "sentences": [
                "How large a drop is acceptable is for the reader to say (--max-drop makes it a limit).",
                *left_out,
            ],
        }
    heading = {
        "pass": "Passed: the serving form may be used",
        "fail": "Failed: the serving form loses more than is allowed",
        "undecided": "Open: the inquiries do not tell",
    }[gate["verdict"]]
    allowed = (
        f"Allowed: of 100 answers, at most {100 * gate['max_drop']:.3g} fewer right in the serving form. Confidence: "
        f"{_percent(gate['confidence'], 3)}."
    )
    reason = str(gate["reason"])
    sentences = [reason[0].upper() + reason[1:] + ".", allowed, *left_out]
    return {"kind": gate["verdict"], "heading": heading, "sentences": sentences}


def _difference_sentence(facts: dict[str, Any]) -> str:
    d = facts["difference"]
    return (
        f"Of 100 answers, the serving form gets {_fewer(d['value'])} right than the training form. With other "
        f"inquiries of this kind the figure would be from {_fewer(d['low'])} to {_fewer(d['high'])}, with "
        f"{_percent(facts['confidence'], 3)} confidence."
    )


def _fewer(difference: float) -> str:
    """'1.3 fewer', '0.5 more'."""
    return f"{abs(100 * difference):.1f} {'more' if difference > 0 else 'fewer'}"


def _rates(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    forms = [facts["forms"][side] for side in SIDES]
    intervals = [f"{_percent(f['pass_rate']['low'])} to {_percent(f['pass_rate']['high'])}" for f in forms]
    counts = [f"{f['passed']:,} of {facts['pairs']['pairs']:,}" for f in forms]
    return [
        ("right answers (they pass their check)", *counts),
        ("share", *(_percent(f["pass_rate"]["value"]) for f in forms)),
        ("with other inquiries", *intervals),
    ]


def _interval_note(facts: dict[str, Any]) -> str:
    d = facts["difference"]
    note = f"Interval of the difference: {_METHODS[d['method']]}."
    p = facts["pairs"]["mcnemar_p"]
    if p is not None:
        note += f" Exact McNemar test of no difference: p {'< 1e-12' if p < 1e-12 else f'= {number(p)}'}."
    return note


def _picture(facts: dict[str, Any]) -> Markup:
    """The interval of the difference, in points, with 0 and the allowed drop."""
    d, gate = facts["difference"], facts["gate"]
    low, value, high = (100 * d[key] for key in ("low", "value", "high"))
    limit = None if gate is None else -100 * gate["max_drop"]
    axis = linear_axis(np.array([low, high, 0.0, *([] if limit is None else [1.2 * limit])]), ticks=4)

    def x(point: float) -> float:
        return round(LEFT + float(axis.place(np.array([point]))[0]) * (WIDTH - LEFT - RIGHT), 1)

    middle, bottom = 52, 84
    parts = [
        tag("title", "Difference of right answers, serving form minus training form, of 100", id="interval-title"),
        tag("path", d=f"M{LEFT} {bottom}H{WIDTH - RIGHT}", class_="axis"),
        tag("path", d=f"M{x(0)} 24V{bottom}", class_="zero"),
    ]
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        parts.append(tag("path", d=f"M{x(tick)} {bottom}v4", class_="axis"))
        parts.append(tag("text", label, x=x(tick), y=bottom + 18, text_anchor="middle"))
    if limit is not None:
        anchor = "end" if x(limit) > WIDTH / 2 else "start"
        parts.append(tag("path", d=f"M{x(limit)} 20V{bottom}", class_="limit"))
        parts.append(tag("text", "allowed drop", x=x(limit), y=14, text_anchor=anchor, class_="limit"))
    parts += [
        tag("path", d=f"M{x(low)} {middle}H{x(high)}", class_="range"),
        tag("path", d=f"M{x(value)} {middle - 12}V{middle + 12}", class_="value"),
        tag("text", "right answers of 100, serving minus training", x=WIDTH // 2, y=HEIGHT - 8, text_anchor="middle"),
    ]
    return tag(
        "svg", *parts, class_="interval", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_labelledby="interval-title"
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def _pairs(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    p = facts["pairs"]
    rows = [
        ("right in both", "both_pass"),
        ("right in the training form only (lost)", "lost"),
        ("right in the serving form only (gained)", "gained"),
        ("wrong in both", "both_fail"),
        ("word for word the same answer", "same_text"),
    ]
    return [(text, f"{p[key]:,}", _percent(p[key] / p["pairs"])) for text, key in rows]


def _pairs_note(facts: dict[str, Any]) -> str:
    k = facts["settings"]["--samples"]
    note = "Counts of answer pairs to one inquiry"
    note += f" and seed, {k} for each inquiry." if k > 1 else "."
    return note + (
        " Lost and gained answers partly cancel: a small change of the numbers makes some answers right by chance "
        "and others wrong. The difference above is what remains."
    )


def _other(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    forms = [facts["forms"][side] for side in SIDES]
    rows = [
        ("mean length, tokens", [_or_dash(f["tokens_mean"], "{:.1f}") for f in forms]),
        ("mean length, characters", [_or_dash(f["characters_mean"], "{:.0f}") for f in forms]),
        ("cut off at the limit of tokens", [str(f["cut_at_limit"]) for f in forms]),
        ("empty answers", [str(f["empty"]) for f in forms]),
        ("tokens per second", [_or_dash(f["tokens_per_second"], "{:,.0f}") for f in forms]),
        (
            "seconds of an answer: middle, slowest 5\u00a0%",
            [f"{f['seconds_median']:.2f}, {f['seconds_p95']:.2f}" for f in forms],
        ),
        ("ran as", [_ran_as(facts["about"].get(side, {})) for side in SIDES]),
    ]
    return [(text, *cells) for text, cells in rows]


def _ran_as(about: dict[str, Any]) -> str:
    if "server" in about:
        return f"server, {about['concurrency']} requests at a time" + (
            f", {about['retried']} tried again" if about.get("retried") else ""
        )
    parts = [
        about.get("device", ""),
        about.get("dtype", ""),
        f"batches of {about['batch_size']}" if "batch_size" in about else "",
    ]
    rounded = about.get("rounded")
    if rounded:
        parts.append(f"{_percent(rounded['share_of_weights'])} of weights in 4 bits")
        if rounded["skipped"]:
            parts.append(f"{len(rounded['skipped'])} layers left as they are")
    return ", ".join(part for part in parts if part)


def _distance(found: dict[str, Any]) -> list[str]:
    if found["how"] is None:
        return []
    if not found.get("tokens"):
        return [f"Token by token the forms could not be compared: {found['reason']}."]
    how = "each form was given the other's answers" if found["how"] == FORCED else f"over {found['how']}"
    return [
        f"Token by token ({how}; {found['tokens']:,} tokens of {found['answers']:,} answers), the log-probability "
        f"differs by {number(found['mean_abs'])} on average and {number(found['p99_abs'])} at the top 1\u00a0%; for "
        f"{_percent(found['share_beyond_factor_2'])} of tokens the probability differs by more than a factor of 2."
    ]


def _missing(facts: dict[str, Any]) -> list[str]:
    lines = []
    found = facts["inquiries"]
    if found["missing"]:
        count = _plural(found["missing"], "inquiry is", "inquiries are")
        lines.append(
            f"{count} not compared, because an answer or its check is missing; neither counted as right nor as wrong."
        )
    for side, name in ((TRAIN, "Training"), (SERVE, "Serving")):
        form = facts["forms"][side]
        for what, reasons in (("no answer", form["failures"]), ("not checked", form["unchecked"])):
            lines += [
                f"{name} form, {what}, {_plural(count, 'time', 'times')}: {reason}" for reason, count in reasons.items()
            ]
    if found["left_out"]:
        lines.append(
            f"{_plural(len(found['left_out']), 'row', 'rows')} of the file could not be used and were left out:"
        )
        lines += found["left_out"][:20]
        if len(found["left_out"]) > 20:
            lines.append(f"and {len(found['left_out']) - 20} more, in gap.json")
    return [*lines, *found["notices"]]


def _how(facts: dict[str, Any]) -> list[tuple[str, str]]:
    s, versions, hardware = facts["settings"], facts["versions"], facts["hardware"]
    checks = ", ".join(f"{kind} ({count:,})" for kind, count in facts["inquiries"]["checks"].items())
    drawn = (
        "the likeliest token each time"
        if s["--temperature"] == 0
        else (f"drawn at temperature {s['--temperature']:g}, top-p {s['--top-p']:g}, seed {s['--seed']}")
    )
    rows = [
        ("inquiries", f"{facts['inquiries']['file']}, SHA-256 {facts['inquiries']['sha256'][:16]}"),
        ("checks", checks),
        ("answers", f"{s['--samples']} to each inquiry, {drawn}, at most {s['--max-new-tokens']} tokens"),
        ("judge", facts["judge"] or "none"),
        ("training form", f"{s['--train-form']}; weights {s['weights of --train-form'][:16]}"),
        ("serving form", f"{s['--serve-form']}; weights {s['weights of --serve-form'][:16]}"),
        ("command", facts["command"]),
        ("program", f"tracefp4 at commit {(facts['commit'] or 'unknown')[:12]}; " + _versions(versions)),
        ("machine", f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['gpu'] or 'no GPU'}"),
    ]
    return [row for row in rows if row != ("judge", "none")]


def _versions(versions: dict[str, Any]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers") if versions.get(name))


def _flip(flip: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    what = "Lost" if flip["outcome"] == "lost" else "Gained"
    sample = f", sample {flip['sample'] + 1}" if facts["settings"]["--samples"] > 1 else ""
    return {
        "outcome": flip["outcome"],
        "heading": f"{what}: {flip['id']}{sample}",
        "messages": [
            {"role": _ROLES.get(m["role"], m["role"]), "content": _cut(m["content"])} for m in flip["messages"]
        ],
        "expected": _expected(flip),
        **{side: {"text": _cut(flip[side]["text"]) or "(empty)", "note": _noted(flip[side]["note"])} for side in SIDES},
    }


_ROLES = {"user": "inquiry", "system": "instructions to the model", "assistant": "earlier answer", "tool": "tool"}


def _expected(flip: dict[str, Any]) -> str:
    lines = []
    for text in flip["checks"]:
        check = json.loads(text)
        keys = {name: value for name, value in check.items() if name not in ("kind", "rubric")}
        shown = check.get("rubric") or (json.dumps(keys, ensure_ascii=False) if keys else "")
        lines.append(f"{check['kind']}{': ' + shown if shown else ''}")
    if flip["answer"]:
        lines.append(" / ".join(flip["answer"]))
    return _cut("\n".join(lines))


def _noted(note: str) -> str:
    return f" ({note})" if note else ""


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... ({len(text):,} characters in all)"


def _percent(share: float, digits: int = 0) -> str:
    """'87.5 %'; with digits, as many significant ones: '95 %'."""
    return f"{100 * share:.{digits}g}\u00a0%" if digits else f"{100 * share:.1f}\u00a0%"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _plural(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
