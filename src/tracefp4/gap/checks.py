"""What decides whether an answer passes: the checks of tasks, and four kinds that only inquiries have.

Kinds and keys are in docs/gap.md. Checks that a task has too run through ``tracefp4.tasks.checks``, in workers and
sandbox of their own; patterns and schemas travel with the inquiry: a file of a thousand patterns needs one pool.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from tracefp4.config import StrictModel, did_you_mean
from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks import Check, CheckConfig, CheckError, make_check

KINDS = (
    "exact",
    "normalized",
    "contains",
    "numeric",
    "math",
    "regex",
    "json_schema",
    "program",
    "python",
    "command",
    "judge",
)
RUNS_CODE = ("python", "command")
ROW_TELLS = ("exact", "normalized", "numeric", "regex")
"""Kinds whose reference is tried as its row is read: it takes no worker."""
FILE_TELLS = ("math", "program")
"""Kinds whose references are tried together once the file is read: they take workers or the sandbox."""
NEEDS_ANSWER = ("exact", "normalized", "contains", "numeric", "math")


class ContainsConfig(StrictModel):
    """mode: every text of the answer occurs, any, or none."""

    mode: Literal["all", "any", "none"] = "all"
    casefold: bool = True


class SchemaConfig(StrictModel):
    """schema: a JSON Schema, or true for any JSON value."""

    schema_: dict[str, Any] | bool = Field(alias="schema")

    @field_validator("schema_")
    @classmethod
    def _is_a_schema(cls, value: dict[str, Any] | bool) -> dict[str, Any] | bool:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for

        try:
            validator_for(value).check_schema(value)
        except SchemaError as error:
            raise ValueError(f"is no JSON Schema: {error.message}") from None
        return value


class CommandConfig(StrictModel):
    """command: a program and its arguments, run without a shell; timeout: seconds."""

    command: list[str] = Field(min_length=1)
    timeout: float = Field(default=30.0, gt=0, le=3600)

    @model_validator(mode="before")
    @classmethod
    def _split(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("command"), str):
            return {**data, "command": shlex.split(data["command"])}
        return data


class JudgeConfig(StrictModel):
    """rubric: what an answer must do, in words for the judge model."""

    rubric: str = Field(min_length=1)


@dataclass(frozen=True)
class CheckSpec:
    """One check of an inquiry. text: its canonical JSON, by which equal checks are one; config: of its kind.

    pass_at: the score of kind ``python`` from which an answer passes.
    """

    kind: str
    text: str
    config: BaseModel
    pass_at: float = 1.0

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckSpec) and other.text == self.text

    @classmethod
    def parse(cls, raw: Any) -> Self:
        """From the name of a kind or an object with ``kind`` and keys. Raises TracefpError saying what is wrong."""
        keys = {"kind": raw} if isinstance(raw, str) else raw
        if not isinstance(keys, dict) or not isinstance(keys.get("kind"), str):
            raise TracefpError(f'check must be the name of a kind or an object with "kind", got {json.dumps(raw)[:80]}')
        keys = {name: value for name, value in keys.items() if value is not None}  # Parquet fills structs with null
        kind = keys["kind"]
        if kind not in KINDS:
            raise TracefpError(f"unknown check {kind!r}{did_you_mean(kind, list(KINDS))}")
        text = json.dumps(keys, sort_keys=True)
        own = {name: value for name, value in keys.items() if name not in ("kind", "pass_at")}
        if "pass_at" in keys and kind != "python":
            raise TracefpError(f"check {kind}: pass_at belongs to kind python")
        try:
            pass_at = float(keys.get("pass_at", 1.0))
            return cls(kind, text, _config(kind, own), pass_at)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"] if part != "schema_")
            message = first["msg"].removeprefix("Value error, ")
            if first["type"] == "extra_forbidden":
                config = _OWN_CONFIGS.get(kind, CheckConfig)
                known = [field.alias or key for key, field in config.model_fields.items() if key != "kind"]
                message = f"unknown key{did_you_mean(name, known)}"
            raise TracefpError(
                f"check {kind}{f', {name}' if name else ''}: {message[0].lower()}{message[1:]}"
            ) from None
        except (ValueError, TypeError) as error:
            raise TracefpError(f"check {kind}: {error}") from None


_OWN_CONFIGS: dict[str, type[StrictModel]] = {
    "contains": ContainsConfig,
    "json_schema": SchemaConfig,
    "command": CommandConfig,
    "judge": JudgeConfig,
}


def _config(kind: str, keys: dict[str, Any]) -> BaseModel:
    if kind in _OWN_CONFIGS:
        return _OWN_CONFIGS[kind](**keys)
    if kind in ("exact", "normalized"):
        loose = {"casefold": True, "strip_punctuation": True} if kind == "normalized" else {}
        return CheckConfig(**{"kind": "exact", "extract": "whole", **loose, **keys})
    if kind == "regex":
        config = CheckConfig(**{"kind": "regex", "match": "search", **keys})
        try:
            re.compile(config.pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern {config.pattern!r} is no regular expression: {error}") from None
        return config
    return CheckConfig(kind=kind, **keys)


def needs_answer(spec: CheckSpec) -> bool:
    """Whether an inquiry with this check must have an ``answer``."""
    return spec.kind in NEEDS_ANSWER or (spec.kind == "regex" and getattr(spec.config, "pattern", None) is None)


@dataclass(frozen=True)
class Question:
    """What a check sees of an inquiry; the answer under test comes beside it.

    answers: accepted references. fields: the row's other fields.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    fields: dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """passed is None where the check could not be made (a judge that does not answer); note says why."""

    passed: bool | None
    note: str = ""


