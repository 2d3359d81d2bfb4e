"""The command: exit codes, estimate, page, signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gap_server import Bad, fake_server
from tracefp4.cli import main

KEY = "sk-very-secret"
HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(1)> & "quotes" </pre></article>'


def command(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["gap", *map(str, arguments)])
    return stop.value.code  # type: ignore[return-value]


def write(path: Path, count: int, **more: Any) -> Path:
    rows = [{"id": f"q{i}", "prompt": f"Say {i}", "answer": "right", "check": "exact", **more} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def wrong_below(limit: int) -> Any:
    """The model "s" is wrong on the first so many inquiries."""

    def script(body: dict[str, Any], n: int) -> str:
        number = int(body["messages"][-1]["content"].split()[-1])
        return "wrong" if body["model"] == "s" and number < limit else "right"

    return script


@pytest.mark.parametrize(
    ("count", "wrong", "gate", "code"),
    [
        (30, 0, ["--max-drop", "30%"], 0),
        (30, 25, ["--max-drop", "20%"], 1),
        (20, 1, ["--max-drop", "2%"], 2),
        (10, 10, [], 0),
    ],
)
def test_exit_code_is_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, wrong: int, gate: list[str], code: int
) -> None:
    with fake_server(wrong_below(wrong)) as server:
        forms = ["--train-form", f"{server.url}?model=t", "--serve-form", f"{server.url}?model=s"]
        file = write(tmp_path / "q.jsonl", count)
        assert command(*forms, "--inquiries", file, "--out", tmp_path / "out", "--logprobs", 0, *gate) == code
    facts = json.loads((tmp_path / "out" / "gap.json").read_text())
    shown = capsys.readouterr().out
    if gate:
        assert facts["gate"]["exit_code"] == code
        assert f"gate: {facts['gate']['verdict'].upper()}" in shown
    if code == 2:
        assert re.search(r"about [\d,]+ would be needed", shown)


@pytest.mark.parametrize("gate", [[], ["--max-drop", "2%"]], ids=["no gate", "gate"])
def test_where_nothing_could_be_compared_nothing_is_said_to_be_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gate: list[str]
) -> None:
    with fake_server(lambda body, n: Bad(400) if body["model"] == "s" else "right") as server:
        forms = ["--train-form", f"{server.url}?model=t", "--serve-form", f"{server.url}?model=s"]
        file = write(tmp_path / "q.jsonl", 3)
        assert command(*forms, "--inquiries", file, "--out", tmp_path / "out", "--logprobs", 0, *gate) == 2
    shown = capsys.readouterr().out
    assert "UNDECIDED: no inquiry has answers of both forms" in shown
    assert "3 inquiries lack an answer or its check" in shown
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert "Open: " in page.text
    assert "Measured" not in page.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-drop", "2"], "did you mean 2%"),
        (["--confidence", "5%"], "--confidence must be a share"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--temperature", "-1"], "--temperature must be"),
        (["--samples", "many"], "--samples"),
        (["--unknown"], "no such option"),
        (["--resume", "--overwrite"], "give one of them"),
        (["--judge", "."], "--judge"),
        (["--check", "exakt"], "did you mean exact"),
        (["--dtype", "int4"], "--dtype must be one of"),
        (["--inquiries", "missing.jsonl"], "does not exist"),
        (["--train-form", "missing"], "--train-form missing does not exist"),
        (["--out", "q.jsonl"], "a file is in its place"),
    ],
)
def test_user_errors_are_one_line_and_code_64(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "q.jsonl", 2)
    usual = {"--train-form": "http://h/v1?model=m", "--serve-form": "http://h/v1?model=m", "--inquiries": "q.jsonl"}
    given = [part for name, value in usual.items() if name not in arguments for part in (name, value)]
    assert command(*given, *arguments) == 64
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message.casefold() in error.casefold()


def test_missing_options_are_code_64_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--train-form", "x") == 64
    assert "--serve-form" in capsys.readouterr().err


def test_an_error_of_the_program_is_code_70(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracefp4.gap.run as module

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "gap", broken)
    form = "http://127.0.0.1:9/v1?model=m"
    file = write(tmp_path / "q.jsonl", 2)
    assert command("--train-form", form, "--serve-form", form, "--inquiries", file, "--out", tmp_path / "o") == 70


def test_dry_run_asks_nothing_and_tells_the_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "q.jsonl", 100)
    url = "http://127.0.0.1:9/v1"
    arguments = ["--train-form", f"{url}?model=t&price_in=1&price_out=10", "--serve-form", f"{url}?model=s"]
    arguments += ["--inquiries", file, "--samples", 2, "--max-new-tokens", 50, "--max-drop", "2%", "--dry-run"]
    assert command(*arguments, "--out", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "200 requests" in shown
    assert "at most 10,000 out" in shown
    assert "at most 0.10" in shown
    assert "cost unknown" in shown
    assert "the gate needs about" in shown
    assert not (tmp_path / "out").exists()
    assert command(*arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["sides"]["train"]["cost"] == pytest.approx(0.1003, abs=0.01)


class Page(HTMLParser):
    """Tags, texts, and what a browser would fetch or run."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.fetched: list[str] = []
        self.handlers: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "data", "srcset") and not (value or "").startswith(("#", "data:,")):
                self.fetched.append(f"{tag} {name}={value}")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page made of hostile prompts, answers and ids, and of a server that repeats the key."""
    tmp = tmp_path_factory.mktemp("page")
    rows = [
        {"id": f"{HOSTILE}{i}", "prompt": HOSTILE, "answer": "right", "check": "contains", "category": HOSTILE}
        for i in range(12)
    ]
    (tmp / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")

    def script(body: dict[str, Any], n: int) -> Any:
        if body["model"] == "t":
            return f"right {HOSTILE}"
        return Bad(400, f"{HOSTILE} {KEY}".encode()) if n % 4 == 0 else HOSTILE

    os.environ["GAP_TEST_KEY"] = KEY
    try:
        with fake_server(script) as server:
            forms = [f"{server.url}?model={name}&key_env=GAP_TEST_KEY" for name in "ts"]
            given = ["--train-form", forms[0], "--serve-form", forms[1], "--inquiries", tmp / "q.jsonl"]
            code = command(*given, "--out", tmp / "out", "--skip-broken", "--max-drop", "2%")
    finally:
        del os.environ["GAP_TEST_KEY"]
    assert code in (1, 2)
    return tmp / "out"


def test_page_needs_nothing_and_runs_nothing_of_what_models_wrote(hostile: Path) -> None:
    page = Page((hostile / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "img", "iframe", "object"} & set(page.tags)
    assert page.fetched == page.handlers == []
    assert HOSTILE in page.text
    for words in (
        "Deployment check",
        "Decision",
        "signature",
        "lost",
        "What is missing",
        "1 row of the file",
        "of 12 inquiries are compared",
    ):
        assert words in page.text
    assert page.tags.count("article") == len((hostile / "flips.jsonl").read_text().splitlines())


def test_the_key_is_in_no_file(hostile: Path) -> None:
    for path in hostile.iterdir():
        assert KEY.encode() not in path.read_bytes()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [360, 1280])
def test_page_opens_in_a_browser_and_fits(hostile: Path, width: int, tmp_path: Path) -> None:
    """Its content is as wide as the window at most; nothing of the hostile text ran."""
    source = (hostile / "report.html").read_text(encoding="utf-8")
    probe = "<script>document.title='W'+document.documentElement.scrollWidth+' '+document.images.length</script></body>"
    opened = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", source).replace("</body>", probe)
    frame = tmp_path / "p.html"
    frame.write_text(opened, encoding="utf-8")
    # A window of Chromium is at least 500 px wide: a frame in it can be narrower.
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<iframe src="p.html" width="{width}" onload="document.title=this.contentDocument.title"></iframe>',
        encoding="utf-8",
    )
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    done = subprocess.run(
        ["chromium", *options, f"--user-data-dir={tmp_path}/u", outer.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"<title>W(\d+) (\d+)</title>", done.stdout)
    assert found is not None, done.stderr[-500:]
    assert int(found[1]) <= width
    assert found[2] == "0"


def test_a_signal_stops_it_and_resume_goes_on(tmp_path: Path) -> None:
    file, out = write(tmp_path / "q.jsonl", 40), tmp_path / "out"

    def script(body: dict[str, Any], n: int) -> Any:
        return "right" if n < 20 or n > 30 else Bad(hang=20.0)

    with fake_server(script) as server:
        form = f"{server.url}?model=m"
        arguments = ["gap", "--train-form", form, "--serve-form", form, "--inquiries", str(file), "--out", str(out)]
        process = subprocess.Popen([sys.executable, "-m", "tracefp4", *arguments], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        answers = out / "answers-train.jsonl"
        while time.monotonic() < deadline and (not answers.exists() or answers.read_text().count("\n") < 20):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=15)
        assert process.returncode == 143, said
        assert "--resume" in said
        assert "Traceback" not in said
        assert answers.read_text().count("\n") >= 20
        for _ in range(40 - len(server.requests)):
            server.requests.append({})  # the script's count goes past what hangs
        assert command(*arguments[1:], "--resume") == 0
    assert json.loads((out / "gap.json").read_text())["inquiries"]["compared"] == 40
