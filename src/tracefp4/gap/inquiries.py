"""Inquiry files: JSON lines, CSV or Parquet to inquiries, with every row that cannot be used named by its line."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracefp4.config import did_you_mean
from tracefp4.errors import TracefpError
from tracefp4.gap.checks import FILE_TELLS, ROW_TELLS, RUNS_CODE, CheckSpec, Markers, Question, needs_answer
from tracefp4.tasks.base import Message
from tracefp4.tasks.records import ROLES
from tracefp4.tasks.rows import READERS, plain

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
FIELDS = ("id", "prompt", "messages", "system", "answer", "check", "category")
SHOWN = 5
_SURROGATE = re.compile("[\ud800-\udfff]")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class Inquiry:
    """One question to both forms.

    Fields:
        id: unique within the file.
        messages: what is asked, as chat messages; a plain ``prompt`` is one message of the user.
        answers: accepted references, none where no check needs one.
        checks: all must pass.
        category: "" where the file names none.
        fields: the row's other fields, plain JSON values.
        where: "inquiries.jsonl line 3".
    """

    id: str
    messages: tuple[Message, ...]
    answers: tuple[str, ...]
    checks: tuple[CheckSpec, ...]
    category: str
    fields: dict[str, Any]
    where: str

    @property
    def text(self) -> str:
        """The messages without roles: what is asked where there is no chat template."""
        return "\n\n".join(m["content"] for m in self.messages)

    @property
    def question(self) -> Question:
        return Question(self.id, self.text, self.answers, self.fields)


@dataclass
class InquiryFile:
    """broken: a sentence for each row left out; notices: for what was mended; sha256: of the file's bytes."""

    path: str
    inquiries: list[Inquiry]
    broken: list[str]
    notices: list[str]
    sha256: str


@dataclass(frozen=True)
class ReadOptions:
    """check: for rows without one. system: a system message for rows without one. allow_code: checks of the file may
    run code. skip_broken: go on without rows that cannot be used. limit: the first so many inquiries."""

    check: tuple[CheckSpec, ...] = ()
    system: str = ""
    encoding: str = ""
    allow_code: bool = False
    skip_broken: bool = False
    limit: int | None = None


@dataclass
class _Reader:
    """Collects what is wrong with rows while they are read."""

    options: ReadOptions
    folder: Path
    broken: list[str] = field(default_factory=list)
    parsed: dict[str, tuple[CheckSpec, ...]] = field(default_factory=dict)
    markers: Markers = field(default_factory=Markers)


def read_inquiries(path: str | Path, options: ReadOptions | None = None) -> InquiryFile:
    """Reads a file whole.

    Raises:
        TracefpError: the file cannot be read; or rows cannot be used and ``skip_broken`` is off: the message names the
            first of them, by line, and their number; or no row is left.
    """
    options, path = options or ReadOptions(), Path(path)
    data = _bytes(path)
    reader = _Reader(options, path.parent)
    inquiries: list[Inquiry] = []
    try:
        for where, row in _rows(path, data, reader):
            try:
                inquiries.append(_inquiry(row, where, reader))
            except TracefpError as error:
                reader.broken.append(f"{where}: {error}")
        inquiries = _usable(inquiries, reader)
    finally:
        reader.markers.close()
    if reader.broken and not options.skip_broken:
        count, more = len(reader.broken), len(reader.broken) - SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise TracefpError(
            f"{count} row{'' if count == 1 else 's'} of {path} cannot be used "
            f"({'; '.join(reader.broken[:SHOWN])}{rest}): mend the file, or leave them out with --skip-broken"
        )
    if not inquiries:
        raise TracefpError(f"--inquiries {path} holds no inquiry" + (" that can be used" if reader.broken else ""))
    inquiries, notices = _distinct(inquiries)
    return InquiryFile(str(path), inquiries[: options.limit], reader.broken, notices, hashlib.sha256(data).hexdigest())


# -- files to rows ----------------------------------------------------------------------------------------------------


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise TracefpError(f"--inquiries {path} is a directory; name a file in it")
    if not path.exists():
        raise TracefpError(f"--inquiries {path} does not exist (relative paths start at {Path.cwd()})")
    if not any(path.name.lower().endswith(suffix) for suffix in SUFFIXES):
        raise TracefpError(
            f"--inquiries {path} must be a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise TracefpError(f"--inquiries {path} cannot be read: {error.strerror}") from None


def _rows(path: Path, data: bytes, reader: _Reader) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, fields) of every row that can be read; the others go to ``reader.broken``."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from ((row.where, row.values) for row in READERS[".parquet"](path, data))
        return
    if name.endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise TracefpError(f"{path} is no complete gzip file: {error}") from None
    encoding = _encoding(data, reader.options.encoding)
    if name.endswith(".csv"):
        yield from _csv_rows(path, _decoded(path, data, encoding), reader)
    else:
        yield from _json_rows(path, data, encoding, reader)


