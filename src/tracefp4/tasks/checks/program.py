"""Kind ``program``: the response's program passes the problem's tests, in the sandbox.

Tests are a list, or JSON text of one: ``{"input": ..., "output": ...}`` cases for standard input and output, or
pieces of test code that fail by raising; test code may also be one text.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks.base import Check, CheckError
from tracefp4.tasks.checks.config import CheckConfig
from tracefp4.tasks.checks.pool import OrderedPool
from tracefp4.tasks.sandbox import ProgramResult, SandboxLimits, require_sandbox, run_program, run_tests

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "py", "python3")


@dataclass(frozen=True)
class Tests:
    """A problem's tests: cases of standard input and expected output, or pieces of test code; one of both is empty."""

    cases: tuple[tuple[str, str], ...] = ()
    code: tuple[str, ...] = ()


class ProgramCheck(Check):
    """1.0 where every test passes, else 0.0; with ``partial_credit`` the share of tests that pass.

    Raises:
        TracefpError: this machine cannot isolate programs and ``isolation`` is not ``weak``.
    """

    COUNTS: ClassVar[tuple[str, ...]] = ("timeouts", "errors", "limits")

    def __init__(self, config: CheckConfig) -> None:
        super().__init__(config)
        require_sandbox(config.isolation)
        self._limits = SandboxLimits(
            config.seconds, config.memory_mb, config.output_kb, config.processes, config.file_kb
        )
        self._pool = OrderedPool(config.workers, "program")
        self._stop = threading.Event()

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self.tests_of(prompt)

    def score_batch(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        if self._stop.is_set():
            raise CheckError("this check is closed")
        jobs = [(self.tests_of(p), program_in(text)) for p, text in zip(prompts, responses, strict=True)]
        try:
            results = self._pool.map(self._score, jobs)
        except BaseException:
            self.close()  # e.g. Ctrl-C: nobody waits for the programs that still run
            raise
        for _, counted in results:
            self.counts.update(counted)
        return [score for score, _ in results]

    def close(self) -> None:
        self._stop.set()
        self._pool.close()

    def tests_of(self, prompt: Prompt) -> Tests:
        """The problem's tests; CheckError names the problem where it has none that can be run."""
        field = self.config.tests or ("tests" if "tests" in prompt.metadata else "answer")
        if field != "answer" and field not in prompt.metadata:
            raise CheckError(f"problem {prompt.id} has no field {field!r} for its tests (check.tests)")
        raw = prompt.answer if field == "answer" else prompt.metadata[field]
        try:
            return parse_tests(raw, prompt.metadata.get("entry_point"))
        except ValueError as error:
            raise CheckError(f"the tests of problem {prompt.id} (field {field!r}) cannot be used: {error}") from None

    def _score(self, job: tuple[Tests, str]) -> tuple[float, Counter[str]]:
        tests, program = job
        counted: Counter[str] = Counter()
        if tests.code:
            passed = self._run_code(tests.code, program, counted)
        else:
            passed = self._run_cases(tests.cases, program, counted)
        if self.config.partial_credit:
            return sum(passed) / len(passed), counted
        return float(all(passed)), counted

    def _run_code(self, code: tuple[str, ...], program: str, counted: Counter[str]) -> list[bool]:
        result, passed = run_tests(program, list(code), self._limits, self.config.isolation, self._stop)
        _count(result, counted)
        return passed

    def _run_cases(self, cases: tuple[tuple[str, str], ...], program: str, counted: Counter[str]) -> list[bool]:
        passed: list[bool] = []
        for given, expected in cases:
            result = run_program(program, given, self._limits, self.config.isolation, self._stop)
            _count(result, counted)
            passed.append(result.status == "ok" and same_output(result.stdout, expected))
            if not passed[-1] and not self.config.partial_credit:
                break  # the reward is 0 already
        return passed


def _count(result: ProgramResult, counted: Counter[str]) -> None:
    names = {"timeout": "timeouts", "error": "errors", "killed": "errors", "memory": "limits", "output": "limits"}
    if result.status in names:
        counted[names[result.status]] += 1


def program_in(response: str) -> str:
    """The last fenced block of Python, else the last fenced block, else the whole response.

    A last fence that is never closed reaches to the end.
    """
    blocks = [(found[1].lower(), found[2]) for found in _FENCE.finditer(response)]
    python = [text for language, text in blocks if language in _PYTHON]
    if python:
        return python[-1]
    return blocks[-1][1] if blocks else response


def same_output(written: str, expected: str) -> bool:
    """Equal lines, apart from white space at their ends and blank lines at the end of the text."""
    return _lines(written) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def parse_tests(raw: Any, entry_point: Any = None) -> Tests:
    """Reads a test field.

    ``entry_point`` names the program's function for test code that defines ``check(candidate)`` and leaves the call
    of it to the reader.

    Raises:
        ValueError: it holds no tests, or they are neither cases nor Python.
    """
    if isinstance(raw, str) and raw.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(json.JSONDecodeError):  # test code may start with a bracket
            raw = json.loads(raw)
    if isinstance(raw, dict):
        raw = [raw]
    pieces = [raw] if isinstance(raw, str) else raw
    if not isinstance(pieces, list | tuple) or not pieces:
        raise ValueError("expected a list of input and output cases, or test code")
    if all(isinstance(piece, dict) for piece in pieces):
        return Tests(cases=tuple(_case(number, piece) for number, piece in enumerate(pieces)))
    if not all(isinstance(piece, str) for piece in pieces):
        raise ValueError("a list of tests holds either input and output cases, or texts")
    for number, piece in enumerate(pieces):
        try:
            compile(piece, "<test>", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"test {number} is no Python: {error}") from None
        if not piece.strip():
            raise ValueError(f"test {number} is empty")
    if isinstance(entry_point, str) and any(re.search(r"^def check\(", piece, re.MULTILINE) for piece in pieces):
        pieces = [f"{piece}\ncheck({entry_point})\n" for piece in pieces]
    return Tests(code=tuple(pieces))


def _case(number: int, piece: dict[str, Any]) -> tuple[str, str]:
    for key in ("input", "output"):
        if not isinstance(piece.get(key), str):
            raise ValueError(f"case {number} needs the text {key!r}, got {piece.get(key)!r}")
    return piece["input"], piece["output"]
