"""The deployment check: answers of both forms, marks, log-probs, figures, page."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tracefp4.files import folder_lock, write_text_atomic
from tracefp4.gap.answers import Answer, Failure, Job, Key, Sampling
from tracefp4.gap.backends import Backend, Found, check_form, make_backend
from tracefp4.gap.checks import FILE_TELLS, ROW_TELLS, Markers, mark_all
from tracefp4.gap.endpoint import Endpoint
from tracefp4.gap.figures import figures
from tracefp4.gap.folder import FLIPS, GAP, REPORT, SCORES, SERVE, SIDES, TIMING, TRAIN, GapFolder
from tracefp4.gap.forms import EndpointForm, Form, LocalForm
from tracefp4.gap.gate import Gate
from tracefp4.gap.inquiries import Inquiry, InquiryFile
from tracefp4.gap.judge import JudgeMarker
from tracefp4.gap.page import render
from tracefp4.report import ensure_dir, progress, write_json_atomic
from tracefp4.report.provenance import checkpoint_fingerprint

MARKED_TOGETHER = 200
PILOT = 4


@dataclass(frozen=True)
class GapOptions:
    """How the forms are run; none of it changes what they are asked.

    batch_size: answers decoded together here. concurrency, timeout, retries: of endpoints. logprobs: answers of each
    form whose tokens are compared.
    """

    device: str = "auto"
    dtype: str = "auto"
    batch_size: int = 16
    concurrency: int = 8
    timeout: float = 120.0
    retries: int = 5
    logprobs: int = 200


@dataclass(frozen=True)
class GapRequest:
    """What is compared. confidence: of all intervals, a share; gate: None for none; judge: the judge model, if any."""

    train: Form
    serve: Form
    file: InquiryFile
    sampling: Sampling = field(default_factory=Sampling)
    options: GapOptions = field(default_factory=GapOptions)
    confidence: float = 0.95
    gate: Gate | None = None
    judge: EndpointForm | None = None

    def form(self, side: str) -> Form:
        return self.train if side == TRAIN else self.serve

    @property
    def jobs(self) -> list[Job]:
        return [Job(i, q.id, s) for i, q in enumerate(self.file.inquiries) for s in range(self.sampling.samples)]

    @property
    def scored(self) -> frozenset[Key]:
        """The answers whose tokens are compared, spread over the file."""
        jobs, limit = self.jobs, self.options.logprobs
        return frozenset(job.key for job in jobs[:: max(1, -(-len(jobs) // limit))]) if limit else frozenset()


def gap(
    request: GapRequest, out: str | Path, *, resume: bool = False, overwrite: bool = False, recheck: bool = False
) -> dict[str, Any]:
    """Runs the check, writes the folder ``out`` and returns the content of its gap.json.

    resume: go on with an interrupted check, asking again what failed; overwrite: replace it; recheck: mark all answers
    anew. Raises TracefpError for what the user can mend; answers that were had by then are kept.
    """
    out = Path(out)
    check_forms(request)
    check = _Check(request, out)
    try:
        with folder_lock(ensure_dir(out)), check.folder:
            return check.run(resume, overwrite, recheck)
    finally:
        check.markers.close()


def check_forms(request: GapRequest) -> None:
    """Raises TracefpError for what of either form, or of the judge, shows before anything is asked."""
    for side in SIDES:
        check_form(request.form(side), request.sampling, request.options)
    if request.judge is not None:
        request.judge.key()


class _Check:
    def __init__(self, request: GapRequest, out: Path) -> None:
        self.request, self.out = request, out
        self.inquiries: list[Inquiry] = request.file.inquiries
        self.scored = request.scored
        self.folder = GapFolder(out)
        self.about: dict[str, dict[str, Any]] = {}
        o = request.options
        judge = None if request.judge is None else Endpoint(request.judge, o.concurrency, o.timeout, o.retries)
        self.markers = Markers(None if judge is None else lambda spec: JudgeMarker(spec, judge))
        try:
            self._validate_checks()
        except BaseException:
            self.markers.close()
            raise

    def run(self, resume: bool, overwrite: bool, recheck: bool) -> dict[str, Any]:
        settings, checks = self._settings()
        facts = self.folder.open(settings, checks, resume, overwrite, recheck)
        self.about = facts.get("about", {})
        scored: set[str] = set()
        for side in SIDES:
            self._side(side, scored)
            facts["about"] = self.about
            write_json_atomic(self.out / GAP, facts)  # a resumed check may not load this form again
        if self._to_score(SERVE) and SERVE not in scored and self._can_score(TRAIN):
            self._score(TRAIN, self._backend(TRAIN))  # the training form comes back for the other's answers
        for side in SIDES:
            self._mark(side)
        facts |= figures(self.request, self.folder) | {"about": self.about, "complete": True}
        facts["distance"] = facts["distance"] | {"reason": self._why_no_distance(facts["distance"])}
        flips = facts.pop("flips")
        self.folder.replace(FLIPS, flips)
        self.folder.sync()  # gap.json must not be complete before they are
        write_json_atomic(self.out / GAP, facts)
        write_text_atomic(self.out / REPORT, render(facts, flips))
        return facts

    # -- before ------------------------------------------------------------------------------------------------------

    def _validate_checks(self) -> None:
        """What a check needs and an inquiry lacks shows before anything is asked."""
        by_spec: dict[Any, list[Inquiry]] = {}
        for inquiry in self.inquiries:
            for spec in inquiry.checks:
                by_spec.setdefault(spec, []).append(inquiry)
        for spec, inquiries in by_spec.items():
            marker = self.markers.of(spec)
            if spec.kind not in (*ROW_TELLS, *FILE_TELLS):  # these were tried as the file was read
                marker.validate([q.question for q in inquiries])

    def _settings(self) -> tuple[dict[str, Any], str]:
        """(what the answers depend on, a hash of what their marks depend on)."""
        r = self.request
        questions = [(q.id, list(q.messages)) for q in self.inquiries]
        checks = [(q.id, q.answers, [c.text for c in q.checks], q.fields) for q in self.inquiries]
        judge = None if r.judge is None else (r.judge.url, r.judge.model)
        settings: dict[str, Any] = {f"--{name.replace('_', '-')}": value for name, value in asdict(r.sampling).items()}
        settings |= {"--dtype": r.options.dtype, "questions": _digest(questions)}
        for side in SIDES:
            settings[f"--{side}-form"] = r.form(side).text
            settings[f"weights of --{side}-form"] = _weights(r.form(side))
        return settings, _digest([checks, judge])

    # -- answers -----------------------------------------------------------------------------------------------------

    def _side(self, side: str, scored: set[str]) -> None:
        """Answers what is missing of a side, and scores the other's answers while the form is loaded."""
        have = self.folder.answers(side)
        missing = {job.key for job in self.request.jobs if _open(have.get(job.key))}
        other = TRAIN if side == SERVE else SERVE
        scores = side == SERVE and self._can_score(side) and bool(self._to_score(other))
        if not missing and not scores:
            return
        backend = self._backend(side)
        if missing:
            self._answer(side, backend, missing)
        if scores:
            self._score(side, backend)
            scored.add(other)

    def _backend(self, side: str) -> Backend:
        r = self.request
        if all(isinstance(r.form(one), LocalForm) for one in SIDES):
            gc.collect()  # the other form's weights
        backend = make_backend(r.form(side), self.inquiries, r.sampling, r.options, self.scored)
        self.about[side] = self.about.get(side, {}) | backend.about
        return backend

    def _answer(self, side: str, backend: Backend, missing: set[Key]) -> None:
        # Batches of all jobs, not of those missing: a resumed check then decodes the very batches of an unbroken one.
        batches = [b for b in backend.batches(self.request.jobs) if any(job.key in missing for job in b)]
        total = sum(map(len, batches))
        label = f"{side} form"
        with progress(total, label, every=max(1, -(-total // 10)), unit="answer") as bar:
            failed = 0

            def keep(found: Found, seconds: float) -> None:
                nonlocal failed
                self.folder.add_answers(side, [(job.key, self._kept(job, answer)) for job, answer in found])
                failed += sum(isinstance(answer, Failure) for _, answer in found)
                for _ in found:
                    bar.step(**({"failed": failed} if failed else {}))

            for part in (batches[:PILOT], batches[PILOT:]):
                if part:
                    started = time.perf_counter()
                    tokens = self._tokens(side)
                    try:
                        backend.answer(part, keep)
                    finally:
                        line = {"side": side, "seconds": time.perf_counter() - started}
                        self.folder.append(TIMING, [line | {"tokens": self._tokens(side) - tokens}])
                    self.about[side] |= backend.about
                    self._mark(side)  # a check that is broken shows after the first answers, not after the last

    def _kept(self, job: Job, answer: Answer | Failure) -> Answer | Failure:
        return answer if isinstance(answer, Failure) or job.key in self.scored else answer.without_tokens()

    def _tokens(self, side: str) -> int:
        return sum(a.tokens or 0 for a in self.folder.answers(side).values() if isinstance(a, Answer))

    # -- marks -------------------------------------------------------------------------------------------------------

    def _mark(self, side: str) -> None:
        """Marks the answers of a side that have no mark yet."""
        have = self.folder.marks(side)
        answers = self.folder.answers(side)
        todo = [
            (job, answer)
            for job in self.request.jobs
            if isinstance(answer := answers.get(job.key), Answer)
            and ((mark := have.get(job.key)) is None or mark.passed is None)
        ]
        for start in range(0, len(todo), MARKED_TOGETHER):
            part = todo[start : start + MARKED_TOGETHER]
            items = [(self.inquiries[job.inquiry].question, self.inquiries[job.inquiry].checks) for job, _ in part]
            marks = mark_all(self.markers, items, [answer.text for _, answer in part])
            self.folder.add_marks(side, [(job.key, mark) for (job, _), mark in zip(part, marks, strict=True)])

    # -- log-probs ---------------------------------------------------------------------------------------------------

    def _to_score(self, side: str) -> list[tuple[Job, Answer]]:
        """Answers of a side that the other is to score and has not."""
        if not self.scored:
            return []
        answers, have = self.folder.answers(side), self.folder.scores(side)
        jobs = [job for job in self.request.jobs if job.key in self.scored and job.key not in have]
        return [(job, a) for job in jobs if isinstance(a := answers.get(job.key), Answer) and a.logprobs]

    def _can_score(self, side: str) -> bool:
        form = self.request.form(side)
        return not (isinstance(form, LocalForm) and form.kind == "engine")

    def _score(self, side: str, backend: Backend) -> None:
        """Scores the other side's answers under the form of ``side``."""
        other = TRAIN if side == SERVE else SERVE
        items = self._to_score(other)
        if not items:
            return
        with progress(
            len(items), f"log-probs by the {side} form", every=max(1, -(-len(items) // 4)), unit="answer"
        ) as bar:
            for job, ids, own, scored in backend.score(items):
                line = {"answers_of": other, "id": job.id, "sample": job.sample, "token_ids": ids, "own": own}
                self.folder.append(SCORES, [line | {"other": [round(value, 6) for value in scored]}])
                bar.step()

    def _why_no_distance(self, found: dict[str, Any]) -> str:
        if found.get("tokens") or not self.request.options.logprobs:
            return ""
        return "neither form gives log-probs of tokens that the other form knows"


def _open(found: Answer | Failure | None) -> bool:
    """Whether an answer is to be asked for: not had, or failed in a way that may pass."""
    return found is None or (isinstance(found, Failure) and not found.final)


def _weights(form: Form) -> str:
    """What names the weights: a hash; the model's name at an endpoint, whose weights cannot be seen."""
    if isinstance(form, EndpointForm):
        return form.model
    if form.kind != "gguf":
        return str(checkpoint_fingerprint(form.path)["sha256"])
    size, edge = form.path.stat().st_size, 1 << 20
    with form.path.open("rb") as file:
        head = file.read(edge)
        file.seek(max(0, size - edge))
        return hashlib.sha256(f"{size}".encode() + head + file.read()).hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
