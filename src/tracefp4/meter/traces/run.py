"""`tracefp4 meter traces`: from files to a result."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tracefp4.errors import TracefpError
from tracefp4.meter.findings import Finding, Verdict, number
from tracefp4.meter.traces.figures import Figures, measure
from tracefp4.meter.traces.layouts import Names
from tracefp4.meter.traces.pairing import ALIGNED, Pairs, pair_rows
from tracefp4.meter.traces.partial import partial
from tracefp4.meter.traces.patterns import STALE, VALUE_PATTERNS, broad
from tracefp4.meter.traces.reading import Table, read_table
from tracefp4.meter.traces.sampling import draw
from tracefp4.meter.traces.structure import examine

ALARM = 0.1
"""Mean |log-prob difference| above which published BF16 and FP8 runs are in trouble; the ceiling without a floor."""
SHOWN_ROWS = 20


@dataclass(frozen=True)
class TraceRequest:
    """train, rollout: files; rollout None where one file has both columns. floor: mean |delta| of a BF16 pair of the
    same model; the ceiling is ``band`` times it. names: fields to read. max_broken: share of lines that may be
    broken."""

    train: Path
    rollout: Path | None = None
    names: Names = field(default_factory=Names)
    floor: float | None = None
    band: float = 1.2
    max_broken: float = 0.01


@dataclass(frozen=True)
class TraceResult:
    """What ``meter.json`` holds of two traces."""

    request: TraceRequest
    figures: Figures
    as_given: dict[str, float] | None
    findings: tuple[Finding, ...]
    verdict: Verdict
    inputs: list[dict[str, Any]]
    pairing: dict[str, Any]
    misaligned: list[dict[str, Any]]
    notices: list[str]

    def as_dict(self) -> dict[str, Any]:
        f = self.figures
        return {
            "kind": "traces",
            "verdict": self.verdict.as_dict(),
            "findings": [finding.as_dict() for finding in self.findings],
            "metrics": f.metrics,
            "metrics_as_given": self.as_given,
            "tokens": f.tokens,
            "impossible_tokens": f.impossible,
            "undefined_tokens": f.undefined,
            "inputs": self.inputs,
            "pairing": self.pairing,
            "misaligned_rows": self.misaligned,
            "by_step": f.by_step,
            "by_position": f.by_position,
            "by_logprob": f.by_logprob,
            "histogram": f.histogram,
            "outliers": f.outliers,
            "notices": self.notices,
        }


def meter_traces(request: TraceRequest) -> TraceResult:
    """Reads, pairs, measures and names what it recognises.

    Raises TracefpError for files that cannot be read or have nothing in common.
    """
    _check(request)
    if request.rollout is None:
        a = b = read_table(request.train, request.names, ("train", "rollout"), request.max_broken)
    else:
        a = read_table(request.train, _only(request.names, "train"), ("train",), request.max_broken)
        b = read_table(request.rollout, _only(request.names, "rollout"), ("rollout",), request.max_broken)
    given = pair_rows(a, b)
    structure = examine(a, b, given)
    pairs = structure.pairs
    # Of two tokenizers not even the positions belong together.
    apart = structure.lost and structure.findings[-1].kind == "tokenizer"
    figures = Figures() if apart else measure(a, b, pairs)
    findings = [*structure.findings, *map(_undefined, figures.undefined)]
    if not figures.tokens and not findings:
        raise TracefpError(f"{a.path} and {b.path} have no token in common that both give a log-prob")
    if not structure.lost:
        findings += _value_findings(a, b, pairs, request)
    changed = bool(structure.findings) and not structure.lost
    return TraceResult(
        request=request,
        figures=figures,
        as_given=measure(a, b, _as_given(a, b, given), 0).metrics if changed else None,
        findings=tuple(findings),
        verdict=_verdict(request, figures, findings),
        inputs=[_input(table, side) for side, table in (("A", a), ("B", b))][: 1 if a is b else 2],
        pairing={
            "by": pairs.by,
            "pairs": len(pairs),
            "unmatched_a": pairs.unmatched_a,
            "unmatched_b": pairs.unmatched_b,
            "relations": _relations(pairs),
        },
        misaligned=_misaligned(a, b, given),
        notices=a.notices + (b.notices if b is not a else []) + _unmatched(pairs),
    )


def _check(request: TraceRequest) -> None:
    if request.floor is not None and not 0 < request.floor < math.inf:
        raise TracefpError(f"--floor must be above 0 and finite, got {request.floor:g}")
    if not 1 <= request.band < math.inf:
        raise TracefpError(f"--band must be at least 1 and finite, got {request.band:g}")
    if not 0 <= request.max_broken <= 1:
        raise TracefpError(f"--max-broken is a share between 0 and 1, got {request.max_broken:g}")


def _only(names: Names, role: str) -> Names:
    """Of two files each is asked for its own column."""
    if names.train is None and names.rollout is None:
        return names
    return Names(
        train=names.train if role == "train" else None,
        rollout=names.rollout if role == "rollout" else None,
        tokens=names.tokens,
        id=names.id,
        step=names.step,
    )


def _value_findings(a: Table, b: Table, pairs: Pairs, request: TraceRequest) -> list[Finding]:
    tokens = draw(a, b, pairs)
    if not tokens.rows:
        return []
    limit = ceiling(request)[0]
    stale = STALE.find(tokens)
    # A fault of some rows, seen over all of them, can look like a weaker one of all.
    part = None if stale is not None else partial(tokens, a, pairs, limit)
    if part is not None:
        return [part]
    named = next((found for pattern in VALUE_PATTERNS if (found := pattern.find(tokens)) is not None), None)
    first = named or stale or broad(tokens, limit)
    return [] if first is None else [first]


def _undefined(first: dict[str, Any]) -> Finding:
    """Of one side's log-probs that are no numbers."""
    side, count = first["side"], first["count"]
    plural = "s" * (count != 1)
    return Finding(
        "nan",
        f"{side} holds NaN",
        1.0,
        (
            f"{count:,} counted log-prob{plural} of {side} {'are' if plural else 'is'} no number (NaN or beyond any "
            f"log-prob), the first at position {first['position']} of line {first['line']}",
        ),
        "find the forward that overflows there, or write null for a position that is to be left out; figures "
        "here leave them out",
        {"side": side, "tokens": float(count)},
    )


