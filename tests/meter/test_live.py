"""The live meter on tiny models: planted faults are found in their layer and site, a clean method is in the band."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

import kernel_case
from tiny import tiny_checkpoint, tiny_config, tiny_dense_config
from tracefp4.errors import TracefpError
from tracefp4.guidance.store import MemoryStore
from tracefp4.kernels.grouped_experts import ExpertMatrices, PackedExperts
from tracefp4.loop import RunConfig
from tracefp4.loop.parts import Parts, preflight
from tracefp4.meter.live.attribution import Attribution, Switched, causes_of
from tracefp4.meter.live.plan import LiveRequest, load_run, read_prompts
from tracefp4.meter.live.run import LiveResult, meter_live
from tracefp4.meter.live.switches import _matrices
from tracefp4.meter.page import render
from tracefp4.recipe import quantize_expert_weights
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.model import NativeExperts

SETTINGS = ["rollout.max_model_len=64", "sampling.max_new_tokens=12", "run.threads=1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("moe"), tiny_config())


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("dense"), tiny_dense_config())


def meter(
    path: Path, method: str, *settings: str, alter: Callable[[RolloutEngine], None] | None = None, **request: Any
) -> LiveResult:
    config = load_run(None, [*SETTINGS, *settings], str(path), method)
    return meter_live(LiveRequest(config, **{"count": 6, "samples": 1, **request}), alter=alter)


def site(result: LiveResult, name: str) -> Any:
    return next(s for s in result.attribution.sites if s.site == name)


def test_bf16_is_its_own_floor(checkpoint: Path) -> None:
    result = meter(checkpoint, "bf16")
    assert result.verdict.passed
    assert result.ratio[0] == 1
    assert result.full.mean == result.attribution.full > 0
    assert {s.site for s in result.attribution.sites} == {
        *("weights", "router", "logprob_mode", "batch_size", "trainer_kernel", "engine_kernel")
    }
    assert site(result, "weights").aligned_by_method
    assert result.attribution.layers == []
    json.dumps(result.as_dict())


def test_naive_has_its_causes_and_aligning_all_of_them_reaches_the_floor(checkpoint: Path) -> None:
    result = meter(checkpoint, "naive")
    assert not result.verdict.passed
    assert result.ratio[0] > 3
    assert result.attribution.clean < 0.5 * result.attribution.full
    open_sites = {s.site for s in result.attribution.sites if not s.aligned_by_method}
    assert {"weights", "codes", "down_input", "kv"} <= open_sites
    assert site(result, "router").aligned_by_method  # replayed by every method
    assert [s.layer for s in result.attribution.layers] == [-1, 0, 1]
    assert len(result.attribution.grid) == 1 + 2 * len(open_sites & {"weights", "codes", "scales", "down_input", "kv"})
    assert len(result.outliers) == 25
    worst = result.outliers[0]
    assert worst["abs_diff"] == pytest.approx(abs(worst["train"] - worst["rollout"]))
    assert {name: len(v) for name, v in worst["code_mismatch"].items()} == {"expert_input": 2, "key": 2, "value": 2}


def test_guided_codes_are_aligned_by_the_method(checkpoint: Path) -> None:
    result = meter(checkpoint, "trace-full", layers=False)
    for name in ("weights", "codes", "scales", "kv", "router"):
        assert site(result, name).aligned_by_method, name
        # Undone, each would cost something or nothing, but never align what is aligned.
    assert result.attribution.full == pytest.approx(result.attribution.clean, rel=0.05)


@pytest.mark.parametrize("layer", [0, 1])
def test_one_layers_weight_scale_wrong_in_the_rollout(checkpoint: Path, layer: int) -> None:
    def wrong(engine: RolloutEngine) -> None:
        matrices: Any = engine.model._layers[layer].gate_up
        matrices.epilogue_E *= 1.5

    result = meter(checkpoint, "trace-full", alter=wrong)
    assert not result.verdict.passed
    assert result.attribution.causes[0].startswith("weights: aligned")
    assert f"layer {layer} has" in result.attribution.causes[0]
    worst = max((g for g in result.attribution.grid if g.site == "weights"), key=lambda g: g.removed)
    assert worst.layer == layer
    assert worst.removed > 0.8 * (result.attribution.full - result.attribution.clean)


def test_one_experts_weights_wrong_in_the_rollout(checkpoint: Path) -> None:
    def wrong(engine: RolloutEngine) -> None:
        matrices: Any = engine.model._layers[1].gate_up
        matrices.epilogue_E[6] *= 3

    result = meter(checkpoint, "trace-full", "sampling.max_new_tokens=40", alter=wrong, layers=False)
    assert any(cause.startswith("expert 6 of layer 1: mean") for cause in result.attribution.causes)
    assert (result.experts[0].layer, result.experts[0].expert) == (1, 6)
    assert result.experts[0].inside > 2 * result.experts[0].outside
    assert "layer 1, expert 6" in render(result.as_dict())
    clean = meter(checkpoint, "trace-full", "sampling.max_new_tokens=40", layers=False)
    assert not any("expert" in cause for cause in clean.attribution.causes)


# -- on a GPU, over the kernels --------------------------------------------------------------------------------------


def test_over_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of "triton" over the kernels' references: what the meter reads of it is the same."""
    made = Parts.make_engine

    def references(parts: Parts, *arguments: Any) -> RolloutEngine:
        engine = made(parts, *arguments)
        assert engine.kernels is not None
        engine.model.backend = engine.kernels.pool.backend = "torch"  # type: ignore[attr-defined]
        return engine

    def wrong(engine: RolloutEngine) -> None:
        matrices: Any = engine.model._layers[1].gate_up
        matrices.epilogue.mul_(1.5)

    monkeypatch.setattr(Parts, "make_engine", references)
    path = tiny_checkpoint(tmp_path / "m", kernel_case.moe())
    settings = ("rollout.backend=triton", "rollout.max_num_seqs=8")
    result = meter(path, "trace-full", *settings, layers=False)
    assert result.facts["backend"] == "triton"
    for name in ("weights", "codes", "scales", "kv", "router"):
        assert site(result, name).aligned_by_method, name
    assert result.attribution.full == pytest.approx(result.attribution.clean, rel=0.05)
    plain = meter(path, "bf16", *settings, layers=False)
    assert abs(site(plain, "engine_kernel").removed) < plain.full.mean  # its prefill is the same but for roundings
    planted = meter(path, "trace-full", *settings, alter=wrong)
    assert planted.attribution.causes[0].startswith("weights: aligned")
    assert "layer 1 has" in planted.attribution.causes[0]


