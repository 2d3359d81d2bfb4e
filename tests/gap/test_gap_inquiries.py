"""Inquiry files of all kinds, and what is said about rows that cannot be used."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tracefp4.errors import TracefpError
from tracefp4.gap.inquiries import InquiryFile, ReadOptions, parse_checks, read_inquiries

ROW = {"id": "a", "prompt": "2+2?", "answer": 4, "check": "numeric", "level": 3}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def read(path: Path, **options: Any) -> InquiryFile:
    return read_inquiries(path, ReadOptions(**options))


def test_json_lines(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file = read(
        jsonl(
            tmp_path / "q.jsonl", ROW, "", {"messages": chat, "answer": ["Hello", "Hi"], "check": ["contains", "exact"]}
        )
    )
    first, second = file.inquiries
    assert (first.id, first.text, first.answers, first.fields) == ("a", "2+2?", ("4",), {"level": 3})
    assert first.messages == ({"role": "user", "content": "2+2?"},)
    assert (second.id, [m["role"] for m in second.messages]) == ("line-3", ["system", "user"])
    assert [c.kind for c in second.checks] == ["contains", "exact"]
    assert file.broken == file.notices == []


def test_csv_and_parquet_and_gzip_say_the_same(tmp_path: Path) -> None:
    check = json.dumps({"kind": "regex", "pattern": "fo+"})
    (tmp_path / "q.csv").write_text(
        'id,prompt,answer,check,category\n1,"two\nlines",yes,contains,a\n2,"Say ""foo""",,"'
        + check.replace('"', '""')
        + '",\n',
        encoding="utf-8-sig",
    )
    rows = [
        {
            "id": "1",
            "prompt": "two\nlines",
            "answer": "yes",
            "check": {"kind": "contains", "pattern": None},
            "category": "a",
        },
        {
            "id": "2",
            "prompt": 'Say "foo"',
            "answer": None,
            "check": {"kind": "regex", "pattern": "fo+"},
            "category": None,
        },
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    jsonl(tmp_path / "q.jsonl", *rows)
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress((tmp_path / "q.jsonl").read_bytes()))
    files = [read(tmp_path / name).inquiries for name in ("q.csv", "q.parquet", "q.jsonl", "q.jsonl.gz")]
    for inquiries in files:
        assert [(q.id, q.text, q.answers, q.category) for q in inquiries] == [
            ("1", "two\nlines", ("yes",), "a"),
            ("2", 'Say "foo"', (), ""),
        ]
        assert [q.checks for q in inquiries] == [q.checks for q in files[0]]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_marks_of_encodings_are_read(tmp_path: Path, encoding: str, suffix: str) -> None:
    text = (
        "prompt,answer,check\nGrüße?,né,exact\n"
        if suffix == ".csv"
        else json.dumps({"prompt": "Grüße?", "answer": "né", "check": "exact"}, ensure_ascii=False)
    )
    data = text.encode(encoding)
    path = tmp_path / f"q{suffix}"
    path.write_bytes(codecs.BOM_UTF16_LE + data if encoding == "utf-16-le" else data)
    assert read(path).inquiries[0].text == "Grüße?"


