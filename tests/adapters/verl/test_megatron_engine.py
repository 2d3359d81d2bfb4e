"""verl's real Megatron engine on one gloo rank: its forward, data parallelism and distributed optimizer, over a
stand-in for Megatron-Bridge. Skipped where megatron-core or verl is not installed (`make test-megatron`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("megatron.core", reason="megatron-core is not installed (make test-megatron)")
pytest.importorskip("verl", reason="verl is not installed (make test-megatron)")

from hydra import compose, initialize_config_dir
from verl.trainer.config import CheckpointConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, MtpConfig
from verl.workers.engine.base import EngineRegistry

import fake_bridge
import mcore_cpu
import verl_batches
from tiny import tiny_checkpoint, tiny_config
from tracefp4.adapters.megatron.prepare import unwrapped
from tracefp4.adapters.verl import engine as fsdp
from tracefp4.adapters.verl import megatron as adapter
from tracefp4.adapters.verl import plugin  # noqa: F401  registers the engines
from tracefp4.adapters.verl.settings import read_settings
from tracefp4.errors import TracefpError
from tracefp4.guidance import GuidanceError
from tracefp4.guidance.disk import ShardStore
from verl_batches import batch_of, check_code_mismatch, rollout, update

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = pytest.mark.parametrize("packed", [True, False], ids=["thd", "bshd"])


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    bridges = fake_bridge.install()
    with mcore_cpu.megatron(tmp_path_factory.mktemp("group") / "rendezvous"):
        yield
    for name in bridges:
        del sys.modules[name]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), tiny_config())


def verl_configs(checkpoint: Path, override: dict[str, Any], model: Any = None, **changes: Any) -> tuple[Any, Any]:
    model_config = HFModelConfig(
        path=str(checkpoint), enable_gradient_checkpointing=False, override_config=override, **(model or {})
    )
    fields = {"use_remove_padding": True, "expert_tensor_parallel_size": 1, **changes}
    return model_config, McoreEngineConfig(
        use_dynamic_bsz=False, micro_batch_size_per_gpu=3, infer_micro_batch_size_per_gpu=3, **fields
    )


def ours(method: str, url: Path) -> dict[str, Any]:
    return {"model_config": {}, "tracefp4": {"method": method, "guidance": {"url": str(url), "lost_after_steps": 1}}}


def make_verl_engine(checkpoint: Path, method: str, url: Path, **changes: Any) -> Any:
    configs = verl_configs(checkpoint, ours(method, url), **changes)
    optimizer = McoreOptimizerConfig(lr=1e-2, total_training_steps=10, lr_decay_steps=10)
    engine = EngineRegistry.new("language_model", "megatron", *configs, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def distance(engine: Any, trajectories: list[Any], recipe_hash: str) -> float:
    return verl_batches.distance(engine, batch_of(trajectories, recipe_hash, use_remove_padding=True), trajectories)


@LAYOUTS
def test_guidance_brings_megatron_to_the_rollout(checkpoint: Path, tmp_path: Path, packed: bool) -> None:
    distances = {}
    for method in ("bf16", "qat", "trace-all"):
        url = tmp_path / method
        engine = make_verl_engine(checkpoint, method, url, use_remove_padding=packed)
        distances[method] = distance(engine, *rollout(method, url, engine.get_per_tensor_param()[0]))
    assert distances["trace-all"] <= 1.5 * distances["bf16"]
    assert distances["qat"] >= 3 * distances["bf16"]


def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return model_output["log_probs"].values().mean(), {}


@LAYOUTS
def test_an_update_trains_the_guided_forward_and_its_weights_are_quantized_anew(
    checkpoint: Path, tmp_path: Path, packed: bool
) -> None:
    engine = make_verl_engine(checkpoint, "trace-all", tmp_path / "g", use_remove_padding=packed)
    first, recipe_hash = rollout("trace-all", tmp_path / "g", engine.get_per_tensor_param()[0])
    with engine.train_mode():
        metrics = engine.train_batch(batch_of(first, recipe_hash, use_remove_padding=True), loss_function=loss)[
            "metrics"
        ]
    assert metrics["guidance/guided_rows"].aggregate() == sum(t.num_rows for t in first)
    assert metrics["guidance/rows"].aggregate() == metrics["router/replayed_rows"].aggregate()
    assert metrics["grad_norm"] > 0
    # A stale cache of quantized weights would leave the trainer at the old policy.
    again, _ = rollout("trace-all", tmp_path / "g2", engine.get_per_tensor_param()[0])
    engine.guided.builder.store = ShardStore(str(tmp_path / "g2"))
    assert distance(engine, again, recipe_hash) < 0.02
    assert distance(make_verl_engine(checkpoint, "trace-all", tmp_path / "g2"), again, recipe_hash) > 0.05


def test_recomputed_micro_batches_give_the_same_gradients(checkpoint: Path, tmp_path: Path) -> None:
    """Also where Megatron's data parallelism reduces gradients and gathers parameters meanwhile."""
    norms = []
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    for recompute, ddp in (({}, {}), (FULL_RECOMPUTE, {}), (FULL_RECOMPUTE, overlap)):
        engine = make_verl_engine(
            checkpoint,
            "trace-all",
            tmp_path / "g",
            override_transformer_config=dict(recompute),
            override_ddp_config=ddp,
        )
        if not norms:
            done, recipe_hash = rollout("trace-all", tmp_path / "g", engine.get_per_tensor_param()[0])
        with engine.train_mode():
            norms.append(
                engine.train_batch(batch_of(done, recipe_hash, use_remove_padding=True), loss_function=loss)["metrics"][
                    "grad_norm"
                ]
            )
        assert engine.guided.context.keep_weights == (not recompute)
        assert engine.guided.context.current is None
    assert norms[0] == norms[1] == norms[2] > 0


