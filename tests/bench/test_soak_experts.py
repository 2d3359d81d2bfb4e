"""benchmarks/soak_experts.py on the CPU: equal calls, and one that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import load_script

SCRIPT = Path(__file__).parents[2] / "benchmarks/soak_experts.py"
SMALL = ["--shape", "128,128,4,2", "--rows", "3,5", "--streams", "2", "--seconds", "0.01"]


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(SCRIPT)


def test_equal_calls_are_counted_and_pass(script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert script.main(SMALL) == 0
    out, err = capfd.readouterr()
    assert [line.split(":")[0] for line in out.splitlines()] == ["process 0, 3 rows", "process 0, 5 rows"]
    assert all("0 differ, 0 rows at most" in line and " 0 calls" not in line for line in out.splitlines())
    assert ("no GPU" in err) != torch.cuda.is_available()


def test_a_changed_bit_is_counted_by_call_and_row(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    weights = script.packed(4, 256, 128, "cpu"), script.packed(4, 128, 128, "cpu")
    case = script.Case(5, weights, 2, seed=0)
    case.call()
    right, case.reference = case.reference, case.reference.clone()
    case.reference[1:4, 0, 7] += 1
    case.call()
    case.reference = right
    case.call()
    assert (int(case.different), int(case.worst)) == (1, 3)
    assert script.summary([case], "here,") == 1
    assert "1 differ, 3 rows at most" in capsys.readouterr().out


def test_processes_run_side_by_side(script: Any) -> None:
    assert script.main([*SMALL, "--processes", "2"]) == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--shape", "256,256"], "--shape takes hidden, width, experts and top"),
        (["--processes", "0"], "--processes must be at least 1"),
        (["--rows", "4,0"], "--rows must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(script: Any, wrong: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        script.main(wrong)
    assert end.value.code == 2
    assert why in capsys.readouterr().err.splitlines()[-1]
