"""From answers and marks to the content of gap.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from tracefp4.align.passrate import pass_rates
from tracefp4.gap.answers import Answer, Failure, Job, Key
from tracefp4.gap.distance import ALIKE, FORCED, alike, distance_figures
from tracefp4.gap.folder import SERVE, SIDES, TRAIN, GapFolder
from tracefp4.gap.gate import Passed, decide
from tracefp4.gap.inquiries import Inquiry
from tracefp4.gap.statistics import mcnemar, paired

if TYPE_CHECKING:
    from tracefp4.gap.checks import Mark
    from tracefp4.gap.run import GapRequest

Answers = dict[str, dict[Key, Answer | Failure]]
Marks = dict[str, "dict[Key, Mark]"]


def figures(request: GapRequest, folder: GapFolder) -> dict[str, Any]:
    """All that gap.json says of the outcome; "flips" holds the lines of flips.jsonl.

    Pass rates and the difference are over the inquiries all of whose answers are there and checked, in both forms; the
    others are counted as missing.
    """
    answers: Answers = {side: folder.answers(side) for side in SIDES}
    marks: Marks = {side: folder.marks(side) for side in SIDES}
    inquiries, k = request.file.inquiries, request.sampling.samples
    whole = [
        q for q in inquiries if all(_passed(marks, side, (q.id, s)) is not None for side in SIDES for s in range(k))
    ]
    passed: dict[str, Passed] = {
        side: np.array([[bool(marks[side][q.id, s].passed) for s in range(k)] for q in whole], dtype=bool).reshape(
            -1, k
        )
        for side in SIDES
    }
    missing = len(inquiries) - len(whole)
    found: dict[str, Any] = {
        "inquiries": {
            "file": request.file.path,
            "sha256": request.file.sha256,
            "asked": len(inquiries),
            "compared": len(whole),
            "missing": missing,
            "left_out": request.file.broken,
            "notices": request.file.notices,
            "checks": dict(Counter(spec.kind for q in inquiries for spec in q.checks)),
        },
        "confidence": request.confidence,
        "judge": None if request.judge is None else request.judge.text,
        "forms": {side: _form(request, folder, side, answers, marks, passed[side]) for side in SIDES},
        "difference": None,
        "pairs": None,
        "gate": None,
        "categories": _categories(whole, passed),
        "distance": _distance(folder, answers, request),
        "flips": _flips(whole, answers, marks, k),
    }
    if whole:
        found["difference"] = asdict(paired(passed[TRAIN], passed[SERVE], request.confidence))
        found["pairs"] = _pairs(whole, answers, passed)
    if request.gate is not None:
        decision = decide(request.gate, passed[TRAIN], passed[SERVE], missing)
        found["gate"] = asdict(request.gate) | {
            "verdict": decision.verdict.name.lower(),
            "exit_code": int(decision.verdict),
            "reason": decision.reason,
            "needed": decision.needed,
        }
    return found


def _passed(marks: Marks, side: str, key: Key) -> bool | None:
    mark = marks[side].get(key)
    return None if mark is None else mark.passed


def _form(
    request: GapRequest, folder: GapFolder, side: str, answers: Answers, marks: Marks, passed: Passed
) -> dict[str, Any]:
    """Figures of one form."""
    form = request.form(side)
    had = [a for a in answers[side].values() if isinstance(a, Answer)]
    failures = Counter(a.reason for a in answers[side].values() if isinstance(a, Failure))
    unmarked = Counter(m.note for m in marks[side].values() if m.passed is None)
    seconds, tokens = folder.seconds_and_tokens(side)
    latency = np.array([a.seconds for a in had]) if had else np.zeros(1)
    rate = pass_rates(passed.astype(np.float64), (1,), request.confidence).avg if len(passed) else None
    counted = [a.tokens for a in had if a.tokens is not None]
    return {
        "form": form.text,
        "describes": form.describes,
        "pass_rate": rate.as_dict() if rate else None,
        "passed": int(passed.sum()),
        "answers": len(had),
        "tokens_mean": float(np.mean(counted)) if counted else None,
        "characters_mean": float(np.mean([len(a.text) for a in had])) if had else None,
        "cut_at_limit": sum(a.finish == "length" for a in had),
        "empty": sum(not a.text.strip() for a in had),
        "tokens_per_second": tokens / seconds if seconds > 0 and tokens else None,
        "seconds_median": float(np.median(latency)),
        "seconds_p95": float(np.quantile(latency, 0.95)),
        "failures": dict(failures.most_common(20)),
        "unchecked": dict(unmarked.most_common(20)),
    }


def _pairs(whole: Sequence[Inquiry], answers: Answers, passed: dict[str, Passed]) -> dict[str, Any]:
    """Counts over pairs of answers under the same seed."""
    train, serve = passed[TRAIN], passed[SERVE]
    keys = [(q.id, s) for q in whole for s in range(train.shape[1])]
    same = sum(_text(answers, TRAIN, key) == _text(answers, SERVE, key) for key in keys)
    gained, lost = int((serve & ~train).sum()), int((train & ~serve).sum())
    return {
        "both_pass": int((train & serve).sum()),
        "lost": lost,
        "gained": gained,
        "both_fail": int((~train & ~serve).sum()),
        "same_text": same,
        "same_outcome": len(keys) - gained - lost,
        "pairs": len(keys),
        "mcnemar_p": mcnemar(gained, lost) if train.shape[1] == 1 else None,
    }


def _text(answers: Answers, side: str, key: Key) -> str:
    found = answers[side][key]
    assert isinstance(found, Answer)  # it has a mark
    return found.text


def _categories(whole: Sequence[Inquiry], passed: dict[str, Passed]) -> list[dict[str, Any]]:
    """Pass rates by category, in the order of the file; none where the file names none."""
    named = list(dict.fromkeys(q.category for q in whole))
    if named in ([], [""]):
        return []
    rows = []
    for category in named:
        chosen = np.array([q.category == category for q in whole])
        rates = {side: float(passed[side][chosen].mean()) for side in SIDES}
        rows.append({"category": category or "(none)", "inquiries": int(chosen.sum()), **rates})
    return rows


def _flips(whole: Sequence[Inquiry], answers: Answers, marks: Marks, k: int) -> list[dict[str, Any]]:
    """A line a pair whose outcome differs, lost ones first."""
    lines = []
    for q in whole:
        for sample in range(k):
            key = (q.id, sample)
            train, serve = marks[TRAIN][key], marks[SERVE][key]
            if train.passed == serve.passed:
                continue
            lines.append(
                {
                    "id": q.id,
                    "sample": sample,
                    "outcome": "lost" if train.passed else "gained",
                    "messages": list(q.messages),
                    "answer": list(q.answers),
                    "checks": [spec.text for spec in q.checks],
                    "train": {"text": _text(answers, TRAIN, key), "note": train.note},
                    "serve": {"text": _text(answers, SERVE, key), "note": serve.note},
                }
            )
    return sorted(lines, key=lambda line: line["outcome"] != "lost")


def _distance(folder: GapFolder, answers: Answers, request: GapRequest) -> dict[str, Any]:
    """Figures of log p(serve) - log p(train) by whose answers the tokens are from."""
    if not request.options.logprobs:
        return {"how": None}
    deltas: dict[str, list[list[float]]] = {}
    for side in SIDES:
        sign = 1 if side == TRAIN else -1  # other - own: serve - train on the training form's answers
        deltas[side] = [
            [sign * (b - a) for a, b in zip(line["own"], line["other"], strict=True)]
            for line in folder.scores(side).values()
        ]
    if any(deltas.values()):
        together = distance_figures([*deltas[TRAIN], *deltas[SERVE]])
        return {"how": FORCED, **together, "by_side": {side: distance_figures(deltas[side]) for side in SIDES}}
    shared = [_alike(answers, job) for job in request.jobs]
    return {"how": ALIKE, **distance_figures([one for one in shared if one])}


def _alike(answers: Answers, job: Job) -> list[float]:
    train, serve = answers[TRAIN].get(job.key), answers[SERVE].get(job.key)
    if not isinstance(train, Answer) or not isinstance(serve, Answer):
        return []
    a, b = alike(train, serve)
    return [y - x for x, y in zip(a, b, strict=False)]
