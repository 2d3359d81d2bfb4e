"""Every example runs, and prints what its docstring says."""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, tmp_path: Path
) -> str:
    """What an example prints, run as `python examples/NAME.py` from another folder than the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    path = EXAMPLES / f"{request.param}.py"
    monkeypatch.setattr("sys.argv", [str(path)])
    threads = torch.get_num_threads()
    runpy.run_path(str(path), run_name="__main__")
    torch.set_num_threads(threads)
    return capsys.readouterr().out


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


@pytest.mark.parametrize("printed", ["guided_round"], indirect=True)
def test_guided_round(printed: str) -> None:
    (nearest,), (guided,) = numbers(r"nearest ([\d.]+)%", printed), numbers(r"guided ([\d.]+)%", printed)
    assert nearest > 1
    assert guided < nearest / 20
    assert "record: 1.125 bits a value" in printed
    off = numbers(r"output off by (\S+) on", printed)
    assert off[1] < off[0] / 20
    norms = numbers(r"gradient norm ([\d.]+)", printed)
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize("printed", ["own_loop"], indirect=True)
def test_own_loop(printed: str) -> None:
    guided = numbers(r"trace-all, step \d: .*difference\| (\S+)", printed)
    nearest = numbers(r"qat, step \d: .*difference\| (\S+)", printed)
    assert len(guided) == len(nearest) == 2
    assert max(guided) < min(nearest) / 2


@pytest.mark.parametrize("printed", ["own_model"], indirect=True)
def test_own_model(printed: str) -> None:
    rewards = numbers(r"reward ([\d.]+);", printed)
    assert len(rewards) == 8
    assert rewards[-1] > 3 * rewards[0]
    off = [(float(a), float(b)) for a, b in re.findall(r"slots off ([\d.]+)% -> ([\d.]+)%", printed)]
    assert all(after < before / 4 for before, after in off)
    assert printed.endswith("saved and loaded again: 155,200 weights\n")


@pytest.mark.parametrize("printed", ["own_reward"], indirect=True)
def test_own_reward(printed: str) -> None:
    before, after = numbers(r"held-out reward \w+: ([\d.]+)", printed)
    assert after > before + 0.3


@pytest.mark.parametrize("printed", ["tool_use"], indirect=True)
def test_tool_use(printed: str) -> None:
    exchange = re.findall(r"^(environment|policy) +(.*)$", printed, re.M)
    assert [who for who, _ in exchange] == ["environment", "policy"] * (len(exchange) // 2)
    assert len(exchange) >= 4
    assert len({text for who, text in exchange if who == "environment"}) == 1
    (foreign,), (tokens,) = numbers(r"(\d+) of \d+ response", printed), numbers(r"of (\d+) response", printed)
    assert 0 < foreign < tokens
    assert "guided rows 1.00" in printed


@pytest.mark.parametrize("printed", ["gsm8k_style"], indirect=True)
def test_gsm8k_style(printed: str) -> None:
    assert "48 training and 12 held-out problems" in printed
    assert "check math, chosen by the answers" in printed
    assert re.findall(r"^reward (\S+) for", printed, re.M) == ["1.0", "0.0"]
    assert ", 0 dropped; pass rate " in printed


def test_the_page_on_the_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are one program; the comments on shapes are checked here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = torch.get_num_threads()
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/api.md").read_text(), re.M | re.S)
    page: dict[str, Any] = {}
    exec("\n".join(blocks), page)
    torch.set_num_threads(threads)
    blocks_of_x, record = page["blocks"], page["record"]
    shapes = [tuple(t.shape) for t in (blocks_of_x.codes, blocks_of_x.scales, blocks_of_x.encode_scale, record.payload)]
    assert shapes == [(5, 32), (5, 4), (5, 1), (5, 10)]
    assert page["guided"].all()
    assert page["x_train"].grad.unique().tolist() == [1.0]
    assert page["final"]["steps"] == 1
    assert (page["run_dir"] / "mine/config.json").exists()
    assert page["facts"]["differences"]["fp4"]["minus"] == "bf16"
    assert 0 < page["metrics"]["mismatch/logprob_abs_diff_mean"] < 0.1


def test_every_example_is_tested_short_and_says_how_to_run_it() -> None:
    tested = set(re.findall(r'"printed", \["(\w+)"\]', Path(__file__).read_text()))
    paths = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in paths} == tested
    for path in paths:
        text = path.read_text()
        assert text.startswith('"""')
        assert f"\n    python examples/{path.name}" in text
        assert text.count("\n") <= 80
