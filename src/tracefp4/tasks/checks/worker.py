"""The process of a check's worker: answers jobs from one pipe on another until the first is closed.

A reply is JSON ``[kind, value]``. Standard output goes to standard error, so prints do no harm.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import math
import numbers
import os
import pickle
import re
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1

Handler = Callable[[Any], Any]


class Refused(Exception):
    """A set-up that cannot work; the message is a sentence for the user."""


def main(job_fd: int, reply_fd: int, parent: int) -> NoReturn:
    """Reads a set-up, then jobs; ends when the pipe is closed or the parent is gone."""
    for fd in (job_fd, reply_fd):
        os.set_inheritable(fd, False)  # a user's subprocess must not keep them open
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    with open(job_fd, "rb") as jobs, open(reply_fd, "wb") as replies:
        setup = _next(jobs)
        try:
            handler = _MAKERS[setup["handler"]](setup["setup"])
        except Refused as error:
            _reply(replies, "raised", {"message": str(error)})
            os._exit(0)
        _reply(replies, "value", None)
        while (job := _next(jobs)) is not None:
            try:
                value = handler(job)
            except BaseException as error:
                _reply(replies, "raised", described(error))
            else:
                _reply(replies, "value", value)
    os._exit(0)


def _next(jobs: Any) -> Any:
    head = jobs.read(8)
    return pickle.loads(jobs.read(struct.unpack("<Q", head)[0])) if len(head) == 8 else None


def _reply(replies: Any, kind: str, value: Any) -> None:
    data = json.dumps([kind, value]).encode()
    replies.write(struct.pack("<Q", len(data)) + data)
    replies.flush()


def described(error: BaseException) -> dict[str, Any]:
    """Type, message and place of an exception, as JSON."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return {"type": type(error).__name__, "message": message, "trace": _frames(error.__traceback__)}


def _frames(tb: TracebackType | None) -> list[tuple[str, int]]:
    """File and line of every call, outermost first, without the worker's own and the import system's."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(tb)]
    return [(file, line) for file, line in frames if file not in (__file__, importlib.__file__) and file[:1] != "<"]


# Kind python


def load_function(name: str) -> Callable[..., Any]:
    """The function that ``path.py:function`` or ``package.module:function`` names.

    Raises:
        Refused: one sentence: no such file or module, the module does not import, no such function in it.
    """
    place, attribute = name.split(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    except Refused:
        raise
    except BaseException as error:
        told = described(error)
        where = f" ({Path(told['trace'][-1][0]).name}, line {told['trace'][-1][1]})" if told["trace"] else ""
        if isinstance(error, SyntaxError) and error.filename:
            where = f" ({Path(error.filename).name}, line {error.lineno})"
        raise Refused(
            f"the reward function {name} cannot be imported: {told['type']}: {' '.join(told['message'].split())}{where}"
        ) from None
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        what = "there is no" if function is None else "it is not callable:"
        raise Refused(
            f"the reward function {name} cannot be used: {what} {attribute} in {place}"
            + (f"; functions there: {', '.join(known[:8])}" if known else "")
        )
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise Refused(f"the reward function's file {path} does not exist (looked from {Path.cwd()})")
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours, as if it were run as a script
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # before it runs: dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> Any:
    sys.path.append(str(Path.cwd()))
    return importlib.import_module(name)


def _make_function(setup: dict[str, Any]) -> Handler:
    function = load_function(setup["function"])

    def handle(job: dict[str, Any]) -> Any:
        value = function(prompt=job["prompt"], response=job["response"])
        sys.stdout.flush()
        if isinstance(value, numbers.Real) or type(value).__name__ in ("bool", "bool_"):
            score = float(value)
            return {"score": score} if math.isfinite(score) else {"bad": repr(score)}
        shown = "None" if value is None else f"{type(value).__name__} {value!r}"
        return {"bad": shown[:100]}

    return handle


# Kind regex


def _make_regex(setup: dict[str, Any]) -> Handler:
    compiled = lru_cache(maxsize=1024)(re.compile)

    def handle(job: tuple[str, str]) -> bool:
        pattern, text = job
        return getattr(compiled(pattern), setup["match"])(text) is not None

    return handle


# Kind math


def _make_math(setup: dict[str, Any]) -> Handler:
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    # parsing_timeout and timeout_seconds of math-verify are alarms of this process; the pool's kill replaces them.
    def parsed(texts: tuple[str, ...]) -> list[Any]:
        for text in texts:
            found = parse(text, targets, fallback_mode="no_fallback", parsing_timeout=None)
            if found:
                return found
        return []

    reference = lru_cache(maxsize=4096)(parsed)

    def handle(job: dict[str, Any]) -> Any:
        gold = reference(tuple(job["gold"]))
        if not gold or job["answer"] is None:
            return bool(gold)
        answer = parsed(tuple(job["answer"]))
        return verify(gold, answer, float_rounding=setup["float_rounding"], timeout_seconds=None)

    return handle


_MAKERS: dict[str, Callable[[dict[str, Any]], Handler]] = {
    "python": _make_function,
    "regex": _make_regex,
    "math": _make_math,
}
