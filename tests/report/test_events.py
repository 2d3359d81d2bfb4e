"""events.jsonl and samples.jsonl: whole lines, those of re-run steps dropped."""

import json
from pathlib import Path

import pytest

from tracefp4.report import RunFolderError, StepLog, create_run_dir
from tracefp4.report.logger import EVENTS


def filled(folder: Path) -> bytes:
    log = StepLog(folder)
    for step in (2, 2, 5, 9):
        log.write({"step": step, "name": "mismatch", "figures": {"ratio": 0.1}})
    return (folder / EVENTS).read_bytes()


def test_an_event_is_a_sorted_line_on_disk(tmp_path: Path) -> None:
    assert filled(tmp_path).splitlines()[0] == b'{"figures": {"ratio": 0.1}, "name": "mismatch", "step": 2}'
    StepLog(tmp_path)  # a new run starts with none
    assert (tmp_path / EVENTS).read_bytes() == b""


@pytest.mark.parametrize(("first", "kept"), [(1, 0), (3, 2), (5, 2), (6, 3), (100, 4)])
def test_going_on_drops_later_steps_and_a_torn_line(first: int, kept: int, tmp_path: Path) -> None:
    lines = filled(tmp_path).splitlines(keepends=True)
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"step": 0')
    StepLog(tmp_path, first).write({"step": first})
    assert (tmp_path / EVENTS).read_bytes() == b"".join(lines[:kept]) + json.dumps({"step": first}).encode() + b"\n"


def test_a_run_from_before_there_were_events_goes_on(tmp_path: Path) -> None:
    StepLog(tmp_path, 4).write({"step": 7})
    assert (tmp_path / EVENTS).read_text() == '{"step": 7}\n'


def test_a_line_that_is_no_event_is_one_sentence(tmp_path: Path) -> None:
    for line in ("x", "[]", "{}"):
        (tmp_path / EVENTS).write_text(line + '\n{"step": 1}\n')
        with pytest.raises(RunFolderError, match=r"^line 1 of .*events.jsonl is of no step: mend or remove that file$"):
            StepLog(tmp_path, 3)


def test_overwrite_takes_events_for_a_part_of_a_run(tmp_path: Path) -> None:
    StepLog(tmp_path)
    create_run_dir(tmp_path, overwrite=True)
    assert list(tmp_path.iterdir()) == []
