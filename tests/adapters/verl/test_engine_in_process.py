"""verl's real FSDP2 engine on one gloo rank, without Ray. Skipped where verl is not installed (`make test-verl`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiny import tiny_checkpoint, tiny_config

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry

import verl_batches
from tracefp4.adapters.verl import engine as adapter
from tracefp4.adapters.verl.detached import CopyingActorWorker
from tracefp4.errors import TracefpError
from tracefp4.guidance import GuidanceError
from verl_batches import batch_of, check_code_mismatch, rollout, update


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("cpu:gloo", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), tiny_config())


def make_verl_engine(checkpoint: Path, method: str, url: Path, **changes: Any) -> Any:
    model = HFModelConfig(
        path=str(checkpoint),
        use_remove_padding=changes.get("use_remove_padding", False),
        enable_gradient_checkpointing=changes.get("enable_gradient_checkpointing", False),
        override_config={
            "attn_implementation": "eager",
            "model_config": {},
            "tracefp4": {"method": method, "guidance": {"url": str(url), "lost_after_steps": 1}},
        },
    )
    config = FSDPEngineConfig(
        strategy=changes.get("strategy", "fsdp2"), use_torch_compile=False, model_dtype="fp32", use_dynamic_bsz=False,
        micro_batch_size_per_gpu=3, infer_micro_batch_size_per_gpu=3,
    )  # fmt: skip
    optimizer = FSDPOptimizerConfig(lr=1e-2, total_training_steps=10)
    engine = EngineRegistry.new("language_model", "fsdp2", model, config, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def distance(engine: Any, trajectories: list[Any], recipe_hash: str) -> float:
    return verl_batches.distance(engine, batch_of(trajectories, recipe_hash), trajectories)


def measured(checkpoint: Path, method: str, url: Path) -> float:
    engine = make_verl_engine(checkpoint, method, url)
    return distance(engine, *rollout(method, url, engine.get_per_tensor_param()[0]))


def test_guidance_brings_the_sharded_trainer_to_the_rollout(checkpoint: Path, tmp_path: Path) -> None:
    distances = {m: measured(checkpoint, m, tmp_path / m) for m in ("bf16", "qat", "trace-all")}
    assert distances["trace-all"] <= 1.5 * distances["bf16"]
    assert distances["qat"] >= 3 * distances["bf16"]


def test_the_models_forward_runs_without_autocast(checkpoint: Path, tmp_path: Path) -> None:
    """On a GPU autocast would sum a token's experts into an FP32 tensor, which the rollout does not."""
    engine = make_verl_engine(checkpoint, "trace-all", tmp_path / "g")
    done, recipe_hash = rollout("trace-all", tmp_path / "g", engine.get_per_tensor_param()[0], n=3)
    seen = []
    for layer in engine.module.model.layers:
        layer.mlp.experts.register_forward_hook(
            lambda module, args, y: seen.append((torch.is_autocast_enabled("cpu"), y.dtype))
        )
    distance(engine, done, recipe_hash)
    assert seen == [(False, torch.bfloat16)] * len(engine.module.model.layers)


def test_an_update_trains_the_guided_forward_and_its_weights_are_quantized_anew(
    checkpoint: Path, tmp_path: Path
) -> None:
    engine = make_verl_engine(checkpoint, "trace-all", tmp_path / "g", enable_gradient_checkpointing=True)
    first, recipe_hash = rollout("trace-all", tmp_path / "g", engine.get_per_tensor_param()[0])
    batch = batch_of(first, recipe_hash)

    def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return model_output["log_probs"].values().mean(), {}

    with engine.train_mode():
        metrics = engine.train_batch(batch, loss_function=loss)["metrics"]
    assert metrics["guidance/guided_rows"].aggregate() == sum(t.num_rows for t in first)
    assert metrics["guidance/rows"].aggregate() == metrics["router/replayed_rows"].aggregate()
    assert metrics["grad_norm"] > 0
    # A stale cache of quantized weights would leave the trainer at the old policy.
    again, _ = rollout("trace-all", tmp_path / "h", engine.get_per_tensor_param()[0])
    moved = make_verl_engine(checkpoint, "trace-all", tmp_path / "h")
    moved.module.load_state_dict(engine.module.state_dict())
    assert distance(moved, again, recipe_hash) < 0.02
    assert distance(make_verl_engine(checkpoint, "trace-all", tmp_path / "h"), again, recipe_hash) > 0.05


def test_lost_guidance_ends_the_run(checkpoint: Path, tmp_path: Path) -> None:
    engine = make_verl_engine(checkpoint, "trace-all", tmp_path / "empty")
    lost, recipe_hash = rollout("trace-all", tmp_path / "elsewhere", engine.get_per_tensor_param()[0], n=3)
    with pytest.raises(GuidanceError, match=r"guidance is lost: 0 of \d+ rows .* missing"):
        distance(engine, lost, recipe_hash)


def test_another_recipe_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    engine = make_verl_engine(checkpoint, "trace-all", tmp_path / "g")
    other, recipe_hash = rollout("trace", tmp_path / "g", engine.get_per_tensor_param()[0], n=3)
    with pytest.raises(GuidanceError, match=r"rolled out under recipe .* trainer holds"):
        distance(engine, other, recipe_hash)