def ceiling(request: TraceRequest) -> tuple[float, str]:
    """(largest mean |delta| that passes, where it comes from)."""
    if request.floor is None:
        return ALARM, "no floor was given: the level above which published runs are in trouble"
    return request.band * request.floor, f"{request.band:g} times the floor {number(request.floor)}"


def _verdict(request: TraceRequest, figures: Figures, findings: list[Finding]) -> Verdict:
    limit, source = ceiling(request)
    reasons = [finding.title for finding in findings]
    mean = figures.metrics.get("mismatch/logprob_abs_diff_mean", 0.0)
    if mean > limit:
        reasons.append(f"mean |log-prob difference| {number(mean)} exceeds {number(limit)}")
    if figures.impossible:
        plural = "s" * (figures.impossible != 1)
        reasons.append(
            f"{figures.impossible:,} sampled token{plural} at log-prob -inf on one side: an infinite distance"
        )
    return Verdict(not reasons, limit, source, tuple(reasons))


def _as_given(a: Table, b: Table, given: Pairs) -> Pairs:
    """Position by position from the first on, as a naive join has it."""
    zero = np.zeros(len(given), dtype=np.int64)
    length = np.minimum(np.diff(a.offsets)[given.a], np.diff(b.offsets)[given.b])
    return Pairs(given.a, given.b, zero, zero, length, given.by)


def _input(table: Table, side: str) -> dict[str, Any]:
    lengths = np.diff(table.offsets)
    steps = np.unique(table.step[table.step >= 0])
    return {
        "side": side,
        "file": table.path.name,
        "layouts": table.layouts,
        "rows": table.rows,
        "tokens": int(lengths.sum()),
        "masked_tokens": int((~table.mask).sum()),
        "broken_lines": table.broken,
        "steps": len(steps),
        "token_ids": table.tokens is not None,
        "ids": None not in table.ids,
        "columns": sorted(table.logprobs),
    }


def _relations(pairs: Pairs) -> dict[str, int]:
    if pairs.relation is None:
        return {}
    names, counts = np.unique(pairs.relation, return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}


def _misaligned(a: Table, b: Table, pairs: Pairs) -> list[dict[str, Any]]:
    """The first rows whose tokens or lengths do not fit as they were paired."""
    lengths_a, lengths_b = np.diff(a.offsets)[pairs.a], np.diff(b.offsets)[pairs.b]
    wrong = lengths_a != lengths_b if pairs.relation is None else pairs.relation != "equal"
    out = []
    for i in np.flatnonzero(wrong)[:SHOWN_ROWS].tolist():
        out.append(
            {
                "line_a": int(a.line[pairs.a[i]]),
                "line_b": int(b.line[pairs.b[i]]),
                "id": a.ids[pairs.a[i]],
                "tokens_a": int(lengths_a[i]),
                "tokens_b": int(lengths_b[i]),
                "relation": "other length" if pairs.relation is None else _relation_words(str(pairs.relation[i])),
                "usable": bool(pairs.relation is None or pairs.relation[i] in ALIGNED),
            }
        )
    return out


def _relation_words(relation: str) -> str:
    return {
        "front a": "A has more tokens before",
        "front b": "B has more tokens before",
        "tail a": "A has more tokens after",
        "tail b": "B has more tokens after",
        "ids ahead a": "ids of A are one ahead",
        "ids ahead b": "ids of B are one ahead",
        "diverge": "begin alike, then differ",
        "differ": "differ from the first token on",
    }.get(relation, relation)


def _unmatched(pairs: Pairs) -> list[str]:
    out = []
    for side, count in (("A", pairs.unmatched_a), ("B", pairs.unmatched_b)):
        if count:
            out.append(f"{count} row{'s' * (count != 1)} of {side} without a partner, paired by {pairs.by}")
    return out