def _encoding(data: bytes, named: str) -> str:
    try:
        if named:
            return codecs.lookup(named).name
    except LookupError:
        raise TracefpError(f"--encoding {named} is unknown; give one such as utf-8, cp1252 or shift_jis") from None
    return next((encoding for mark, encoding in _MARKS if data.startswith(mark)), "utf-8")


def _decoded(path: Path, data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TracefpError(f"{path} line {line} is not {encoding.upper()} text; {_ENCODING_REMEDY}") from None


_ENCODING_REMEDY = "name the file's encoding with --encoding, or save it as UTF-8"


def _json_rows(path: Path, data: bytes, encoding: str, reader: _Reader) -> Iterator[tuple[str, dict[str, Any]]]:
    # Line by line where a line feed is one byte: then a line in another encoding is that line's problem alone.
    single = not encoding.startswith(("utf-16", "utf-32"))
    lines: Sequence[bytes | str] = data.split(b"\n") if single else _decoded(path, data, encoding).split("\n")
    for number, raw in enumerate(lines, start=1):
        where = f"{path} line {number}"
        try:
            line = raw if isinstance(raw, str) else raw.decode(encoding)
        except UnicodeDecodeError:
            reader.broken.append(f"{where}: not {encoding.upper()} text; {_ENCODING_REMEDY}")
            continue
        line = line.removeprefix("\ufeff") if number == 1 else line
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except RecursionError:
            reader.broken.append(f"{where}: nested too deeply")
            continue
        except ValueError as error:
            if number == 1 and line.lstrip().startswith("["):
                raise _array(path) from None
            message = getattr(error, "msg", "a number of thousands of digits").lower()
            reader.broken.append(f"{where}: no valid JSON: {message} at column {getattr(error, 'colno', 1)}")
            continue
        if isinstance(row, dict):
            yield where, row
        elif number == 1 and isinstance(row, list):
            raise _array(path)
        else:
            reader.broken.append(f"{where}: {type(row).__name__}, not an object with fields")


def _array(path: Path) -> TracefpError:
    return TracefpError(f"{path} is one JSON array; write one object a line instead")


def _csv_rows(path: Path, text: str, reader: _Reader) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(1 << 30)
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    names: list[str] | None = None
    while True:
        line = rows.line_num + 1
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            reader.broken.append(f"{path} line {line}: no valid CSV: {error}")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if names is None:
            names = [cell.strip() for cell in cells]
            _check_header(path, names)
            continue
        if len(cells) != len(names):
            reader.broken.append(f"{path} line {line}: {len(cells)} cells, and the header has {len(names)}")
            continue
        yield f"{path} line {line}", {n: cell for n, cell in zip(names, cells, strict=True) if cell.strip()}


def _check_header(path: Path, names: list[str]) -> None:
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise TracefpError(f"{path} has two columns named {repeated!r}")
    if not {"prompt", "messages"} & set(names):
        raise TracefpError(f"{path} has no column prompt or messages; its first line names {', '.join(names[:12])}")


# -- rows to inquiries ------------------------------------------------------------------------------------------------


def _inquiry(row: dict[str, Any], where: str, reader: _Reader) -> Inquiry:
    row = {name: value for name, value in row.items() if value is not None}
    checks = _checks(row.get("check"), reader)
    answers = _answers(row.get("answer"))
    for spec in checks:
        if needs_answer(spec) and not answers:
            raise TracefpError(f"check {spec.kind} needs an answer, and the row has none")
    number = where.rpartition(" ")[2]
    category = row.get("category", "")
    if not isinstance(category, str | int):
        raise TracefpError("category must be text")
    inquiry = Inquiry(
        id=_id(row.get("id"), f"line-{number}"),
        messages=_messages(row, reader.options.system),
        answers=answers,
        checks=checks,
        category=str(category),
        fields={str(name): plain(value) for name, value in row.items() if name not in FIELDS},
        where=where,
    )
    for spec in checks:
        if spec.kind in ROW_TELLS:
            reader.markers.of(spec).validate([inquiry.question])
    return inquiry


def _usable(inquiries: list[Inquiry], reader: _Reader) -> list[Inquiry]:
    """Without those whose reference a check of ``FILE_TELLS`` refuses; these are broken."""
    by_spec: dict[CheckSpec, list[int]] = {}
    for i, inquiry in enumerate(inquiries):
        for spec in inquiry.checks:
            if spec.kind in FILE_TELLS:
                by_spec.setdefault(spec, []).append(i)
    refused: dict[int, str] = {}
    for spec, indices in by_spec.items():
        found = reader.markers.of(spec).refusals([inquiries[i].question for i in indices])
        refused |= {i: why for i, why in zip(indices, found, strict=True) if why}
    reader.broken += [f"{inquiries[i].where}: {refused[i]}" for i in sorted(refused)]
    return [inquiry for i, inquiry in enumerate(inquiries) if i not in refused]


def _checks(raw: Any, reader: _Reader) -> tuple[CheckSpec, ...]:
    if raw is None:
        if not reader.options.check:
            raise TracefpError("no check: give the row one, or all rows by --check")
        return reader.options.check
    key = raw if isinstance(raw, str) else json.dumps(raw, sort_keys=True, default=str)
    if key not in reader.parsed:
        specs = tuple(_located(spec, reader.folder) for spec in parse_checks(raw))
        for spec in specs:
            if spec.kind in RUNS_CODE and not reader.options.allow_code:
                raise TracefpError(
                    f"check {spec.kind} runs code that the file names: allow it with --allow-code if you trust the file"
                )
        reader.parsed[key] = specs
    return reader.parsed[key]


def _located(spec: CheckSpec, folder: Path) -> CheckSpec:
    """With the path of a function's file found from the inquiry file's folder, where it lies there."""
    place, colon, name = str(getattr(spec.config, "function", None) or "").partition(":")
    if not place.endswith(".py") or not (folder / place).is_file():
        return spec
    return replace(spec, config=spec.config.model_copy(update={"function": f"{folder / place}{colon}{name}"}))


def parse_checks(raw: Any) -> tuple[CheckSpec, ...]:
    """From a kind's name, an object, a list of these, or their JSON text. Raises TracefpError saying what is wrong."""
    if isinstance(raw, str) and raw.lstrip()[:1] in ("{", "["):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise TracefpError(f"check is no valid JSON: {error}") from None
    if isinstance(raw, list):
        if not raw:
            raise TracefpError("check is an empty list")
        return tuple(CheckSpec.parse(one) for one in raw)
    return (CheckSpec.parse(raw.strip() if isinstance(raw, str) else raw),)


def _answers(raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    values = raw if isinstance(raw, list) else [raw]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TracefpError("answer must be a text, a number, or a list of these")
    return tuple(_clean("answer", str(value)) for value in values)


def _id(raw: Any, default: str) -> str:
    if raw is None:
        return default
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise TracefpError("id must be text or a whole number")
    return _clean("id", str(raw))


def _messages(row: dict[str, Any], system: str) -> tuple[Message, ...]:
    if ("prompt" in row) == ("messages" in row):
        both = "both prompt and messages" if "prompt" in row else "neither prompt nor messages"
        near = "" if "prompt" in row else _near_prompt(row)
        raise TracefpError(f"{both}: give one of them{near}")
    raw = row.get("messages")
    if "prompt" in row:
        raw = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
    if isinstance(raw, str):  # a cell of a CSV file
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise TracefpError(f"messages is no valid JSON: {error}") from None
    if not isinstance(raw, list) or not raw:
        raise TracefpError("messages must be a list of chat messages")
    messages = [_message(message) for message in raw]
    if messages[-1]["role"] == "assistant":
        raise TracefpError("the last message is the assistant's: put the reference into answer")
    if not any(m["role"] == "user" for m in messages):
        raise TracefpError("messages has none of the user")
    front = row.get("system", system)
    if front and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _clean("system", front)})
    return tuple(messages)