@pytest.mark.parametrize(
    ("changes", "key"), [({"strategy": "fsdp"}, "strategy=fsdp2"), ({"use_remove_padding": True}, "use_remove_padding")]
)
def test_what_cannot_work_is_refused_by_its_key(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(TracefpError, match=key):
        make_verl_engine(checkpoint, "trace", tmp_path / "g", **changes)


def test_a_float32_mode_needs_a_float32_trainer(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TracefpError, match=r"method fp32 computes in float32.*mixed_precision\.param_dtype=fp32"):
        make_verl_engine(checkpoint, "fp32", tmp_path / "g")


def test_without_settings_the_engine_is_verls_own(checkpoint: Path) -> None:
    assert adapter.TracefpFSDPEngine.__mro__[1].__module__.startswith("verl.")
    model = HFModelConfig(path=str(checkpoint), use_remove_padding=False, enable_gradient_checkpointing=False,
                          override_config={"attn_implementation": "eager"})  # fmt: skip
    config = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, model_dtype="fp32")
    engine = EngineRegistry.new(
        "language_model", "fsdp2", model, config, FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    assert isinstance(engine, adapter.TracefpFSDPEngine)
    assert engine.guided is None
    assert engine.module.config._attn_implementation == "eager"


def test_a_methods_own_loss_trains_through_verls_call_and_reports_its_figures(checkpoint: Path, tmp_path: Path) -> None:
    engine = make_verl_engine(checkpoint, "qarl", tmp_path / "g")
    done, recipe_hash = rollout("qarl", tmp_path / "g", engine.get_per_tensor_param()[0])
    figures = update(engine, done, recipe_hash, "tracefp4_tbpo")
    assert 0 <= figures["tbpo/dropped_share"] <= 1
    assert figures["tbpo/weight_mean"] != 1
    assert not [name for name in figures if name.endswith(("/sum", "/weight"))]


def test_a_method_whose_loss_verl_never_calls_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    engine = make_verl_engine(checkpoint, "qarl", tmp_path / "g")
    done, recipe_hash = rollout("qarl", tmp_path / "g", engine.get_per_tensor_param()[0], n=3)
    with pytest.raises(TracefpError, match=r"method qarl trains by its own loss.*loss_mode=tracefp4_tbpo"):
        update(engine, done, recipe_hash, "vanilla")


def test_code_mismatch_is_reported_per_site_and_layer(checkpoint: Path, tmp_path: Path) -> None:
    check_code_mismatch(partial(make_verl_engine, checkpoint), tmp_path)


def test_without_probes_only_routing_is_compared(checkpoint: Path, tmp_path: Path) -> None:
    engine = make_verl_engine(checkpoint, "trace-all", tmp_path / "g")
    done, recipe_hash = rollout("trace-all", tmp_path / "g", engine.get_per_tensor_param()[0], n=3)
    figures = update(engine, done, recipe_hash, "vanilla")
    assert not [name for name in figures if name.startswith(("code_mismatch", "scale_mismatch", "d_act"))]
    assert "router/topk_disagreement" in figures


def test_a_checkpoint_knows_its_recipe(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_verl_engine(checkpoint, "trace-all", tmp_path / "g")
    saved = tmp_path / "actor"
    engine.save_checkpoint(str(saved), None, 7, None)  # as verl's worker calls it
    assert json.loads((saved / "tracefp4.json").read_text())["version"] == 7
    make_verl_engine(checkpoint, "trace-all", tmp_path / "g").load_checkpoint(str(saved), None, False)
    assert "policy version 7 goes on under method trace-all" in capsys.readouterr().out
    other = make_verl_engine(checkpoint, "qat", tmp_path / "g")
    with pytest.raises(TracefpError, match=r"trained by method trace-all under recipe .* now says method qat"):
        other.load_checkpoint(str(saved))
    (saved / "tracefp4.json").write_text("{")
    with pytest.raises(TracefpError, match=r"tracefp4\.json is damaged"):
        other.load_checkpoint(str(saved))
    (saved / "tracefp4.json").unlink()
    other.load_checkpoint(str(saved))
    assert "trained without tracefp4 goes on under method qat" in capsys.readouterr().out


def test_weights_set_aside_on_the_cpu_do_not_move_with_the_updates(checkpoint: Path, tmp_path: Path) -> None:
    """separate_async takes old log-probs under the weights of the last synchronization; on the CPU verl copies none."""

    def moved(kind: type) -> float:
        """How far the restored weights are from the saved ones."""
        worker: Any = kind.__new__(kind)
        worker.config = SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"))
        worker._strategy_handlers = None
        worker.actor = SimpleNamespace(engine=make_verl_engine(checkpoint, "bf16", tmp_path / "g"))
        norm = worker.actor.engine.module.model.norm.weight
        before = norm.full_tensor().detach().clone()
        worker.save_model_to_cpu(0)
        with torch.no_grad():
            norm.add_(1.0)
        worker.save_model_to_cpu(1)
        worker.restore_model_from_cpu(0)
        distance = float((norm.full_tensor() - before).abs().max().detach())
        worker.restore_model_from_cpu(1)
        assert torch.equal(norm.full_tensor(), before + 1.0)
        return distance

    assert moved(CopyingActorWorker) == 0.0
    assert moved(DetachActorWorker) == 1.0  # where this fails, verl copies, and CopyingActorWorker may go
