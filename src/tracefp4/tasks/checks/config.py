"""Settings of a check: the section ``check`` of a task."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tracefp4.config import StrictModel

Kind = Literal["math", "exact", "numeric", "regex", "python", "program"]
Where = Literal["auto", "whole", "last_line", "marker", "answer_tag", "boxed"]

KEYS: dict[str, tuple[Kind, ...]] = {
    "extract": ("math", "exact", "numeric", "regex"),
    "marker": ("math", "exact", "numeric", "regex"),
    "timeout": ("math", "regex", "python", "program"),
    "workers": ("math", "regex", "python", "program"),
    "casefold": ("exact",),
    "strip_punctuation": ("exact",),
    "rel_tol": ("numeric",),
    "abs_tol": ("numeric",),
    "percent": ("numeric",),
    "float_rounding": ("math",),
    "pattern": ("regex",),
    "match": ("regex",),
    "function": ("python",),
    "on_error": ("python",),
    "tests": ("program",),
    "partial_credit": ("program",),
    "isolation": ("program",),
    "memory_mb": ("program",),
    "output_kb": ("program",),
    "processes": ("program",),
    "file_kb": ("program",),
}
"""Which kinds a key belongs to; a key of another kind is refused, as it would do nothing."""

TIMEOUTS: dict[str, float] = {"math": 5.0, "regex": 1.0, "python": 10.0, "program": 10.0}


class CheckConfig(StrictModel):
    """How responses are checked. A key that the chosen kind does not have is an error.

    Raises:
        pydantic.ValidationError: an unknown key, a key of another kind, a value out of range, or ``function``
            missing with kind ``python``.
    """

    kind: Kind = "math"
    extract: Where = Field(default="auto", description="where in the response the answer is")
    marker: str = Field(default="####", min_length=1, description="what the answer follows, with extract = marker")
    timeout: float | None = Field(default=None, gt=0, le=3600, description="seconds of one check or program run")
    workers: int = Field(default=0, ge=0, le=1024, description="checks at a time; 0: as many as usable cores")

    casefold: bool = Field(default=False, description="upper and lower case are the same")
    strip_punctuation: bool = Field(default=False, description="punctuation around and within does not count")

    rel_tol: float = Field(default=1e-9, ge=0, lt=1, description="of the reference answer's size")
    abs_tol: float = Field(default=0.0, ge=0)
    percent: bool = Field(default=False, description="50% is 0.5; else the sign is ignored and it is 50")

    float_rounding: int = Field(default=6, ge=0, le=30, description="decimals to which floats are compared")

    pattern: str | None = Field(default=None, description="left out: the problem's answer is the pattern")
    match: Literal["fullmatch", "search"] = "fullmatch"

    function: str | None = Field(default=None, description="path.py:function or package.module:function")
    on_error: Literal["stop", "zero"] = "stop"

    tests: str | None = Field(
        default=None, description="field of the tests: a metadata key or answer; left out: metadata tests, else answer"
    )
    partial_credit: bool = Field(default=False, description="the share of passed tests instead of all or nothing")
    isolation: Literal["full", "weak"] = "full"
    memory_mb: int = Field(default=512, ge=64, description="of one program with all its processes")
    output_kb: int = Field(default=1024, ge=1)
    processes: int = Field(default=16, ge=4, le=4096, description="processes and threads of one program")
    file_kb: int = Field(default=16384, ge=64, description="size of a program's scratch folder")

    @model_validator(mode="after")
    def _keys_belong_to_the_kind(self) -> Self:
        for key in self.model_fields_set & KEYS.keys():
            if self.kind not in KEYS[key] and getattr(self, key) != type(self).model_fields[key].default:
                kinds = " or ".join(f'"{kind}"' for kind in KEYS[key])
                raise ValueError(f'{key} does nothing with kind = "{self.kind}"; it belongs to kind = {kinds}')
        if self.kind == "python" and not self.function:
            raise ValueError('kind = "python" needs the key function, e.g. function = "rewards.py:score"')
        if self.function and (self.function.count(":") != 1 or not all(self.function.split(":"))):
            raise ValueError(
                f"function must be written as path.py:function or package.module:function, got {self.function!r}"
            )
        return self

    @property
    def seconds(self) -> float:
        """``timeout``, or the default of the kind: math 5, regex 1, python and program 10."""
        return self.timeout if self.timeout is not None else TIMEOUTS[self.kind]