def _message(raw: Any) -> Message:
    if not isinstance(raw, dict) or not {"role", "content"} <= set(raw):
        raise TracefpError("each message must have a role and a content")
    if raw["role"] not in ROLES:
        raise TracefpError(f"a message has role {raw['role']!r}{did_you_mean(str(raw['role']), list(ROLES))}")
    return {"role": raw["role"], "content": _clean("content", raw["content"])}


def _near_prompt(row: dict[str, Any]) -> str:
    names = [str(name)[:40] for name in row]
    return f"; the row has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "; the row is empty"


def _clean(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TracefpError(f"{name} must be text")
    if not value.strip():
        raise TracefpError(f"{name} is empty")
    if _SURROGATE.search(value):
        raise TracefpError(f"{name} holds half of a surrogate pair, which is no character")
    return value


def _distinct(inquiries: list[Inquiry]) -> tuple[list[Inquiry], list[str]]:
    """The inquiries under ids of their own, and sentences on repeated ids and repeated questions."""
    taken = {inquiry.id for inquiry in inquiries}
    seen: dict[str, str] = {}
    asked: dict[tuple[Any, ...], str] = {}
    kept, renamed, repeated = [], [], []
    for inquiry in inquiries:
        if inquiry.id in seen:
            number = 2
            while (name := f"{inquiry.id}#{number}") in taken:
                number += 1
            taken.add(name)
            renamed.append(
                f"{inquiry.where} repeats the id {inquiry.id!r} of {seen[inquiry.id]} and is called {name!r}"
            )
            inquiry = Inquiry(**{**inquiry.__dict__, "id": name})
        else:
            seen[inquiry.id] = inquiry.where
        key = (*((m["role"], m["content"]) for m in inquiry.messages), inquiry.answers, inquiry.checks)
        if key in asked:
            repeated.append(f"{inquiry.where} asks what {asked[key]} asks: together they count twice")
        asked.setdefault(key, inquiry.where)
        kept.append(inquiry)
    return kept, [*_shortened(renamed), *_shortened(repeated)]


def _shortened(notices: list[str], limit: int = 20) -> list[str]:
    more = len(notices) - limit
    return notices if more <= 0 else [*notices[:limit], f"and {more} more of this kind"]