class Marker:
    """Marks answers by one check. Close it: it may hold worker processes."""

    def mark(self, questions: Sequence[Question], responses: Sequence[str]) -> list[Mark]:
        """One mark a response, in order. Raises TracefpError where the check itself is broken."""
        raise NotImplementedError

    def validate(self, questions: Sequence[Question]) -> None:
        """Raises TracefpError naming the first inquiry that this check cannot use."""
        return

    def refusals(self, questions: Sequence[Question]) -> list[str]:
        """Of each inquiry why this check cannot use it, "" where it can."""
        return [""] * len(questions)

    def close(self) -> None:
        return


class TaskMarker(Marker):
    """A check of tracefp4.tasks.checks; of several accepted answers any may match."""

    def __init__(self, spec: CheckSpec) -> None:
        assert isinstance(spec.config, CheckConfig)
        self.pattern = spec.config.pattern
        self.pass_at = spec.pass_at
        config = spec.config.model_copy(update={"pattern": None}) if self.pattern else spec.config
        self.check: Check = make_check(config)

    def mark(self, questions: Sequence[Question], responses: Sequence[str]) -> list[Mark]:
        pairs = [(i, p) for i, q in enumerate(questions) for p in self._prompts(q)]
        scores = self.check.score_batch([p for _, p in pairs], [responses[i] for i, _ in pairs])
        best = [float("-inf")] * len(questions)
        for (i, _), score in zip(pairs, scores, strict=True):
            best[i] = max(best[i], score)
        return [Mark(score >= self.pass_at) for score in best]

    def validate(self, questions: Sequence[Question]) -> None:
        self.check.validate([p for q in questions for p in self._prompts(q)])

    def refusals(self, questions: Sequence[Question]) -> list[str]:
        pairs = [(i, p) for i, q in enumerate(questions) for p in self._prompts(q)]
        found = [""] * len(questions)
        for (i, _), why in zip(pairs, self.check.refusals([p for _, p in pairs]), strict=True):
            found[i] = found[i] or why
        return found

    def close(self) -> None:
        self.check.close()

    def _prompts(self, question: Question) -> list[Prompt]:
        answers = (self.pattern,) if self.pattern else question.answers or ("",)
        return [Prompt(question.id, question.text, answer, question.fields) for answer in answers]


