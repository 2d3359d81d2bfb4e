"""Rows of a data file: JSON lines, CSV or Parquet, told apart by the file's name.

Every error is one sentence that names the file, and the line or row where there is one.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracefp4.errors import TracefpError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")


@dataclass(frozen=True)
class Row:
    """One record. where: "data.jsonl line 3" or "data.csv row 3", counted from 1; values: plain Python values."""

    where: str
    values: dict[str, Any]


def read_rows(path: Path, key: str) -> list[Row]:
    """All rows of ``path``; relative paths start at the current directory. key: the setting that names the file.

    Raises:
        TracefpError: the file is missing, a directory, empty, of another kind, or broken; a row is no record.
    """
    if path.is_dir():
        raise TracefpError(f"{key} {path} is a directory; name a file in it")
    if not path.exists():
        raise TracefpError(f"{key} {path} does not exist (relative paths start at {Path.cwd()})")
    if not path.is_file():  # a pipe could be read once only, and a run reads its task again when it is resumed
        raise TracefpError(f"{key} {path} is no regular file; save the rows to one")
    reader = next((READERS[suffix] for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if reader is None:
        raise TracefpError(f"{key} {path} must be a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TracefpError(f"{key} {path} cannot be read: {error.strerror}") from None
    rows = reader(path, data) if data else []
    if not rows:
        raise TracefpError(f"{key} {path} is empty: it has no rows")
    return rows


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TracefpError(f"{path} line {line} is not UTF-8 text; save the file as UTF-8") from None


def _json_lines(path: Path, data: bytes) -> list[Row]:
    rows: list[Row] = []
    # Not splitlines(): a string may hold U+2028 and its like.
    for number, line in enumerate(_text(path, data).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not rows and line.lstrip().startswith("["):
                raise TracefpError(f"{path} is one JSON array; write one object a line instead") from None
            reason = getattr(error, "msg", str(error)).lower()
            if not isinstance(error, json.JSONDecodeError):
                reason = "nested too deeply" if isinstance(error, RecursionError) else "a number of thousands of digits"
            raise TracefpError(f"{where} is no valid JSON: {reason} at column {getattr(error, 'colno', 1)}") from None
        if not isinstance(values, dict):
            hint = "; write one object a line" if isinstance(values, list) else ""
            raise TracefpError(f"{where} holds {type(values).__name__}, not an object with fields{hint}")
        rows.append(Row(where, values))
    return rows


def _gzipped_json_lines(path: Path, data: bytes) -> list[Row]:
    try:
        data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise TracefpError(f"{path} is no complete gzip file: {error}") from None
    return _json_lines(path, data)


def _csv(path: Path, data: bytes) -> list[Row]:
    import pyarrow as pa
    from pyarrow import csv

    source = _text(path, data).encode()  # without a byte order mark
    if not source.strip():
        return []
    parse = csv.ParseOptions(newlines_in_values=True)
    try:
        names = csv.open_csv(pa.BufferReader(source), parse_options=parse).schema.names
        # Every cell as it is written: "007" is an answer of three characters.
        convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
        read = csv.ReadOptions(use_threads=False)
        table = csv.read_csv(pa.BufferReader(source), read_options=read, parse_options=parse, convert_options=convert)
    except pa.ArrowInvalid as error:
        raise TracefpError(f"{path} is no valid CSV: {_reason(error)}") from None
    _check_names(path, names)
    return _table_rows(path, table)


def _parquet(path: Path, data: bytes) -> list[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise TracefpError(f"{path} is no readable Parquet file: {_reason(error)}") from None
    _check_names(path, table.column_names)
    return _table_rows(path, table)


def _check_names(path: Path, names: list[str]) -> None:
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise TracefpError(f"{path} has two columns named {repeated!r}")


def _table_rows(path: Path, table: Any) -> list[Row]:
    return [Row(f"{path} row {number}", values) for number, values in enumerate(table.to_pylist(), start=1)]


def _reason(error: Exception) -> str:
    """An Arrow error's first line, without its own prefix and final stop."""
    return str(error).split("\n")[0].removeprefix("CSV parse error: ").rstrip(". ")


READERS: dict[str, Callable[[Path, bytes], list[Row]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _gzipped_json_lines,
    ".json": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}


def plain(value: Any) -> Any:
    """A JSON value; what JSON lacks (dates, bytes) as text."""
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
