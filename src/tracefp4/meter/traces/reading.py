"""From a file of lines to columns on disk: any number of lines in bounded memory.

Tokens and log-probs go to temporary files as they are read; what stays in memory is about 200 bytes a line.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from tracefp4.errors import TracefpError
from tracefp4.meter.traces.layouts import LayoutError, Names, Record, read_record

SHOWN_NOTICES = 10
_BUFFERED = 512
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_GZIP = b"\x1f\x8b"


class TraceError(TracefpError):
    """A trace file that cannot be read, or holds nothing to compare."""


class Column:
    """An array that grows on disk."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by array()
        self._waiting: list[NDArray[Any]] = []
        self.size = 0

    def extend(self, values: NDArray[Any]) -> None:
        self._waiting.append(values)
        self.size += len(values)
        if len(self._waiting) >= _BUFFERED:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            self._file.write(np.concatenate(self._waiting).astype(self.dtype, copy=False).tobytes())
            self._waiting.clear()

    def array(self) -> NDArray[Any]:
        """All values, read from the disk as they are used; nothing can be added any more."""
        with self._file as file:  # the map outlives it
            self._write()
            file.flush()
            if not self.size:
                return np.empty(0, self.dtype)
            return np.memmap(file, self.dtype, mode="r", shape=(self.size,))


@dataclass
class Table:
    """All samples of a file. n rows; tokens of row i lie at offsets[i]:offsets[i + 1] of each column.

    logprobs: f64 by role ("train", "rollout", "any"); tokens: int64, or None where any row lacks them; mask: bool.
    line: int64 [n], 1-based. step: int64, -1 unknown; lag, temperature: f64, NaN unknown; prompt: int64, 0 unknown.
    """

    path: Path
    offsets: NDArray[np.int64]
    logprobs: dict[str, NDArray[np.float64]]
    tokens: NDArray[np.int64] | None
    mask: NDArray[np.bool_]
    masked: bool
    line: NDArray[np.int64]
    ids: list[str | None]
    step: NDArray[np.int64]
    lag: NDArray[np.float64]
    prompt: NDArray[np.int64]
    temperature: NDArray[np.float64]
    layouts: dict[str, int]
    notices: list[str] = field(default_factory=list)
    broken: int = 0

    @property
    def rows(self) -> int:
        return len(self.line)

    def length(self, row: int) -> int:
        return int(self.offsets[row + 1] - self.offsets[row])

    def span(self, row: int) -> slice:
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))

    def role(self, wanted: str) -> NDArray[np.float64]:
        """The column of a role; a file with one unnamed column has it in any role."""
        return self.logprobs[wanted] if wanted in self.logprobs else self.logprobs["any"]


def read_table(path: Path, names: Names, roles: tuple[str, ...], max_broken: float = 0.01) -> Table:
    """Reads a whole file.

    roles: columns to keep; of ("train", "rollout") both must be there, of one alone an unnamed column does too.
    max_broken: share of lines that may be no records; they are left out and named.
    Raises TraceError naming file, line and remedy.
    """
    if path.is_dir():
        raise TraceError(f"{path} is a folder: name a JSON lines file in it")
    if not path.exists():
        raise TraceError(f"{path} does not exist")
    builder = _Builder(path, roles)
    for number, line in _lines(path, builder.notices):
        builder.lines += 1
        try:
            builder.add(number, read_record(_parse(line), names))
        except LayoutError as error:
            builder.refuse(number, str(error))
    return builder.finish(max_broken)


def _lines(path: Path, notices: list[str]) -> Iterator[tuple[int, str]]:
    """(1-based number, text) of every line that is not blank, in UTF-8 or in what its byte order mark says; of gzip, of
    what it holds."""
    try:
        with path.open("rb") as file:  # looked into without seeking: it may be a pipe
            raw = gzip.GzipFile(fileobj=file) if file.peek(2).startswith(_GZIP) else file
            start = raw.peek(4)
            encoding = next((name for bom, name in _BOMS if start.startswith(bom)), "utf-8")
            if encoding == "utf-16":
                notices.append(f"{path} is UTF-16; it was read as that")
            replaced = 0
            # Not universal newlines: a text may hold a bare carriage return.
            text = io.TextIOWrapper(cast(IO[bytes], raw), encoding=encoding, errors="replace", newline="\n")
            for number, line in enumerate(text, start=1):
                replaced += "\ufffd" in line
                if line.strip():
                    yield number, line
            if replaced:
                notices.append(
                    f"{path} is not all UTF-8: in {replaced} line{'s' * (replaced != 1)} characters of texts were "
                    "replaced, numbers are not concerned"
                )
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path} cannot be read: {reason}") from None


