"""The bounds of `make test-verl`; runs without verl."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).parents[3] / "recipes" / "verl"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


acceptance, reward = load("acceptance"), load("sums_reward")


def lines(diff: float, share: float | None = None) -> list[dict[str, float]]:
    step = {acceptance.DIFF: diff} | ({} if share is None else {acceptance.SHARE: share})
    return [step, dict(step)]


def test_a_run_within_all_bounds_passes() -> None:
    steps = {"bf16": lines(0.001), "qat": lines(0.008), "trace": lines(0.0015, 0.995)}
    assert acceptance.broken_bounds(steps) == []


@pytest.mark.parametrize(
    ("mode", "changed", "words"),
    [
        ("trace", lines(0.0016, 1.0), "trace: 1.60 times"),
        ("trace", lines(0.001, 0.98), "trace: only 98.00% of the eligible rows"),
        ("trace", lines(0.001), "trace logged no guidance/guided_share"),
        ("qat", lines(0.002), "qat: 2.00 times"),
    ],
)
def test_every_bound_can_break(mode: str, changed: list[dict[str, float]], words: str) -> None:
    steps = {"bf16": lines(0.001), "qat": lines(0.008), "trace": lines(0.001, 1.0)} | {mode: changed}
    (sentence,) = acceptance.broken_bounds(steps)
    assert sentence.startswith(words)


def test_overrides_may_follow_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def run(folder: Path, mode: str, steps: int, overrides: list[str]) -> list[dict[str, float]]:
        asked.append((mode, steps, overrides[-2:]))
        return lines(0.001)

    monkeypatch.setattr(acceptance, "run", run)
    monkeypatch.setattr("sys.argv", ["acceptance.py", str(tmp_path), "--modes", "bf16", "a.b=1", "--steps", "2", "c=3"])
    with pytest.raises(SystemExit, match="0"):
        acceptance.main()
    assert asked == [("bf16", 2, ["a.b=1", "c=3"])]


def test_steps_are_read_from_verls_file_logger(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logged = [{"step": 0, "data": {"val/reward": 1.0}}, {"step": 1, "data": {acceptance.DIFF: 0.5}}]
    path.write_text("".join(json.dumps(line) + "\n" for line in logged))
    assert acceptance.read_metrics(path) == [{acceptance.DIFF: 0.5}]


@pytest.mark.parametrize(
    ("text", "score"), [("a14+27=41;#41", 1.0), ("#41<eos>#3", 1.0), ("#40", 0.0), ("41", 0.0), ("#4x", 0.0), ("", 0.0)]
)
def test_the_reward_of_running_sums(text: str, score: float) -> None:
    assert reward.compute_score("running_sums", text, "41") == score


def test_differences_of_asynchronous_shapes_are_not_compared_but_their_guided_rows_are() -> None:
    steps = {"bf16": lines(0.001), "trace": lines(0.9, 0.98)}
    (sentence,) = acceptance.broken_bounds(steps, lagging=True)
    assert sentence.startswith("trace: only 98.00%")


def test_a_shape_is_a_mode_and_ranks() -> None:
    for shape in acceptance.ALL:
        keys = acceptance.shape_overrides(shape)
        mode, _, ranks = shape.partition(":")
        assert f"trainer.n_gpus_per_node={ranks}" in keys
        assert ("ray_kwargs.ray_init.num_gpus=3" in keys) == (shape == "separate_async:2")
        assert any("agents.yaml" in key for key in keys) == (mode == "turns")
    for shape in ("sync", "async:1", "sync:0", "sync:x"):
        with pytest.raises(SystemExit, match="is no shape"):
            acceptance.shape_overrides(shape)