class ContainsMarker(Marker):
    """Substrings, white space folded."""

    def __init__(self, spec: CheckSpec) -> None:
        assert isinstance(spec.config, ContainsConfig)
        self.config = spec.config

    def mark(self, questions: Sequence[Question], responses: Sequence[str]) -> list[Mark]:
        marks = []
        for question, response in zip(questions, responses, strict=True):
            text = self._folded(response)
            found = [self._folded(answer) in text for answer in question.answers]
            mode = self.config.mode
            passed = all(found) if mode == "all" else any(found) == (mode == "any")
            absent = [a for a, there in zip(question.answers, found, strict=True) if there == (mode == "none")]
            marks.append(Mark(passed, "" if passed else f"{'has' if mode == 'none' else 'lacks'} {', '.join(absent)}"))
        return marks

    def _folded(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self.config.casefold else text


class SchemaMarker(Marker):
    """JSON schemas, in worker processes: a pattern in a schema may backtrack for ever."""

    def __init__(self) -> None:
        config = CheckConfig(kind="python", function="tracefp4.gap.schema:score", on_error="zero", timeout=10)
        self.check = make_check(config)
        self.schemas: dict[str, Any] = {}

    def mark_with(self, schema: Any, questions: Sequence[Question], responses: Sequence[str]) -> list[Mark]:
        prompts = [Prompt(q.id, "", "", {"schema": schema}) for q in questions]
        return [Mark(score >= 1) for score in self.check.score_batch(prompts, responses)]

    def close(self) -> None:
        self.check.close()


class _OneSchema(Marker):
    """A schema in the pool that all schemas share."""

    def __init__(self, spec: CheckSpec, pool: SchemaMarker) -> None:
        assert isinstance(spec.config, SchemaConfig)
        self.schema, self.pool = spec.config.schema_, pool

    def mark(self, questions: Sequence[Question], responses: Sequence[str]) -> list[Mark]:
        return self.pool.mark_with(self.schema, questions, responses)


class Markers:
    """The checks of all inquiries, made once each; closes them all.

    judge: what makes a marker of kind ``judge``, where there is a judge model.
    """

    def __init__(self, judge: Any = None) -> None:
        self._judge = judge
        self._made: dict[str, Marker] = {}
        self._schemas: SchemaMarker | None = None

    def of(self, spec: CheckSpec) -> Marker:
        key = spec.text
        if isinstance(spec.config, CheckConfig) and spec.config.pattern:  # the pattern travels with the inquiry
            return self._pattern(spec)
        if key not in self._made:
            self._made[key] = self._make(spec)
        return self._made[key]

    def close(self) -> None:
        for marker in [*self._made.values(), *([self._schemas] if self._schemas else [])]:
            marker.close()
        self._made, self._schemas = {}, None

    def _make(self, spec: CheckSpec) -> Marker:
        if spec.kind == "contains":
            return ContainsMarker(spec)
        if spec.kind == "json_schema":
            self._schemas = self._schemas or SchemaMarker()
            return _OneSchema(spec, self._schemas)
        if spec.kind == "command":
            from tracefp4.gap.command import CommandMarker

            return CommandMarker(spec)
        if spec.kind == "judge":
            if self._judge is None:
                raise TracefpError(
                    "the inquiries have checks of kind judge: name the judge model with --judge ENDPOINT"
                )
            marker: Marker = self._judge(spec)
            return marker
        return TaskMarker(spec)

    def _pattern(self, spec: CheckSpec) -> Marker:
        """A marker that shares the worker pool of all patterns with the same other keys."""
        assert isinstance(spec.config, CheckConfig)
        bare = spec.config.model_copy(update={"pattern": None})
        key = "regex " + bare.model_dump_json()
        if key not in self._made:
            self._made[key] = TaskMarker(CheckSpec("regex", key, bare))
        shared = self._made[key]
        assert isinstance(shared, TaskMarker)
        return _OnePattern(shared, str(spec.config.pattern))


class _OnePattern(Marker):
    def __init__(self, shared: TaskMarker, pattern: str) -> None:
        self.shared, self.pattern = shared, pattern

    def mark(self, questions: Sequence[Question], responses: Sequence[str]) -> list[Mark]:
        return self.shared.mark([self._with(q) for q in questions], responses)

    def validate(self, questions: Sequence[Question]) -> None:
        self.shared.validate([self._with(q) for q in questions])

    def _with(self, question: Question) -> Question:
        return Question(question.id, question.text, (self.pattern,), question.fields)


def mark_all(
    markers: Markers, items: Sequence[tuple[Question, Sequence[CheckSpec]]], responses: Sequence[str]
) -> list[Mark]:
    """One mark a response: passed where every check of its inquiry passes, unknown where one is unknown and none fails.

    Raises TracefpError where a check is broken.
    """
    by_spec: dict[CheckSpec, list[int]] = {}
    for i, (_, specs) in enumerate(items):
        for spec in specs:
            by_spec.setdefault(spec, []).append(i)
    found: list[list[Mark]] = [[] for _ in items]
    for spec, indices in by_spec.items():
        marks = markers.of(spec).mark([items[i][0] for i in indices], [responses[i] for i in indices])
        for i, mark in zip(indices, marks, strict=True):
            found[i].append(mark if mark.note or mark.passed else Mark(mark.passed, f"fails {spec.kind}"))
    return [_joined(marks) for marks in found]


def _joined(marks: Sequence[Mark]) -> Mark:
    failed = [m for m in marks if m.passed is False]
    unknown = [m for m in marks if m.passed is None]
    if failed:
        return Mark(False, "; ".join(m.note for m in failed))
    if unknown:
        return Mark(None, "; ".join(m.note for m in unknown))
    return Mark(True, "; ".join(m.note for m in marks if m.note))


__all__ = ["KINDS", "CheckError", "CheckSpec", "Mark", "Marker", "Markers", "Question", "mark_all", "needs_answer"]