def _parse(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("[") and "\n" in text and text.count("{") == 0:
            raise LayoutError("starts a JSON array; write one object a line") from None
        where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise LayoutError(f"is no valid JSON{where}; was the file cut off?") from None
    if not isinstance(value, dict):
        raise LayoutError(f"holds a {type(value).__name__}, not an object with fields")
    return value


class _Builder:
    def __init__(self, path: Path, roles: tuple[str, ...]) -> None:
        self.path, self.roles = path, roles
        self.lines = self.broken = 0
        self.first_broken = ""
        self.notices: list[str] = []
        self._columns: dict[str, Column] = {}
        self._tokens, self._mask = Column(np.int64), Column(np.bool_)
        self._without_tokens = self._with_mask = 0
        self._lengths: list[int] = []
        self._line: list[int] = []
        self._ids: list[str | None] = []
        self._facts: list[tuple[int, float, int, float]] = []
        self._layouts: dict[str, int] = {}

    def add(self, number: int, record: Record) -> None:
        columns = self._select(record)
        n = len(next(iter(columns.values())))
        if not self._columns:
            self._columns = {role: Column(np.float64) for role in columns}
        for role, values in columns.items():
            self._columns[role].extend(values)
        if record.tokens is None:
            self._without_tokens += 1
        self._tokens.extend(np.full(n, -1) if record.tokens is None else record.tokens)
        self._with_mask += record.mask is not None
        self._mask.extend(np.ones(n, bool) if record.mask is None else record.mask)
        self._lengths.append(n)
        self._line.append(number)
        self._ids.append(record.id)
        unknown = float("nan")
        self._facts.append(
            (
                -1 if record.step is None else record.step,
                unknown if record.lag is None else record.lag,
                0 if record.prompt is None else record.prompt,
                unknown if record.temperature is None else record.temperature,
            )
        )
        self._layouts[record.layout] = self._layouts.get(record.layout, 0) + 1

    def _select(self, record: Record) -> dict[str, NDArray[np.float64]]:
        """The columns of the roles asked for."""
        have = record.logprobs
        if len(self.roles) == 2:
            missing = [role for role in self.roles if role not in have]
            if missing:
                raise LayoutError(
                    f"has no log-probs of the {'trainer' if missing[0] == 'train' else 'rollout'}; with one file, each "
                    "line needs both columns (name them by --train-field and --rollout-field), or give two files"
                )
            return {role: have[role] for role in self.roles}
        role = self.roles[0]
        chosen = have.get(role, have.get("any"))
        if chosen is None:  # the other role's name: the file is what the caller says it is
            chosen = next(iter(have.values()))
        return {role: chosen}

    def refuse(self, number: int, why: str) -> None:
        self.broken += 1
        sentence = f"{self.path} line {number} {why}"
        self.first_broken = self.first_broken or sentence
        if self.broken <= SHOWN_NOTICES:
            self.notices.append(f"{sentence}; it was left out")

    def finish(self, max_broken: float) -> Table:
        if not self._line:
            raise TraceError(self.first_broken or f"{self.path} is empty: it has no lines")
        if self.broken > max_broken * self.lines:
            raise TraceError(
                f"{self.broken} of {self.lines} lines of {self.path} are no records, more than --max-broken "
                f"{max_broken:g} allows; the first: {self.first_broken}"
            )
        if self.broken > SHOWN_NOTICES:
            self.notices.append(f"{self.broken - SHOWN_NOTICES} more lines of {self.path} were left out")
        if 0 < self._without_tokens < len(self._line):
            self.notices.append(f"{self._without_tokens} rows of {self.path} have no token ids; none were compared")
        step, lag, prompt, temperature = zip(*self._facts, strict=True)
        tokens = self._tokens.array()
        return Table(
            path=self.path,
            offsets=np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64),
            logprobs={role: column.array() for role, column in self._columns.items()},
            tokens=None if self._without_tokens else tokens,
            mask=self._mask.array(),
            masked=self._with_mask > 0,
            line=np.array(self._line, dtype=np.int64),
            ids=self._ids,
            step=np.array(step, dtype=np.int64),
            lag=np.array(lag, dtype=np.float64),
            prompt=np.array(prompt, dtype=np.int64),
            temperature=np.array(temperature, dtype=np.float64),
            layouts=dict(sorted(self._layouts.items())),
            notices=self.notices,
            broken=self.broken,
        )
