"""The page as a file: self-contained, escaped, the same for the same runs; the exports; the command."""

import csv
import math
import re
import stat
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from report.runfolders import write_comparison, write_run
from tracefp4.cli import main
from tracefp4.report.html import report

VOID = {"meta", "link", "input", "br", "hr", "img"}
HOSTILE = "<script>alert(1)<\x01script>&\"'"


class Tree(HTMLParser):
    """Tags with attributes, text, and the shapes of each svg; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.plots: list[list[dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "svg" and "plot" in str(attributes.get("class")).split():
            self.plots.append([])
        if tag == "path" and self.plots:
            self.plots[-1].append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["report", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def page_of(path: Path, **options: Any) -> Tree:
    return Tree(report([path], **options)[0].read_text(encoding="utf-8"))


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    tree = page_of(write_comparison(tmp_path / "cmp"))
    for tag, attributes in tree.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)
        assert tag not in ("iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
    text = (tmp_path / "cmp" / "report.html").read_text(encoding="utf-8")
    assert "url(" not in text
    assert "@import" not in text
    assert re.findall(r"https?://[^\"'\s]*", text) == ["http://www.w3.org/2000/svg"]  # a name, for createElementNS
    [policy] = [a["content"] for t, a in tree.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ("default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'")


def test_every_plot_is_drawn_and_described(tmp_path: Path) -> None:
    tree = page_of(write_comparison(tmp_path / "cmp"))
    assert len(tree.plots) == sum(tag == "figure" for tag, _ in tree.tags) > 20
    for paths in tree.plots:
        lines = [str(path["d"]) for path in paths if str(path["class"]).startswith("line ")]
        assert lines
        for shape in (str(path["d"]) for path in paths):
            numbers = re.findall(r"-?(?:\d+\.?\d*|\.\d+)|nan|inf", shape, re.IGNORECASE)
            assert all(math.isfinite(float(number)) for number in numbers)
        for line in lines:
            points = [tuple(map(float, point.split(" "))) for point in re.split("[ML]", line)[1:]]
            assert points
            assert all(0 <= x <= 340 and 0 <= y <= 224 for x, y in points)
    named = [a for tag, a in tree.tags if tag == "svg" and a.get("role") == "img"]
    ids = [a["id"] for _, a in tree.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    assert all(reference in ids for a in named for reference in str(a["aria-labelledby"]).split())
    links = [str(a["href"])[1:] for tag, a in tree.tags if tag == "a"]
    assert set(links) <= set(ids)
    assert ("html", {"lang": "en"}) in tree.tags


def test_what_the_runs_hold_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    write_run(folder, HOSTILE, config={"<b>key</b>": {"x": "</script><img src=x onerror=alert(2)>"}})
    write_run(tmp_path / "other", change={0: {'<i>"metric': 1.0}})
    tree = page_of(tmp_path)
    assert [tag for tag, _ in tree.tags].count("script") == 1
    assert not {"b", "i", "img"} & {tag for tag, _ in tree.tags}
    assert "<script>alert(1)<\\x01script>&\"'" in tree.text
    assert "<b>key</b>.x" in tree.text
    assert '"</script><img src=x onerror=alert(2)>"' in tree.text
    assert '<i>"metric' in tree.text


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    written = []
    for place in ("a", "b"):
        root = tmp_path / place / "runs"
        for seed in (0, 1):
            write_run(root / f"seed{seed}", seed=seed, config={"run": {"steps": 6, "seed": seed, "eval_prompts": 0}})
            lines = (root / f"seed{seed}" / "metrics.jsonl").read_text().splitlines()
            few = [re.sub(r'"(?!reward|mismatch|eval|step)[^"]*": [^,}]*, ', "", line) for line in lines]
            (root / f"seed{seed}" / "metrics.jsonl").write_text("\n".join(few) + "\n")
        out = tmp_path / place
        files = report([root], out / "page.html", out / "png", out / "all.csv")
        assert len(files) > 4
        written.append({file.name: file.read_bytes() for file in files})
    assert written[0] == written[1]
    assert all(content for content in written[0].values())
    assert written[0]["reward-mean.png"].startswith(b"\x89PNG")


def test_csv_is_long_and_whole(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", steps=2)
    lines = (tmp_path / "mine" / "metrics.jsonl").read_text()
    (tmp_path / "mine" / "metrics.jsonl").write_text(lines + '{"reward/mean": null, "step": 2}\n')
    report([tmp_path / "mine"], csv=tmp_path / "sub" / "all.csv")
    with open(tmp_path / "sub" / "all.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["run", "method", "seed", "step", "metric", "value"]
    reward = [(row["step"], row["value"]) for row in rows if row["metric"] == "reward/mean"]
    assert reward == [("0", "0.3"), ("1", "0.31"), ("2", "")]
    assert {
        "run": "mine",
        "method": "trace",
        "seed": "0",
        "step": "1",
        "metric": "timing/train_seconds",
    }.items() <= next(row for row in rows if row["metric"] == "timing/train_seconds" and row["step"] == "1").items()
    assert [(row["step"], row["value"]) for row in rows if row["metric"] == "eval/pass_rate_end"] == [("3", "0.6")]


def test_a_single_step_and_an_unknown_method(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"reward/mean": 0.0, "train/loss": -1, "step": 0}\n')
    tree = page_of(tmp_path)
    assert "unknown" in tree.text
    assert len(tree.plots) == 1
    assert "0 at every step of every run that logs it: Reward, mean (reward/mean)." in tree.text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one")
    write_run(tmp_path / "two")
    assert command("one") == 0
    assert capsys.readouterr().out == "written: one/report.html\n"
    assert stat.S_IMODE((tmp_path / "one" / "report.html").stat().st_mode) == 0o644
    assert command("one", "two", "--csv", "all.csv") == 0
    assert capsys.readouterr().out == "written: report.html and 1 more\n"
    assert command("one", "--out", "deep/er/page.html") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.csv", "deep", "one", "report.html", "two"]
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere is no folder: give a run folder or one that holds some"),
        (["empty"], "no run found in empty: neither it nor a folder below it holds metrics.jsonl"),
        (["run", "--out", "empty"], "empty is a folder: give the name of a file to write"),
        (
            ["run", "--out", "run/config.json"],
            "run/config.json is there and no .html file: it is left alone, choose another name",
        ),
        (
            ["run", "--csv", "run/metrics.jsonl"],
            "run/metrics.jsonl is there and no .csv file: it is left alone, choose another name",
        ),
        (["run", "--out", "file/page.html"], "the folder file cannot be made: a file is in its place"),
        (["run", "--png", "file"], "the folder file cannot be made: a file is in its place"),
        (["run", "--out", "p.html", "--csv", "file/x.csv"], "the folder file cannot be made: a file is in its place"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert command(*arguments) == 2
    assert capsys.readouterr().err == f"error: {says}\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failing_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    target = tmp_path / "page.html"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tracefp4.files.os.fsync", full)
    assert command(str(tmp_path / "run"), "--out", str(target)) == 2
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]
