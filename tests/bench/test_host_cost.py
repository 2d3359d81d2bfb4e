"""benchmarks/host_cost.py on a tiny step."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from scripts import load_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host_cost.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


def test_counts_of_a_step(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mode's kernels, one at each rounded site; on one layer, which trace guides."""
    sizes = ["--responses", "16", "--samples", "4", "--tokens", "6", "--layers", "1", "--rounds", "1", "--top", "3"]
    out = tmp_path / "counts.json"
    assert script.main(["--modes", "bf16,trace", *sizes, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert "trace      update" in capsys.readouterr().out
    for mode in ("bf16", "trace"):
        rollout, update = (found[mode]["counts"][part] for part in ("rollout", "update"))
        assert rollout["by kernel"]["decode step"] >= 1
        assert rollout["by kernel"]["draw_tokens"] == 3
        assert update["operations"] > 100
        assert set(update["by part"]) == {"rest", "plan", "old log-probs", "optimizer steps"}
        assert found[mode]["seconds"]["update: plan"]["median"] > 0
    assert found["bf16"]["counts"]["update"]["kernels"] == 0
    rounded = found["trace"]["counts"]["update"]["by kernel"]
    forwards = rounded["guided_round_rows"] // 3  # the experts' input, K and V
    assert rounded["fake_quantize_rows"] == forwards  # the input of the down projection
    # Four updates, each forwarded with its gradient; all but the first have an old forward, too, and so have the groups
    # that do not teach.
    assert 7 <= forwards <= 8


def test_stand_ins_are_gone_afterwards(script: ModuleType) -> None:
    from tracefp4.nn import rounding
    from tracefp4.rollout.decode import DecodeRunner

    before = rounding.fake_quantize_rows, DecodeRunner._eager
    with script.on_a_cpu():
        assert rounding.fake_quantize_rows is not before[0]
    assert (rounding.fake_quantize_rows, DecodeRunner._eager) == before