@LAYOUTS
def test_a_methods_own_loss_trains_through_verls_call_and_reports_its_figures(
    checkpoint: Path, tmp_path: Path, packed: bool
) -> None:
    engine = make_verl_engine(checkpoint, "qarl", tmp_path / "g", use_remove_padding=packed)
    done, recipe_hash = rollout("qarl", tmp_path / "g", engine.get_per_tensor_param()[0])
    figures = update(engine, done, recipe_hash, "tracefp4_tbpo", packed)
    assert 0 <= figures["tbpo/dropped_share"] <= 1
    assert figures["tbpo/weight_mean"] != 1
    assert not [name for name in figures if name.endswith(("/sum", "/weight"))]


def test_a_method_whose_loss_verl_never_calls_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    engine = make_verl_engine(checkpoint, "triage", tmp_path / "g")
    done, recipe_hash = rollout("triage", tmp_path / "g", engine.get_per_tensor_param()[0], n=3)
    with pytest.raises(TracefpError, match=r"method triage trains by its own loss.*loss_mode=tracefp4_triage"):
        update(engine, done, recipe_hash, "vanilla", use_remove_padding=True)


@LAYOUTS
def test_code_mismatch_is_reported_per_site_and_layer(checkpoint: Path, tmp_path: Path, packed: bool) -> None:
    check_code_mismatch(partial(make_verl_engine, checkpoint, use_remove_padding=packed), tmp_path, packed)


def test_the_recipe_of_the_trained_model_is_known_to_the_weight_sync(checkpoint: Path, tmp_path: Path) -> None:
    engine = make_verl_engine(checkpoint, "trace", tmp_path / "g")
    assert isinstance(engine, adapter.TracefpMegatronEngine)
    assert fsdp.recipe_hash == engine.guided.recipe.hash


def test_lost_guidance_ends_the_run(checkpoint: Path, tmp_path: Path) -> None:
    engine = make_verl_engine(checkpoint, "trace-all", tmp_path / "empty")
    lost, recipe_hash = rollout("trace-all", tmp_path / "elsewhere", engine.get_per_tensor_param()[0], n=3)
    with pytest.raises(GuidanceError, match=r"guidance is lost: 0 of \d+ rows .* missing"):
        distance(engine, lost, recipe_hash)
    assert engine.guided.context.current is None


