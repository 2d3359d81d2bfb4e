"""What an evaluation writes, and reads again when it goes on.

    eval.json               what was asked for, of which weights, from which commit; once complete all figures
    responses-<form>.jsonl  a line a problem, in the task's order
    timing.jsonl            a line a chunk: wall-clock figures, which never repeat

A chunk of problems is written once it is scored. An interrupted evaluation goes on with whole chunks, and so with the
very batches of an unbroken one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracefp4.errors import TracefpError
from tracefp4.files import append_text, jsonl, storage_errors, sweep_files, warn, whole_lines, write_text_atomic
from tracefp4.report import provenance, write_json_atomic
from tracefp4.report.logger import files_present
from tracefp4.report.provenance import append_resume

EVAL, TIMING = "eval.json", "timing.jsonl"
Line = dict[str, Any]
"""Of a responses file: {"id", "prompt", "overlong", "samples": [{"text", "reward", "tokens", "finish_reason"}]}."""


class EvalFolder:
    """The folder of one evaluation, locked by the caller.

    problems: the lines to be written, with no samples yet. samples: of each problem. chunk: problems written together.
    """

    def __init__(self, path: Path, problems: Sequence[Line], samples: int, chunk: int) -> None:
        self.path, self.problems, self.samples, self.chunk = path, problems, samples, chunk

    def open(self, asked: dict[str, Any], about: dict[str, Any], resume: bool, overwrite: bool) -> dict[str, Any]:
        """Makes the folder ready and writes eval.json; returns its content.

        asked: "settings", "checkpoint" and "forms_asked" of this evaluation, which a resumed one must share; about:
        what else eval.json says. Raises TracefpError, and changes nothing, where the folder holds something else.
        """
        present = files_present(self.path, EVAL, "evaluation", keep=resume or overwrite)
        facts = self._read() if resume and EVAL in present else None
        now = provenance()
        if facts is not None:
            self._check_same(facts, json.loads(json.dumps(asked)))
            if changed := append_resume(facts, now):
                warn(f"{self.path} goes on with {changed}: its figures may not be those of an unbroken evaluation")
        with storage_errors(str(self.path)):
            sweep_files(self.path)
            if facts is None:
                for file in (self.path / EVAL, self.path / TIMING, *self.path.glob("responses-*.jsonl")):
                    file.unlink(missing_ok=True)
        facts = (now | {"resumes": []} if facts is None else facts) | asked | about | {"complete": False}
        write_json_atomic(self.path / EVAL, facts)
        return facts

    def _read(self) -> dict[str, Any]:
        path = self.path / EVAL
        try:
            facts: dict[str, Any] = json.loads(path.read_bytes())
            if not (isinstance(facts["settings"], dict) and isinstance(facts["forms_asked"], list)):
                raise ValueError("its settings or forms are missing")
            str(facts["checkpoint"]["sha256"] + facts["checkpoint"]["path"])
            return facts
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TracefpError(f"{path} cannot be read ({error}): evaluate into another --out") from None

    def _check_same(self, then: dict[str, Any], now: dict[str, Any]) -> None:
        old, new = then["settings"], now["settings"]
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                raise TracefpError(
                    f"{self.path} was evaluated with {key} = {old.get(key)!r}, now it is {new.get(key)!r}: set it "
                    "back, or evaluate into another --out"
                )
        if then["checkpoint"]["sha256"] != now["checkpoint"]["sha256"]:
            raise TracefpError(
                f"{self.path} was evaluated with other weights than {now['checkpoint']['path']} holds (then from "
                f"{then['checkpoint']['path']}): evaluate into another --out"
            )
        if missing := [name for name in then["forms_asked"] if name not in now["forms_asked"]]:
            raise TracefpError(
                f"{self.path} was evaluated in the form {missing[0]} too: give all of "
                f"{','.join(then['forms_asked'])} in --forms, more if you like"
            )

    # -- responses ----------------------------------------------------------------------------------------------

    def begin(self, form: str) -> int:
        """Problems whose answers are there, in whole chunks; what a killed process left behind them is cut off."""
        path, total = responses_file(self.path, form), len(self.problems)
        if not path.exists():
            return 0
        lines = whole_lines(path)
        kept = total if len(lines) >= total else len(lines) // self.chunk * self.chunk
        write_text_atomic(path, "".join(lines[:kept]))
        if (timing := self.path / TIMING).exists():
            write_text_atomic(timing, "".join(whole_lines(timing)))
        self.read(form)
        return kept

    def append(self, form: str, start: int, lines: Sequence[Line], seconds: float) -> None:
        """Writes the chunk that begins at problem ``start``; seconds: of its generation."""
        append_text(responses_file(self.path, form), jsonl(lines))
        tokens = sum(s["tokens"] for line in lines for s in line["samples"])
        timing = {"form": form, "start": start, "seconds": seconds, "tokens": tokens}
        append_text(self.path / TIMING, jsonl([timing]))

    def read(self, form: str) -> list[Line]:
        """The lines of a responses file. Raises TracefpError where one is damaged or answers another problem."""
        path = responses_file(self.path, form)
        lines: list[Line] = []
        for number, (text, problem) in enumerate(zip(whole_lines(path), self.problems, strict=False), 1):
            try:
                line: Line = json.loads(text)
                samples = line.pop("samples")
                [(s["text"], s["reward"] + 0.0, s["tokens"] + 0, s["finish_reason"]) for s in samples]
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise TracefpError(f"{path} line {number} is damaged ({error}): evaluate into another --out") from None
            if line != {k: v for k, v in problem.items() if k != "samples"} or len(samples) != (
                0 if line["overlong"] else self.samples
            ):
                raise TracefpError(
                    f"{path} line {number} answers another problem than the task's {problem['id']}, so its data have "
                    "changed since: evaluate into another --out"
                )
            lines.append({**line, "samples": samples})
        return lines

    def tokens_per_second(self) -> dict[str, float]:
        """Sampled tokens over seconds of generation, by form; a chunk that was answered twice counts once."""
        chunks: dict[str, dict[int, tuple[int, float]]] = {}
        for text in whole_lines(self.path / TIMING):
            line = json.loads(text)
            chunks.setdefault(line["form"], {})[line["start"]] = (line["tokens"], line["seconds"])
        totals = {form: [sum(x) for x in zip(*of_form.values(), strict=True)] for form, of_form in chunks.items()}
        return {form: tokens / seconds for form, (tokens, seconds) in totals.items() if seconds > 0}


def responses_file(folder: Path, form: str) -> Path:
    return folder / f"responses-{form}.jsonl"


def answered(folder: Path, forms: Sequence[str]) -> dict[str, int]:
    """Problems answered so far, by form."""
    files = {form: responses_file(folder, form) for form in forms}
    return {form: len(whole_lines(file)) if file.exists() else 0 for form, file in files.items()}