def test_weights_in_other_layouts() -> None:
    w = torch.randn(2, 128, 128, dtype=torch.bfloat16)
    blocks = quantize_expert_weights(w, "nvfp4", False)
    want = ExpertMatrices.quantized(blocks)
    packed = _matrices(PackedExperts.pack(blocks))
    assert torch.equal(packed, want.operand_EOI * want.epilogue_E[:, None, None])  # type: ignore[index]
    assert _matrices(w) is w
    codes = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(TracefpError, match=r'rollout\.backend="triton"'):
        _matrices(NativeExperts(codes, codes, codes))


def test_the_device_reaches_trainer_and_engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Reached(Exception):
        pass

    def to(module: Any, device: str) -> Any:
        asked.append(device)
        raise Reached

    monkeypatch.setattr(Qwen3MoeForCausalLM, "to", to)
    with pytest.raises(TracefpError, match=r"run\.device = cuda needs a GPU"):
        meter(checkpoint, "bf16", "run.device=cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for setting in ("auto", "cuda", "cpu"):
        with pytest.raises(Reached):
            meter(checkpoint, "bf16", f"run.device={setting}")
    assert asked == ["cuda", "cuda", "cpu"]
    config = load_run(None, [*SETTINGS, "run.device=cuda"], str(checkpoint), "bf16")
    engines: list[str] = []
    monkeypatch.setattr("tracefp4.loop.parts.RolloutEngine", lambda *arguments: engines.append(arguments[4]))
    preflight(config, training=False).make_engine(MemoryStore())
    assert engines == ["cuda"]


def test_the_layer_named_is_not_one_that_is_aligned_already() -> None:
    """Its bar is what undoing the alignment would cost, which can exceed the fault of another layer."""
    found = Attribution(full=5.0, clean=1.0)
    found.sites = [Switched("weights", "weights", None, 4.0, 2.0)]
    found.layers = [Switched("weights+codes", f"layer {i}", i, 1.0, 1.0) for i in range(3)]
    found.grid = [
        Switched("weights", "weights, layer 0", 0, 0.5, 0.5, aligned_by_method=True),
        Switched("weights", "weights, layer 1", 1, 4.0, 2.0),
        Switched("weights", "weights, layer 2", 2, 4.6, 5.0, aligned_by_method=True),
    ]
    (cause,) = causes_of(found)
    assert cause.endswith("layer 1 has 100 % of it")


def test_one_layers_kv_scale_wrong_in_the_rollout(dense: Path) -> None:
    def wrong(engine: RolloutEngine) -> None:
        pool: Any = engine.pool
        write = pool.write

        def doubled(layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return write(layer, slots, k, v * 1.5 if layer == 1 else v)

        pool.write = doubled

    result = meter(dense, "qat", alter=wrong)
    grid = max((g for g in result.attribution.grid), key=lambda g: g.removed)
    assert (grid.site, grid.layer) == ("kv", 1)


def test_other_weights_in_the_rollout(checkpoint: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", tiny_config(), seed=1)
    result = meter(checkpoint, "bf16", rollout=str(other))
    assert not result.verdict.passed
    assert result.attribution.causes[0].startswith("weights: aligned")
    assert result.attribution.clean < 0.05 * result.attribution.full


def test_log_prob_mode(checkpoint: Path) -> None:
    settings = "sampling.temperature=0.5"
    right = meter(checkpoint, "bf16", settings)
    assert right.verdict.passed
    assert site(right, "logprob_mode").aligned_by_method
    wrong = meter(checkpoint, "bf16", settings, train_logprobs="raw")
    assert not wrong.verdict.passed
    assert wrong.attribution.causes[0].startswith("log-prob mode")
    assert site(wrong, "logprob_mode").removed == pytest.approx(wrong.full.mean - right.full.mean)


def test_weights_are_put_back_after_every_switch(checkpoint: Path) -> None:
    first, again = (meter(checkpoint, "naive", layers=False, count=3).as_dict() for _ in range(2))
    assert first == again


def test_prompts_from_files(tmp_path: Path) -> None:
    class Parts:
        task = None

    def read(name: str, text: str, count: int = 9) -> list[Any]:
        path = tmp_path / name
        path.write_text(text)
        return read_prompts(LiveRequest(RunConfig(), prompts=path, count=count), Parts())  # type: ignore[arg-type]

    assert [p.text for p in read("a.txt", "1+1=\n\n2+2=\n")] == ["1+1=", "2+2="]
    chat = [{"role": "user", "content": "hi"}]
    rows = read("b.jsonl", json.dumps({"prompt": "x"}) + "\n" + json.dumps({"messages": chat}) + "\n")
    assert (rows[0].text, rows[1].messages) == ("x", tuple(chat))
    assert len(read("c.txt", "a\nb\nc\n", count=2)) == 2
    assert read("e.txt", "\ufeff1+1=\n")[0].text == "1+1="
    (tmp_path / "f.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(TracefpError, match=r"f\.txt is not UTF-8 \(at byte 3\)"):
        read_prompts(LiveRequest(RunConfig(), prompts=tmp_path / "f.txt"), Parts())  # type: ignore[arg-type]
    with pytest.raises(
        TracefpError, match=r"d\.jsonl line 1 has no prompt: it needs a text or chat messages in one of"
    ):
        read("d.jsonl", '{"answer": 3}\n')


def test_what_is_not_there_is_said(tmp_path: Path, checkpoint: Path) -> None:
    for arguments, message in (
        ((None, [], None, None), "nothing to measure: give a run folder or recipe, or --train DIR"),
        ((str(tmp_path / "no"), [], None, None), "there is neither a run folder nor a recipe at"),
        ((str(checkpoint), [], None, None), "is a checkpoint, not a run: use --train"),
        ((None, ["quant.kw=none"], str(checkpoint), None), "quant.kv"),
    ):
        with pytest.raises(TracefpError, match=message):
            load_run(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TracefpError, match="--count must be at least 1"):
        LiveRequest(RunConfig(), count=0)