def test_another_encoding_is_named_and_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    lines = [{"prompt": "a", "answer": "b", "check": "exact"}, {"prompt": "Grüße", "answer": "b", "check": "exact"}]
    path.write_bytes("\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode("cp1252"))
    with pytest.raises(TracefpError, match=r"line 2: not UTF-8 text; name the file's encoding with --encoding"):
        read(path)
    assert [q.text for q in read(path, encoding="cp1252").inquiries] == ["a", "Grüße"]
    assert len(read(path, skip_broken=True).inquiries) == 1
    with pytest.raises(TracefpError, match="--encoding klingon"):
        read(path, encoding="klingon")


def test_all_broken_lines_are_named_and_can_be_left_out(tmp_path: Path) -> None:
    bad = ['{"prompt": "x"', '"text"', {"prompt": "x"}, {"prompt": "x", "check": "exakt", "answer": "y"}]
    bad += [{"check": "exact", "answer": "y", "qestion": "z"}, {"prompt": " ", "check": "exact", "answer": "y"}]
    path = jsonl(tmp_path / "q.jsonl", ROW, *bad, {**ROW, "id": "b"})
    with pytest.raises(TracefpError, match=r"6 rows of .* cannot be used") as error:
        read(path)
    for part in (
        "line 2: no valid JSON",
        "line 3: str, not an object",
        "line 4: no check",
        "did you mean exact",
        "and 1 more",
    ):
        assert part in str(error.value)
    file = read(path, skip_broken=True)
    assert [q.id for q in file.inquiries] == ["a", "b"]
    assert [int(text.split(" line ")[1].split(":")[0]) for text in file.broken] == [2, 3, 4, 5, 6, 7]


def test_broken_csv_rows_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text('prompt,answer,check\n"a\nb",c,exact\nx,y\n"open,z,exact\n', encoding="utf-8")
    with pytest.raises(TracefpError, match=r"line 4: 2 cells.*line 5: no valid CSV"):
        read(path)
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(TracefpError, match="no column prompt or messages; its first line names a, b"):
        read(path)


def test_repeated_ids_keep_both_rows(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "q.jsonl", ROW, {**ROW, "prompt": "3+1?"}, {**ROW, "id": "a#2", "prompt": "1+3?"}, {**ROW, "id": "z"}
    )
    file = read(path)
    assert [q.id for q in file.inquiries] == ["a", "a#3", "a#2", "z"]
    assert "line 2 repeats the id 'a' of" in file.notices[0]
    assert "line 4 asks what" in file.notices[1]


def test_tens_of_thousands_of_lines(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "q.jsonl",
        *({**ROW, "id": i, "prompt": f"{i}+0?", "answer": i, "check": "contains"} for i in range(20_000)),
    )
    started = time.perf_counter()
    file = read(path)
    assert len(file.inquiries) == 20_000
    assert file.inquiries[-1].answers == ("19999",)
    assert time.perf_counter() - started < 6


def test_code_of_a_file_runs_only_where_it_is_allowed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", {"prompt": "x", "check": {"kind": "command", "command": "true"}})
    with pytest.raises(TracefpError, match="--allow-code"):
        read(path)
    assert read(path, allow_code=True).inquiries[0].checks[0].kind == "command"
    (tmp_path / "f.py").write_text("")
    near = jsonl(tmp_path / "n.jsonl", {"prompt": "x", "check": {"kind": "python", "function": "f.py:g"}})
    (spec,) = read(near, allow_code=True).inquiries[0].checks
    assert getattr(spec.config, "function") == f"{tmp_path}/f.py:g"  # noqa: B009
    bare = jsonl(tmp_path / "bare.jsonl", {"prompt": "x"})
    own = parse_checks('{"kind": "command", "command": ["true"]}')
    assert read(bare, check=own).inquiries[0].checks == own


def test_references_that_a_check_cannot_use_are_rows_that_cannot_be_used(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "q.jsonl",
        ROW,
        {**ROW, "answer": "four"},
        {**ROW, "answer": "(4", "check": "regex"},
        {**ROW, "answer": "...", "check": "normalized"},
    )
    named = r"3 rows .*line 2: .*holds no number.*line 3: .*no regular.*line 4: .*empty"
    with pytest.raises(TracefpError, match=named):
        read(path)
    assert len(read(path, skip_broken=True).inquiries) == 1
    with pytest.raises(TracefpError, match="one JSON array"):
        read(jsonl(tmp_path / "array.json", [ROW]))


def test_references_that_take_workers_are_left_out_too(tmp_path: Path) -> None:
    math = {"kind": "math", "workers": 1}
    path = jsonl(
        tmp_path / "q.jsonl",
        {**ROW, "check": math},
        {**ROW, "id": "b", "answer": "\\frac{1}{", "check": math},
        {**ROW, "id": "c", "answer": ["1", "((("], "check": math},
        {**ROW, "id": "d", "check": {"kind": "program"}, "tests": 5},
        {**ROW, "id": "e"},
    )
    named = r"3 rows .*line 2: .*problem b.*math-verify.*line 3: .*problem c, '\(\(\('.*line 4: the tests of problem d"
    file = read(path, skip_broken=True)
    assert [q.id for q in file.inquiries] == ["a", "e"]
    assert re.search(named, f"{len(file.broken)} rows {'; '.join(file.broken)}")
    programs = jsonl(tmp_path / "p.jsonl", {**ROW, "check": {"kind": "program"}, "tests": 5}, ROW)
    with pytest.raises(TracefpError, match=r"1 row of .*line 1: the tests of problem a.*--skip-broken"):
        read(programs)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"kind": "numeric", "casefold": True}, "casefold does nothing"),
        ({"kind": "contains", "mode": "most"}, "check contains, mode"),
        ({"kind": "json_schema", "schema": {"type": "objekt"}}, "is no JSON Schema"),
        ({"kind": "json_schema"}, "check json_schema, schema"),
        ({"kind": "judge"}, "check judge, rubric"),
        ({"kind": "contains", "moed": "any"}, "check contains, moed: unknown key; did you mean mode"),
        ({"kind": "regex", "pattern": "(a"}, r"check regex: pattern '\(a' is no regular expression"),
        ({"kind": "exact", "pass_at": 2}, "pass_at belongs to kind python"),
        ({"knd": "exact"}, 'object with "kind"'),
        ([], "empty list"),
        ("{kind", "no valid JSON"),
    ],
)
def test_checks_that_cannot_be_read(check: Any, message: str) -> None:
    with pytest.raises(TracefpError, match=message):
        parse_checks(check)


def test_system_messages_and_messages_in_cells(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", ROW, {**ROW, "id": "b", "system": "own"})
    assert len(read(path, limit=1).inquiries) == 1
    assert [q.messages[0]["content"] for q in read(path, system="common").inquiries] == ["common", "own"]
    cells = tmp_path / "q.csv"
    cells.write_text(
        'messages,answer,check\n"[{""role"": ""user"", ""content"": ""Hi""}]",Hi,exact\n', encoding="utf-8"
    )
    assert read(cells).inquiries[0].text == "Hi"
    for messages, message in (
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "put the reference into answer"),
        ([{"role": "usr", "content": "x"}], "did you mean user"),
        ([{"role": "system", "content": "x"}], "none of the user"),
        ("hello", "no valid JSON"),
    ):
        with pytest.raises(TracefpError, match=message):
            read(jsonl(tmp_path / "m.jsonl", {"messages": messages, "answer": "x", "check": "exact"}))


@pytest.mark.parametrize("name", ["missing.jsonl", ".", "q.txt", "empty.jsonl", "array.json", "half.jsonl.gz"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    for file, content in (
        ("q.txt", b"x"),
        ("empty.jsonl", b"\n"),
        ("array.json", b"[\n{}]"),
        ("half.jsonl.gz", b"\x1f\x8b"),
    ):
        (tmp_path / file).write_bytes(content)
    with pytest.raises(TracefpError):
        read(tmp_path / name)