def test_another_recipe_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    engine = make_verl_engine(checkpoint, "trace-all", tmp_path / "g")
    other, recipe_hash = rollout("trace", tmp_path / "g", engine.get_per_tensor_param()[0], n=3)
    with pytest.raises(GuidanceError, match=r"rolled out under recipe .* trainer holds"):
        distance(engine, other, recipe_hash)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"vanilla_mbridge": True}, "actor.megatron.vanilla_mbridge=False"),
        ({"use_megatron_fsdp": True}, "actor.megatron.use_megatron_fsdp=False"),
        ({"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 64}, "megatron.dynamic_context_parallel"),
        ({"dtype": "float16"}, "actor.megatron.dtype=bfloat16"),
        ({"use_fused_kernels": True}, "model.use_fused_kernels=False"),
        ({"expert_tensor_parallel_size": 2}, "megatron.expert_tensor_parallel_size=1"),
        (
            {"expert_tensor_parallel_size": None, "tensor_model_parallel_size": 2},
            "megatron.expert_tensor_parallel_size=1",
        ),
        ({"model": {"lora": {"rank": 8}}}, "model.lora.rank=0"),
        ({"model": {"mtp": MtpConfig(enable=True)}}, "model.mtp.enable=False"),
        ({"router_replay": "R3"}, r"router_replay.mode=disabled \(the guided forward replays"),
        ({"qat": True}, "megatron.qat.enable=False"),
        (
            {"override_transformer_config": {"moe_shared_expert_overlap": True}},
            "actor.megatron.override_transformer_config.moe_shared_expert_overlap=False",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused_by_its_key(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    if "router_replay" in changes:
        changes = {"router_replay": adapter_config("EngineRouterReplayConfig")(mode="R3")}
    if "qat" in changes:
        changes = {"qat": adapter_config("QATEngineConfig")(enable=True)}
    with pytest.raises(TracefpError, match=key):
        make_verl_engine(checkpoint, "trace", tmp_path / "g", **changes)


def adapter_config(name: str) -> Any:
    from verl.workers.config import engine

    return getattr(engine, name)


def test_the_settings_in_the_docs_compose_and_are_accepted(tmp_path: Path) -> None:
    section = (Path(__file__).parents[3] / "docs" / "verl.md").read_text().partition("\n## Megatron\n")[2]
    (tmp_path / "docs.yaml").write_text(section.partition("```yaml\n")[2].partition("```")[0])
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("docs").actor_rollout_ref
    settings = read_settings(config.model.override_config)
    assert settings is not None
    assert settings.method == "trace"
    assert config.actor.strategy == "megatron"
    engine_config = omega_conf_to_dataclass(config.actor.megatron)
    model_config = SimpleNamespace(
        hf_config=tiny_config(), lora=config.model.lora, mtp=config.model.mtp, use_fused_kernels=False
    )
    adapter._refuse_unsupported(settings, model_config, engine_config)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    dense = tiny_checkpoint(tmp_path / "dense")
    with pytest.raises(TracefpError, match=r"model type 'qwen3' is not supported under Megatron.*strategy=fsdp2"):
        make_verl_engine(dense, "trace", tmp_path / "g")


def test_a_float32_mode_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TracefpError, match=r"method fp32 computes in float32.*strategy=fsdp2"):
        make_verl_engine(checkpoint, "fp32", tmp_path / "g")


def test_another_megatron_is_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "__version__", "0.16.1")
    with pytest.raises(TracefpError, match=r"from 0\.18\.0 up to.* 0\.16\.1 is installed"):
        make_verl_engine(checkpoint, "trace", tmp_path / "g")


@pytest.mark.parametrize("reference", [False, True])
def test_without_settings_and_as_reference_the_engine_is_verls_own(
    checkpoint: Path, tmp_path: Path, reference: bool
) -> None:
    override = ours("trace", tmp_path / "g") if reference else {}
    configs = verl_configs(checkpoint, override, forward_only=reference)
    optimizer = McoreOptimizerConfig(lr=1e-2, total_training_steps=10, lr_decay_steps=10)
    engine = EngineRegistry.new("language_model", "megatron", *configs, optimizer, CheckpointConfig())
    engine.initialize()
    assert isinstance(engine, adapter.TracefpMegatronEngine)
    assert engine.guided is None
    layer = unwrapped(engine.module[0]).decoder.layers[0]
    assert type(layer.mlp).__module__.startswith("megatron.")
    assert layer.mlp.router.router_replay is None
