"""A dense Qwen3 through both paths: agreement, guidance, updates, resume and the weights it gives back."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import make_engine, tiny_dense_config, tiny_model, tiny_recipe, tiny_requests, tiny_weights
from tracefp4.errors import TracefpError
from tracefp4.guidance.store import MemoryStore
from tracefp4.methods import get_method, list_methods
from tracefp4.rollout.model import ModelShape
from tracefp4.train.trainer import GRPOTrainer, TrainConfig
from tracefp4.types import RolloutBatch, Trajectory

METHODS = [m.name for m in list_methods()]


@functools.cache
def _rollout(method: str, dtype: str, tied: bool) -> tuple[list[Trajectory], MemoryStore]:
    store = MemoryStore()
    engine = make_engine(method, dtype, config=tiny_dense_config(tie_word_embeddings=tied), store=store)
    return engine.generate(tiny_requests(16, stop=True, probe_every=4)), store


def rollout(method: str, dtype: str, tied: bool = True) -> tuple[RolloutBatch, MemoryStore]:
    trajectories, store = _rollout(method, dtype, tied)
    fresh = [replace(t, group=i // 4, reward=float(i % 4 == i // 4 % 4)) for i, t in enumerate(trajectories)]
    return RolloutBatch(fresh, 0), store


def make_trainer(method: str, dtype: str, store: MemoryStore, tied: bool = True, **config: Any) -> GRPOTrainer:
    model = tiny_model(tiny_dense_config(tie_word_embeddings=tied))
    settings = TrainConfig(**{"updates_per_rollout": 2, "dtype": dtype, "lr": 1e-3, **config})
    return GRPOTrainer(model, tiny_recipe(method, 2), get_method(method).forward, settings, store)


def state_of(trainer: GRPOTrainer) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in trainer.state()[0].items()}


# -- the two paths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_unquantized_fp32_paths_agree(tied: bool) -> None:
    """And the engine agrees with stock transformers: FP32 sums in another order, log-probs to about 1e-6."""
    batch, store = rollout("bf16", "float32", tied)
    metrics = make_trainer("bf16", "float32", store, tied).update(batch)
    assert 0 < metrics["mismatch/logprob_abs_diff_max"] <= 1e-5
    stock = tiny_model(tiny_dense_config(tie_word_embeddings=tied))
    for t in batch.trajectories[:4]:
        with torch.no_grad():
            logp = torch.log_softmax(stock(torch.tensor([t.token_ids])).logits[0], -1)
        taken = logp[len(t.prompt_ids) - 1 : -1].gather(-1, torch.tensor(t.response_ids)[:, None])[:, 0]
        assert (taken - t.logprobs).abs().max() <= 1e-5


def test_guidance_closes_the_gap() -> None:
    mean = {}
    for method in ("naive", "qat", "trace-all", "trace-full"):
        batch, store = rollout(method, "bfloat16")
        mean[method] = make_trainer(method, "bfloat16", store).update(batch)["mismatch/logprob_abs_diff_mean"]
    assert mean["trace-all"] < mean["qat"] / 5 < mean["naive"] / 5
    assert mean["trace-full"] < mean["qat"] / 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_codes_hit_the_rollouts_slots(dtype: str) -> None:
    batch, store = rollout("trace-full", dtype)
    metrics = make_trainer("trace-full", dtype, store).update(batch)
    assert metrics["code_mismatch/after"] == metrics["scale_mismatch/after"] == metrics["d_act/after"] == 0
    sites = {name.split("/")[2] for name in metrics if name.startswith("code_mismatch/before/")}
    assert sites == {"expert_input", "key", "value"}
    assert metrics["guidance/guided_share"] == 1


# -- the update ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str) -> None:
    dtype = get_method(method).dtype or "bfloat16"
    batch, store = rollout(method, dtype)
    assert all(t.routed_experts is None for t in batch.trajectories)
    trainer = make_trainer(method, dtype, store)
    before = state_of(trainer)
    metrics = trainer.update(batch)
    assert all(math.isfinite(v) for v in metrics.values())
    assert metrics["train/grad_norm"] > 0
    assert not any(name.startswith("router/") for name in metrics)
    for name, master in state_of(trainer).items():
        if name.startswith("master."):
            assert not torch.equal(master, before[name]), f"{name} was not trained"


def spy_guided_rows(trainer: GRPOTrainer) -> Counter[tuple[int, str, int]]:
    """How often each (micro-batch, site, layer) was rounded under a record of its own."""
    seen: Counter[tuple[int, str, int]] = Counter()
    original = trainer.context.round_site

    def spy(site: str, layer: int, x: Tensor) -> Tensor:
        mb = trainer.context.current
        assert mb is not None
        seen[mb.key, site, layer] += (site, layer) in mb.guidance
        return original(site, layer, x)

    trainer.context.round_site = spy  # type: ignore[method-assign]
    return seen


def test_gradient_checkpointing_changes_nothing() -> None:
    """And the recomputation rounds by each micro-batch's own guidance: old log-probs, forward, forward again; the first
    mini-batch's old log-probs are of the forward that trains it."""
    results = []
    for checkpointing, runs in ((False, 2), (True, 3)):
        batch, store = rollout("trace-all", "bfloat16")
        settings = {"gradient_checkpointing": checkpointing, "micro_batch_tokens": 100}
        trainer = make_trainer("trace-all", "bfloat16", store, **settings)
        seen = spy_guided_rows(trainer)
        metrics = trainer.update(batch)
        results.append((metrics, state_of(trainer)))
        assert len(seen) == metrics["train/micro_batches"] * 3 * 2
        assert set(seen.values()) == {runs - 1, runs}
    assert results[0][0] == results[1][0]
    for name, t in results[0][1].items():
        assert torch.equal(t, results[1][1][name]), name


