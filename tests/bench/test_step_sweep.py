"""benchmarks/h200_step_sweep.py over the kernels' references, and its candidates."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scripts import load_script
from tracefp4.bench import rollout

triton = pytest.importorskip("triton", reason="triton is not installed: its settings are not tested")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(Path(__file__).parents[2] / "benchmarks" / "h200_step_sweep.py")


def test_every_candidate_is_a_setting_of_its_own(script: ModuleType) -> None:
    every = script.candidates(132)
    assert next(iter(every)) == "default"
    attention = script.attention.AttentionConfig(64, 1, 2, programs=12 * 132, even=True, registers=168)
    experts = script.experts.ExpertsConfig(64, 48, 4, 4, down=128, registers=168)
    settings = {
        name: (replace(attention, **c.attention), replace(experts, **c.experts), c.pdl) for name, c in every.items()
    }
    assert len(set(settings.values())) == len(every)


def test_a_candidate_is_the_setting_while_its_steps_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [
        "--layers",
        "1",
        "--hidden",
        "128",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "64",
        "--experts",
        "4",
    ]
    more = ["--top-k", "2", "--expert-width", "128", "--vocab", "64", "--contexts", "40", "--steps", "2"]
    args = rollout.parse(["--device", "cpu", *sizes, *more, "--budget-gb", "0.002", "--max-seqs", "2", "--no-profile"])
    model = rollout.build(rollout.model_shape(args), rollout.recipe_of("fp4", args), args)
    seen = []
    measure = rollout.measure
    cpu = torch.device("cpu")

    def watched(*operands: object) -> None:
        seen.append((script.attention.default_config(True, 64, cpu), script.experts.default_config(True, 2.0)))
        measure(*operands)

    defaults = script.attention.default_config, script.experts.default_config
    for module in (script.attention, script.experts):
        monkeypatch.setattr(module, "INTERPRETED", True)  # settings of a CPU, which has no multiprocessors
    monkeypatch.setattr(rollout, "measure", watched)
    row = script.time_steps(model, script.Changes({"lazy": True}, {"parts": 4}), args, 1e9)
    assert row.error is None
    assert (seen[0][0].lazy, seen[0][1].parts) == (True, 4)
    assert (script.attention.default_config, script.experts.default_config) == defaults
    said = script.line("lazy", row, row)
    assert said.startswith("lazy ")
    assert "1.000 of the default" in said
    row.error = "OutOfMemoryError: 2 GiB\nmore"
    assert "FAILED: ['OutOfMemoryError: 2 GiB']" in script.line("lazy", row, row)
