"""run.device, and that nothing on the way to a GPU stays on the host; tensors without memory stand in for a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.masking_utils
from torch import Tensor

from tiny import tiny_config, tiny_recipe
from tracefp4.config import ConfigError, load_config
from tracefp4.device import PLAN_WORTH, attention_for, least_busy, resolve_device, to_device, visible_gpus
from tracefp4.errors import TracefpError
from tracefp4.guidance import row_bytes
from tracefp4.guidance.store import SiteRows, TrajectoryGuidance
from tracefp4.loop import RunConfig, TrainingRun
from tracefp4.loop.parts import preflight
from tracefp4.loop.run import write_run_json
from tracefp4.nn import MicroBatch, TrainerForward, prepare_model
from tracefp4.report.provenance import differences
from tracefp4.saves import Position
from tracefp4.train.checkpoint import load_latest, save_state
from tracefp4.train.optimizer import MasterOptimizer
from tracefp4.train.slices import assemble

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
GUIDED = TrainerForward(weights=True, activations=True, kv=True, guided=True)


def demo(*overrides: str) -> RunConfig:
    return load_config("recipes/demo.toml", ["run.steps=1", *overrides], RunConfig)


@no_gpu
def test_a_gpu_that_is_missing_is_named_before_anything_is_read() -> None:
    with pytest.raises(TracefpError, match=r"run\.device = cuda needs a GPU, and torch .* set run.device to cpu"):
        TrainingRun(demo("run.device=cuda"))
    with pytest.raises(ConfigError, match=r"run\.device must be"):
        demo("run.device=gpu")
    assert resolve_device("auto") == "cpu"
    assert preflight(demo()).device == "cpu"


def test_auto_takes_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda"
    assert resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"
    assert preflight(demo()).device == "cuda"
    assert preflight(demo("run.device=cpu")).device == "cpu"


def test_engine_and_trainer_are_made_where_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from tracefp4.loop import parts

    made: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(parts, "GRPOTrainer", lambda *_, **settings: made.update(trainer=settings["device"]))
    whole = preflight(demo())
    monkeypatch.setattr(parts, "RolloutEngine", lambda *arguments: made.update(engine=arguments[4]))
    whole.make_engine(None)  # type: ignore[arg-type]
    whole.make_trainer(None)  # type: ignore[arg-type]
    assert made == {"engine": "cuda", "trainer": "cuda"}


def test_run_json_says_where_and_a_resumption_elsewhere_is_noticed(tmp_path: Path) -> None:
    write_run_json(preflight(demo("run.device=cpu")), tmp_path, Position())
    assert json.loads((tmp_path / "run.json").read_text())["device"] == "cpu"
    assert differences({"device": "cuda"}, {"device": "cpu"}) == "device cuda -> cpu"
    assert differences({}, {"device": "cpu"}) == ""


# -- on the way ---------------------------------------------------------------------------------------------------


def test_to_device_keeps_a_host_tensor_and_moves_others() -> None:
    x = torch.arange(3)
    assert to_device(x, "cpu") is x
    assert to_device(x, "meta").device.type == "meta"


def test_records_arrive_packed() -> None:
    recipe = tiny_recipe("trace-all", 2)
    sites = {}
    for site, width in (("expert_input", 64), ("key", 64), ("value", 64)):
        payload = torch.zeros(2, 5, row_bytes("nvfp4", recipe.bits, width), dtype=torch.uint8)
        scale = torch.ones(2, 5) if site == "expert_input" else torch.tensor(1.0)
        sites[site] = SiteRows(payload, scale)
    zeros = torch.zeros(5, dtype=torch.int32)
    record = TrajectoryGuidance(recipe.hash, recipe.bits, (0, 1), sites, zeros, zeros, torch.ones(5, dtype=torch.bool))
    widths = {"expert_input": 64, "key": 64, "value": 64}
    found = assemble([record], [record.valid], recipe, recipe.bits, (0, 1), widths, 6, device="meta")
    assert len(found) == 6
    for guidance in found.values():
        assert {t.device.type for t in (guidance.payload, guidance.encode_scale, guidance.valid)} == {"meta"}
        assert guidance.payload.shape == (6, 9 + 1)  # 64 bits of codes, 2 x 4 bits of scales in a byte each
        assert guidance.payload.dtype == torch.uint8


def test_a_state_of_another_device_is_written_and_read(tmp_path: Path) -> None:
    strided = torch.arange(6.0).view(2, 3).T
    save_state(tmp_path, 1, {"w": strided}, {"config": {}}, keep=1)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded[0]["w"], strided)


def test_forward_backward_and_gradients_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory, nothing can be read on the host: a number asked for, or a host tensor mixed in, raises."""
    # transformers looks for packed sequences once a forward, on the host; the kernels need memory.
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda positions: None)
    monkeypatch.setattr("tracefp4.nn.context.fake_quantize", lambda x, *_, **__: x.clone())
    rounded: list[Tensor] = []
    monkeypatch.setattr("tracefp4.nn.context.guided_round", lambda x, *_, **__: rounded.append(x) or x.clone())
    monkeypatch.setattr("tracefp4.nn.weights.fake_quantized_matrices", lambda ws, *_: [w.detach().clone() for w in ws])
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(tiny_config()).bfloat16()
        ids = torch.zeros(2, 8, dtype=torch.int64)
        experts = {i: (torch.zeros(16, 2, dtype=torch.int64), torch.ones(16, dtype=torch.bool)) for i in range(2)}
    context = prepare_model(model, tiny_recipe("trace-all", 2), GUIDED, products="grouped_mm")
    optimizer = MasterOptimizer(model, 1e-4, (0.9, 0.95), 1e-8, 0.0, 1.0)
    guidance = {(site, i): object() for site in ("expert_input", "key", "value") for i in range(2)}
    with context.armed(MicroBatch(0, guidance, experts)) as kwargs:  # type: ignore[arg-type]
        logits = model(input_ids=ids, use_cache=False, **kwargs).logits
        torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).mean().backward()
    optimizer.accumulate()
    assert len(rounded) == 6
    assert all(m.grad is not None and m.grad.device.type == "meta" for m in optimizer.masters)


@pytest.mark.parametrize(
    ("device", "scores", "left"), [("cuda", 1000, False), ("cuda", PLAN_WORTH, True), ("cpu", 1, True)]
)
def test_small_attention_on_a_gpu_does_without_plans(device: str, scores: int, left: bool) -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with attention_for(device, scores):
        assert torch.backends.cuda.cudnn_sdp_enabled() == left
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("named", "count", "found"),
    [(None, 0, []), (None, 2, ["0", "1"]), ("5, 3", 2, ["5", "3"]), ("", 0, []), ("GPU-a1,GPU-b2", 1, ["GPU-a1"])],
)
def test_gpus_are_named_as_the_environment_names_them(
    monkeypatch: pytest.MonkeyPatch, named: str | None, count: int, found: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == found


def test_the_next_process_gets_the_gpu_with_the_fewest() -> None:
    assert least_busy(["0", "1"], []) == "0"
    assert least_busy(["0", "1"], ["0"]) == "1"
    assert least_busy(["0", "1", "2"], ["0", "2", "1", "0"]) == "1"
    assert least_busy(["7"], []) is None
    assert least_busy([], []) is None