def test_a_resumed_trainer_goes_on_bit_for_bit() -> None:
    batch, store = rollout("trace-all", "bfloat16")
    unbroken = make_trainer("trace-all", "bfloat16", store)
    unbroken.update(batch)
    tensors, counters = {k: v.clone() for k, v in unbroken.state()[0].items()}, unbroken.state()[1]
    resumed = make_trainer("trace-all", "bfloat16", store)
    resumed.load_state(tensors, counters)
    assert unbroken.update(rollout("trace-all", "bfloat16")[0]) == resumed.update(rollout("trace-all", "bfloat16")[0])
    for name, t in state_of(unbroken).items():
        assert torch.equal(t, state_of(resumed)[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_updated_weights_load_into_the_engine(tied: bool) -> None:
    batch, store = rollout("bf16", "float32", tied)
    trainer = make_trainer("bf16", "float32", store, tied, lr=1e-2)
    trainer.update(batch)
    names = [name for name, _ in trainer.named_weights()]
    assert set(names) | {"lm_head.weight"} == set(tiny_weights(tiny_dense_config()))
    assert ("lm_head.weight" in names) != tied
    engine = make_engine("bf16", "float32", config=tiny_dense_config(tie_word_embeddings=tied), store=store)
    engine.update_weights(trainer.named_weights(), trainer.version)
    requests = [replace(r, request_id=f"new{tied}{r.request_id}") for r in tiny_requests(4)]
    again = RolloutBatch(
        [replace(t, group=0, reward=float(i)) for i, t in enumerate(engine.generate(requests))], trainer.version
    )
    assert trainer.update(again)["mismatch/logprob_abs_diff_max"] <= 1e-5


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_window = 8"),
    ],
    ids=str,
)
def test_what_the_engine_has_no_path_for_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(TracefpError, match=message):
        ModelShape.from_hf(tiny_dense_config(**overrides))


def test_a_width_that_splits_no_block_is_refused_by_the_checkpoints_name() -> None:
    with pytest.raises(TracefpError, match="intermediate_size 100 is not a multiple of the nvfp4 block of 16"):
        make_engine("qat", config=tiny_dense_config(intermediate_size=100), load=False)
