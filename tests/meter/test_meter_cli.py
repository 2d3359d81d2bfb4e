"""The command line: exit codes, files, and the page in a browser."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from meter.tracedata import Row, sampled, write_rows
from report.browser import CHROMIUM, Page
from tiny import tiny_checkpoint, tiny_config
from tracefp4.cli import main

SCRIPT = "<script>document.title = 'run'</script>"


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["meter", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    samples = sampled(3)
    rows = {
        "train": [Row(s.response, s.trainer(), {"step": i // 48, "sample_id": SCRIPT}) for i, s in enumerate(samples)],
        "rollout": [Row(s.response, s.rollout, {"sample_id": SCRIPT}) for s in samples],
        "shifted": [Row(s.response, np.roll(s.rollout, 1), {"sample_id": SCRIPT}) for s in samples],
    }
    names = {"train": "train", "rollout": "rollout", "shifted": "<script>shifted"}
    return {name: write_rows(folder / f"{names[name]}.jsonl", of_file) for name, of_file in rows.items()}


def test_a_clean_pair_passes(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("traces", files["train"], files["rollout"], "--out", tmp_path / "m") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "pass"
    assert "no fault was recognised" in out
    result = json.loads((tmp_path / "m" / "meter.json").read_text())
    assert result["kind"] == "traces"
    assert result["verdict"]["passed"] is True
    assert result["provenance"]["versions"]["numpy"] == np.__version__


def test_a_fault_fails_and_is_explained(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("traces", files["train"], files["shifted"], "--tokenizer", "builtin:sums-moe", "--out", tmp_path)
    assert run(*arguments) == 1
    out = capsys.readouterr().out
    assert "- log-probs of B stand 1 position too late (confidence 1.00)" in out
    assert "remedy: move B 1 earlier" in out
    result = json.loads((tmp_path / "meter.json").read_text())
    assert result["findings"][0]["kind"] == "shift"
    assert {"text", "text_before", "text_after"} <= set(result["outliers"][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("traces", "no.jsonl"), "no.jsonl does not exist"),
        (("traces", "FILE", "--floor", "0"), "--floor must be above 0"),
        (("traces", "FILE", "FILE", "--floor", "inf"), "--floor must be above 0 and finite"),
        (("traces", "FILE"), "with one file, each line needs both columns"),
        (("traces", "FILE", "FILE", "--tokenizer", "nowhere"), "--tokenizer nowhere is no folder"),
        (("nowhere",), "there is neither a run folder nor a recipe at nowhere"),
        (("--train", "nowhere"), "model.path nowhere does not exist"),
        (("live",), "nothing to measure"),
        (("--train", "builtin:sums-moe", "--method", "trase"), "unknown method 'trase'"),
        (("--train", "builtin:sums-moe", "--train-logprobs", "cooked"), "--train-logprobs must be processed or raw"),
        (("--train", "builtin:sums-moe", "--prompts", "no.jsonl"), "--prompts no.jsonl does not exist"),
    ],
)
def test_a_users_error_is_one_sentence(
    files: dict[str, Path],
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*(str(files["train"]) if a == "FILE" else a for a in arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_no_unicode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    lines = [{"id": f"\ud800{i}", "train_logprobs": [-1.0, -2.0], "rollout_logprobs": [-1.0, -2.0]} for i in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run("traces", path, "--out", tmp_path / "m") == 0
    result = json.loads((tmp_path / "m" / "meter.json").read_text(encoding="utf-8"))
    assert (result["inputs"][0]["file"], result["outliers"][0]["id"][0]) == ("caf?.jsonl", "?")
    assert "caf?.jsonl" in (tmp_path / "m" / "meter.html").read_text(encoding="utf-8")


def test_a_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    tiny_checkpoint(folder / "checkpoint", tiny_config())
    settings = {"method": {"name": "bf16"}, "rollout": {"max_model_len": 64}, "sampling": {"max_new_tokens": 8}}
    (folder / "config.json").write_text(json.dumps(settings))
    assert run(folder, "--count", 3, "--samples", 1, "--out", tmp_path / "m") == 0
    result = json.loads((tmp_path / "m" / "meter.json").read_text())
    assert result["method"] == "bf16"
    assert result["train"] == str(folder / "checkpoint")
    assert run(folder, "method.name=naive", "--count", 3, "--samples", 1, "--no-layers", "--out", tmp_path / "m") == 1


# -- the page ----------------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: the page is not looked at")


@pytest.fixture(scope="module")
def pages(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    run("traces", files["train"], files["shifted"], "--tokenizer", "builtin:sums-moe", "--out", folder / "traces")
    checkpoint = tiny_checkpoint(folder / "model", tiny_config())
    prompts = folder / "prompts.txt"
    prompts.write_text("1+2=\n3-4=\n")
    live = ("--train", checkpoint, "--method", "naive", "--prompts", prompts, "--out", folder / "live")
    run(*live, "rollout.max_model_len=64", "sampling.max_new_tokens=12", "sampling.temperature=0.8")
    return {name: folder / name / "meter.html" for name in ("traces", "live")}


@needs_browser
@pytest.mark.parametrize("kind", ["traces", "live"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_the_page_needs_nothing_but_itself(
    tab: Page, pages: dict[str, Path], kind: str, width: int, dark: bool
) -> None:
    tab.open(pages[kind], width, dark=dark)
    assert tab.requests == [pages[kind].resolve().as_uri()]
    assert tab.errors == []
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate("document.title").startswith("tracefp4 meter")  # no script of the traces ran
    assert tab.evaluate("document.querySelector('.verdict').className") == "verdict fail"
    shapes = tab.evaluate("[...document.querySelectorAll('svg')].map((s) => s.getBoundingClientRect().width)")
    assert len(shapes) > 3
    assert all(w > 0 for w in shapes)


def test_what_files_say_stays_text(pages: dict[str, Path]) -> None:
    page = pages["traces"].read_text()
    assert SCRIPT not in page
    assert "<script>shifted" not in page
    assert "&lt;script&gt;shifted.jsonl" in page
