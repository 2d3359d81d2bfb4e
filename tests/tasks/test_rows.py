"""Data files: what each kind gives, and the sentence that each broken one gets."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tracefp4.errors import TracefpError
from tracefp4.tasks.rows import read_rows

RECORDS = [{"question": "1+1?", "answer": "2"}, {"question": "a,\n\u2028b?", "answer": "007"}]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_kinds_give_the_same_rows() -> None:
    lines = "\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS)
    Path("a.jsonl").write_text(lines, encoding="utf-8")
    Path("bom.jsonl").write_text("\ufeff" + lines + "\r\n\n", encoding="utf-8")
    Path("a.JSONL.gz").write_bytes(gzip.compress(lines.encode()))
    Path("a.csv").write_text('question,answer\n1+1?,2\n"a,\n\u2028b?",007\n', encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(RECORDS), "a.parquet")
    for name in ("a.jsonl", "bom.jsonl", "a.JSONL.gz", "a.csv", "a.parquet"):
        assert [row.values for row in read_rows(Path(name), "task.path")] == RECORDS, name
    assert [row.where for row in read_rows(Path("a.jsonl"), "task.path")] == ["a.jsonl line 1", "a.jsonl line 2"]
    assert read_rows(Path("a.csv"), "task.path")[1].where == "a.csv row 2"


def test_blank_lines_are_skipped_and_counted() -> None:
    Path("a.jsonl").write_text('\n{"a": 1}\n  \n\n{"a": 2}\n')
    assert [row.where for row in read_rows(Path("a.jsonl"), "k")] == ["a.jsonl line 2", "a.jsonl line 5"]


BROKEN = [
    ("a.jsonl", b"", "task.path a.jsonl is empty: it has no rows"),
    ("a.jsonl", b"\n \n", "task.path a.jsonl is empty: it has no rows"),
    ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl line 2 is no valid JSON: expecting value at column "),
    ("a.jsonl", b'{"a": 1}\n[1]\n', "a.jsonl line 2 holds list, not an object with fields; write one object a line"),
    ("a.jsonl", b"3\n", "a.jsonl line 1 holds int, not an object with fields"),
    ("a.json", b'[\n{"a": 1}\n]\n', "a.json is one JSON array; write one object a line instead"),
    ("a.jsonl", b'{"a": 1}\n{"a": "\xe4"}\n', "a.jsonl line 2 is not UTF-8 text; save the file as UTF-8"),
    ("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl"),
    ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "a.jsonl.gz is no complete gzip file"),
    ("a.jsonl.gz", gzip.compress(b'{"a": 1}' * 99, mtime=0)[:30], "a.jsonl.gz is no complete gzip file"),
    ("a.csv", b"q,a\n1,2,3\n", "a.csv is no valid CSV: "),
    ("a.csv", b"q,q\n1,2\n", "a.csv has two columns named 'q'"),
    ("a.csv", b"q,a\n", "task.path a.csv is empty: it has no rows"),
    ("a.csv", b"\n\n", "task.path a.csv is empty: it has no rows"),
    ("a.csv", b"q,a\nx,\xff\n", "a.csv line 2 is not UTF-8 text"),
    ("a.parquet", b"", "task.path a.parquet is empty"),
    ("a.parquet", b"PAR1 but not", "a.parquet is no readable Parquet file: "),
    ("a.txt", b"x", "task.path a.txt must be a file that ends in .jsonl, .jsonl.gz, .json, .csv or .parquet"),
]


@pytest.mark.parametrize(("name", "data", "sentence"), BROKEN)
def test_broken_files(name: str, data: bytes, sentence: str) -> None:
    Path(name).write_bytes(data)
    with pytest.raises(TracefpError) as caught:
        read_rows(Path(name), "task.path")
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_parquet_file_cut_short() -> None:
    pq.write_table(pa.Table.from_pylist(RECORDS), "a.parquet")
    Path("a.parquet").write_bytes(Path("a.parquet").read_bytes()[:-20])
    with pytest.raises(TracefpError, match=r"^a\.parquet is no readable Parquet file: "):
        read_rows(Path("a.parquet"), "task.path")


def test_a_missing_file_and_a_folder() -> None:
    with pytest.raises(TracefpError, match=r"^task\.path no\.jsonl does not exist \(relative paths start at "):
        read_rows(Path("no.jsonl"), "task.path")
    Path("d.jsonl").mkdir()
    with pytest.raises(TracefpError, match=r"^task\.path d\.jsonl is a directory; name a file in it$"):
        read_rows(Path("d.jsonl"), "task.path")
