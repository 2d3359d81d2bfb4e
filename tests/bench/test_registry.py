"""A case that fails is reported without a time and does not stop the others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tracefp4.bench.registry import Case, Result, derive, run_case, table, write
from tracefp4.config import ConfigError

CPU = torch.device("cpu")


def fixed_timer(run: Any, *, graph: bool = True) -> tuple[float, tuple[float, float], bool]:
    run()
    return 100.0, (90.0, 120.0), graph


def case(name: str, check: Any, **extra: Any) -> Case:
    return Case("op", name, 8_000_000, 2_000_000, lambda device: {"x": 1}, lambda i: i["x"], check, **extra)


def wrong(inputs: Any) -> str:
    raise AssertionError("off by 3")


def test_no_time_without_a_passed_check() -> None:
    result = run_case(case("bad", wrong), CPU, fixed_timer)  # type: ignore[arg-type]
    assert result.error == "AssertionError: off by 3"
    assert result.median_us is None
    assert "| bad | FAILED: AssertionError: off by 3 |" in table([result])


def test_shares_and_ratios_come_from_the_same_run(tmp_path: Path) -> None:
    good = run_case(case("good", lambda i: "equal bits", group="g"), CPU, fixed_timer)  # type: ignore[arg-type]
    slow = Result("op", "bf16", "g", True, 8_000_000, 0, median_us=300.0, quartiles_us=(1.0, 2.0), graph=True)
    derive([good, slow], {"copy_bytes_per_s": 4e11, "bf16_flop_per_s": 1e12})
    assert good.derived["bytes_per_s"] == 8e10
    assert good.derived["share_of_copy"] == pytest.approx(0.2)
    assert good.derived["speedup"] == pytest.approx(3.0)
    assert "| op | good | equal bits | 100.0 | 90.0-120.0 | 0.08 | 20 % | 0.0 | 2 % | 3.00 |" in table([good])
    write(tmp_path / "new", {"commit": "c"}, {"copy_bytes_per_s": 4e11}, [good, slow])
    stored = json.loads((tmp_path / "new" / "results.json").read_text())
    assert stored["environment"] == {"commit": "c"}
    assert [r["median_us"] for r in stored["results"]] == [100.0, 300.0]


def test_the_command_checks_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
    from tracefp4.bench.kernels import main

    assert main(["--check-only", "--only", "unpacking"]) == 0
    assert "equal bits" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--check-only"):
        main(["--device", "cpu"])
