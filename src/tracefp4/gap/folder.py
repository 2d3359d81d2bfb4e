"""What a deployment check writes, and reads again when it goes on.

    gap.json               what was asked, of which forms, from which commit; once complete all figures
    answers-<side>.jsonl   a line an answer of the side "train" or "serve", as it comes; or why it is missing
    marks.jsonl            a line a checked answer
    scores.jsonl           log-probs of one side's answers under the other side
    timing.jsonl           a line a batch: seconds and tokens
    flips.jsonl            the pairs whose outcome differs, with both answers
    report.html            the page

Lines are appended whole and synced together, at most half a second later; a later line on the same answer replaces an
earlier one, and a last line that was cut off is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tracefp4.errors import TracefpError
from tracefp4.files import GroupedAppends, jsonl, storage_errors, sweep_files, warn, write_text_atomic
from tracefp4.gap.answers import Answer, Failure, Key
from tracefp4.gap.checks import Mark
from tracefp4.report import provenance, write_json_atomic
from tracefp4.report.logger import files_present
from tracefp4.report.provenance import append_resume

GAP, MARKS, SCORES, TIMING, FLIPS, REPORT = (
    "gap.json",
    "marks.jsonl",
    "scores.jsonl",
    "timing.jsonl",
    "flips.jsonl",
    "report.html",
)
TRAIN, SERVE = "train", "serve"
SIDES = (TRAIN, SERVE)

Line = dict[str, Any]


class GapFolder:
    """The folder of one deployment check, locked by the caller; as a block, what was appended is synced at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._appends = GroupedAppends()

    def __enter__(self) -> GapFolder:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._appends.__exit__(*raised)

    def open(
        self, settings: dict[str, Any], checks: str, resume: bool, overwrite: bool, recheck: bool
    ) -> dict[str, Any]:
        """Makes the folder ready and writes gap.json; returns its content.

        settings: what the answers depend on, which a resumed check must share. checks: a hash of what the marks depend
        on; where it differs, or with ``recheck``, answers are marked anew. Raises TracefpError, and changes nothing,
        where the folder holds something else.
        """
        present = files_present(self.path, GAP, "deployment check", keep=resume or overwrite)
        facts = self._read() if resume and GAP in present else None
        settings, now = json.loads(json.dumps(settings)), provenance()
        unanswered = [] if facts is None else [side for side in SIDES if not self._answered(side)]
        if facts is not None:
            free = {name for side in unanswered for name in (f"--{side}-form", f"weights of --{side}-form")}
            self._check_same(facts["settings"], settings, free)
            if changed := append_resume(facts, now):
                warn(f"{self.path} goes on with {changed}: its figures may not be those of an unbroken check")
        with storage_errors(str(self.path)):
            sweep_files(self.path)
            if facts is None:
                for name in (GAP, MARKS, SCORES, TIMING, FLIPS, REPORT, *(f"answers-{side}.jsonl" for side in SIDES)):
                    (self.path / name).unlink(missing_ok=True)
            elif recheck or facts.get("checks_hash") != checks:
                (self.path / MARKS).unlink(missing_ok=True)
            if unanswered:  # what failed may have been another form
                self.replace(TIMING, [line for _, line in self._lines(TIMING) if line["side"] not in unanswered])
            for side in unanswered:
                (self.path / f"answers-{side}.jsonl").unlink(missing_ok=True)
        facts = (now | {"resumes": []} if facts is None else facts) | {"settings": settings, "checks_hash": checks}
        facts["complete"] = False
        write_json_atomic(self.path / GAP, facts)
        for name in (MARKS, SCORES, TIMING, *(f"answers-{side}.jsonl" for side in SIDES)):
            self._mend(name)
        return facts

    def _read(self) -> dict[str, Any]:
        path = self.path / GAP
        try:
            facts: dict[str, Any] = json.loads(path.read_bytes())
            if not isinstance(facts["settings"], dict):
                raise ValueError("its settings are no object")
            return facts
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TracefpError(f"{path} cannot be read ({error}): choose another --out") from None

    def _answered(self, side: str) -> bool:
        """Whether anything came of a side's form: until then a mistake in its name can be mended."""
        other = SERVE if side == TRAIN else TRAIN
        return any(isinstance(found, Answer) for found in self.answers(side).values()) or bool(self.scores(other))

    def _check_same(self, then: dict[str, Any], now: dict[str, Any], free: set[str]) -> None:
        for key in sorted({*then, *now} - free):
            if then.get(key) != now.get(key):
                what = (
                    "other questions"
                    if key == "questions"
                    else f"{key} = {then.get(key)!r}, now it is {now.get(key)!r}"
                )
                raise TracefpError(f"{self.path} was made with {what}: set it back, or choose another --out")

    # -- lines ------------------------------------------------------------------------------------------------------

    def append(self, name: str, lines: Iterable[Line]) -> None:
        """Raises StorageError, and leaves the file as it was, where the disk refuses."""
        self._appends.append(self.path / name, jsonl(lines))

    def sync(self) -> None:
        """Returns once all lines are on disk."""
        self._appends.sync()

    def replace(self, name: str, lines: Iterable[Line]) -> None:
        write_text_atomic(self.path / name, jsonl(lines))

    def add_answers(self, side: str, answers: Iterable[tuple[Key, Answer | Failure]]) -> None:
        lines = []
        for (id_, sample), found in answers:
            about = {"failure": found.reason, "final": found.final} if isinstance(found, Failure) else found.as_dict()
            lines.append({"id": id_, "sample": sample, **about})
        self.append(f"answers-{side}.jsonl", lines)

    def answers(self, side: str) -> dict[Key, Answer | Failure]:
        """By inquiry and sample. Raises TracefpError for a damaged line."""
        found: dict[Key, Answer | Failure] = {}
        for number, line in self._lines(f"answers-{side}.jsonl"):
            try:
                key = (str(line.pop("id")), int(line.pop("sample")))
                if "failure" in line:
                    found[key] = Failure(line["failure"], bool(line.get("final")))
                else:
                    found[key] = Answer(**line)
            except (KeyError, TypeError, ValueError):
                raise self._damaged(f"answers-{side}.jsonl", number) from None
        return found

    def add_marks(self, side: str, marks: Iterable[tuple[Key, Mark]]) -> None:
        lines = [{"side": side, "id": id_, "sample": s, "passed": m.passed, "note": m.note} for (id_, s), m in marks]
        self.append(MARKS, lines)

    def marks(self, side: str) -> dict[Key, Mark]:
        found: dict[Key, Mark] = {}
        for number, line in self._lines(MARKS):
            try:
                if line["side"] == side:
                    found[line["id"], line["sample"]] = Mark(line["passed"], line["note"])
            except (KeyError, TypeError):
                raise self._damaged(MARKS, number) from None
        return found

    def scores(self, side: str) -> dict[Key, Line]:
        """Lines on the answers of a side."""
        return {(line["id"], line["sample"]): line for _, line in self._lines(SCORES) if line["answers_of"] == side}

    def seconds_and_tokens(self, side: str) -> tuple[float, int]:
        """Of all batches of a side."""
        lines = [line for _, line in self._lines(TIMING) if line["side"] == side]
        return sum(line["seconds"] for line in lines), sum(line["tokens"] for line in lines)

    def _lines(self, name: str) -> Iterable[tuple[int, Line]]:
        path = self.path / name
        if not path.exists():
            return
        with storage_errors(str(path)), path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    return
                try:
                    line = json.loads(raw)
                except ValueError:
                    raise self._damaged(name, number) from None
                if not isinstance(line, dict):
                    raise self._damaged(name, number)
                yield number, line

    def _mend(self, name: str) -> None:
        """Cuts off a last line without its end, so that the next one does not continue it."""
        path = self.path / name
        if not path.exists():
            return
        with storage_errors(str(path)), path.open("rb+") as file:
            size = file.seek(0, 2)
            position = size
            while position:
                start = max(0, position - 65536)
                file.seek(start)
                found = file.read(position - start).rfind(b"\n")
                if found >= 0:
                    position = start + found + 1
                    break
                position = start
            if position < size:
                file.truncate(position)

    def _damaged(self, name: str, number: int) -> TracefpError:
        return TracefpError(f"{self.path / name} line {number} is damaged: choose another --out")
