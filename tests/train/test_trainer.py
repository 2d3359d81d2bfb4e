"""The RL step over real rollouts of a tiny model.

Rollouts are made once per (method, dtype, ...) and handed out as fresh copies; an update never writes to the store.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from tiny import make_engine, tiny_config, tiny_model, tiny_requests, tiny_weights
from tracefp4.formats import get_format
from tracefp4.guidance import decode
from tracefp4.guidance.store import MemoryStore
from tracefp4.methods import get_method
from tracefp4.nn import SiteObserver
from tracefp4.nn.attention import CAUSAL_NAME
from tracefp4.train.losses import LossTerms
from tracefp4.train.slices import RowCounts, assemble
from tracefp4.train.trainer import GRPOTrainer, TrainConfig
from tracefp4.types import RolloutBatch, Trajectory

GROUP = 4


def rewarded(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Groups of 4 in which one answer in four is right."""
    return [
        replace(t, group=i // GROUP, reward=float(i % GROUP == i // GROUP % GROUP)) for i, t in enumerate(trajectories)
    ]


@functools.cache
def _rollout(method: str, dtype: str, n: int, temperature: float) -> tuple[list[Trajectory], MemoryStore]:
    store = MemoryStore()
    engine = make_engine(method, dtype, store=store)
    requests = tiny_requests(n, temperature=temperature, stop=True, probe_every=4)
    return engine.generate(requests), store


def rollout(
    method: str, dtype: str = "float32", n: int = 12, temperature: float = 1.0
) -> tuple[RolloutBatch, MemoryStore]:
    trajectories, store = _rollout(method, dtype, n, temperature)
    return RolloutBatch(rewarded(trajectories), 0), store


def make_trainer(method: str, dtype: str, store: MemoryStore, temperature: float = 1.0, **config: Any) -> GRPOTrainer:
    model = tiny_model(tiny_config())
    m = get_method(method)
    recipe = make_engine(method, dtype, load=False, max_num_seqs=1).recipe
    settings = {"updates_per_rollout": 1, "dtype": dtype, **config}
    return GRPOTrainer(model, recipe, m.forward, TrainConfig(**settings), store, temperature=temperature)


def spy_losses(trainer: GRPOTrainer) -> list[LossTerms]:
    seen: list[LossTerms] = []
    original = trainer._loss

    def spy(*args: Any) -> LossTerms:
        seen.append(original(*args))
        return seen[-1]

    trainer._loss = spy  # type: ignore[method-assign]
    return seen


def spy_steps(trainer: GRPOTrainer) -> list[tuple[float, dict[str, Tensor]]]:
    """(learning rate, FP32 gradients by name) of each optimizer step."""
    seen: list[tuple[float, dict[str, Tensor]]] = []
    original, optimizer = trainer.optimizer.step, trainer.optimizer

    def spy(lr: float) -> float:
        names = [name for name, _ in trainer.model.named_parameters()]
        seen.append((lr, {n: m.grad.clone() for n, m in zip(names, optimizer.masters, strict=True)}))
        return original(lr)

    optimizer.step = spy  # type: ignore[method-assign]
    return seen


def weights(trainer: GRPOTrainer) -> dict[str, Tensor]:
    return {name: w.clone() for name, w in trainer.named_weights()}


# -- the two paths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["bf16", "qat", "trace", "trace-paper", "trace-full"])
def test_the_first_update_starts_at_ratio_one(method: str, dtype: str) -> None:
    """Old log-probs come from the same guided forward, so they are the same bits."""
    batch, store = rollout(method, dtype)
    trainer = make_trainer(method, dtype, store)
    terms = spy_losses(trainer)
    metrics = trainer.update(batch)
    assert metrics["train/ratio_mean"] == 1.0
    assert metrics["train/clip_frac"] == 0
    assert len(terms) == 1
    assert (terms[0].ratio == 1).all()
    assert all(math.isfinite(v) for v in metrics.values())
    assert metrics["train/grad_norm"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_broken_loss_moves_no_weight(dtype: str) -> None:
    """Its gradients are finite, so nothing else would hold it back; nor does any of them reach the next update."""
    batch, store = rollout("bf16", dtype)
    trainer = make_trainer("bf16", dtype, store)
    original, before = trainer._loss, weights(trainer)

    def broken(*args: Any) -> LossTerms:
        terms = original(*args)
        return replace(terms, loss=terms.loss + math.nan)

    trainer._loss = broken  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="the policy loss is nan; the update was not applied"):
        trainer.update(batch)
    assert all(torch.equal(w, before[name]) for name, w in weights(trainer).items())
    assert all(master.grad is None for master in trainer.optimizer.masters)


@pytest.mark.parametrize("method", ["trace", "trace-all", "trace-paper"])
def test_decoding_once_differs_only_after_the_weights_have_moved(method: str) -> None:
    def run(**config: Any) -> tuple[dict[str, float], list[LossTerms]]:
        batch, store = rollout(method)
        trainer = make_trainer(method, "float32", store, lr=1e-2, updates_per_rollout=2, **config)
        terms = spy_losses(trainer)
        return trainer.update(batch), terms

    anew, once = run(), run(decode="once")
    assert torch.equal(anew[1][0].ratio, once[1][0].ratio)
    assert not torch.equal(anew[1][1].ratio, once[1][1].ratio)
    assert anew[0]["mismatch/logprob_abs_diff_mean"] == once[0]["mismatch/logprob_abs_diff_mean"]
    assert all(math.isfinite(v) for v in once[0].values())


def test_quantized_weights_can_be_made_in_every_forward() -> None:
    def run(keep: bool) -> tuple[dict[str, float], dict[str, Tensor]]:
        batch, store = rollout("trace-all", "bfloat16")
        trainer = make_trainer(
            "trace-all", "bfloat16", store, lr=1e-2, updates_per_rollout=2, keep_quantized_weights=keep
        )
        metrics = trainer.update(batch)
        held = [m for m in trainer.model.modules() if m.__dict__.get("_tracefp4_weights")]
        assert bool(held) == keep
        return metrics, weights(trainer)

    kept, anew = run(True), run(False)
    assert kept[0] == anew[0]
    assert all(torch.equal(kept[1][name], anew[1][name]) for name in kept[1])


def test_padding_on_the_right_needs_no_mask() -> None:
    """What a GPU's forward leaves out: causal attention of a real token never reaches the padding behind it."""
    batch, store = rollout("bf16")
    trainer = make_trainer("bf16", "float32", store)
    (micro,) = trainer._micro_batches(batch.trajectories, RowCounts(), SiteObserver())
    assert not micro.batch.attention_mask.all()
    with torch.no_grad(), trainer.context.armed(micro.guidance) as kwargs:
        ids, mask = micro.batch.input_ids, micro.batch.attention_mask
        without, with_mask = (trainer.model(ids, attention_mask=m, **kwargs).logits[mask] for m in (None, mask))
    torch.testing.assert_close(without, with_mask, rtol=1e-4, atol=1e-5)


def test_without_a_mask_nobody_looks_for_packed_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The attention of a trainer on a GPU: the same numbers, and transformers asks the device nothing."""
    batch, store = rollout("trace-all", "bfloat16")
    trainer = make_trainer("trace-all", "bfloat16", store)
    (micro,) = trainer._micro_batches(batch.trajectories, RowCounts(), SiteObserver())
    looks = []
    plain = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda p: looks.append(len(p)) or plain(p))

    def logits() -> Tensor:
        with torch.no_grad(), trainer.context.armed(micro.guidance) as kwargs:
            return trainer.model(micro.batch.input_ids, use_cache=False, **kwargs).logits

    want = logits()
    assert len(looks) == 1
    trainer.model.set_attn_implementation(CAUSAL_NAME)
    assert torch.equal(logits(), want)
    assert len(looks) == 1
    trainer.model.save_pretrained(tmp_path)
    assert CAUSAL_NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_unquantized_fp32_paths_agree(temperature: float) -> None:
    """Two implementations of one model, FP32 sums in another order: log-probs of order 1 to about 1e-6."""
    batch, store = rollout("bf16", temperature=temperature)
    metrics = make_trainer("bf16", "float32", store, temperature).update(batch)
    assert metrics["mismatch/logprob_abs_diff_max"] <= 1e-5
    assert metrics["router/topk_disagreement"] == 0
    other = make_trainer("bf16", "float32", store, temperature=1.3).update(rollout("bf16", temperature=temperature)[0])
    assert other["mismatch/logprob_abs_diff_max"] > 0.05


def test_a_bf16_trainer_keeps_fp32_rotary_frequencies() -> None:
    """They are no weights; rounded to BF16 they would be off by up to 1/256 and positions with them."""
    trainer = make_trainer("bf16", "bfloat16", MemoryStore())
    frequencies = trainer.model.get_decoder().rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, tiny_model(tiny_config()).model.rotary_emb.inv_freq)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


def test_guidance_closes_the_gap() -> None:
    """Mean |delta| in BF16 on one model: every mode that mirrors more of the rollout is nearer to it."""
    mean = {}
    for method in ("naive", "qat", "trace-all", "trace-full"):
        batch, store = rollout(method, "bfloat16", n=24)
        metrics = make_trainer(method, "bfloat16", store).update(batch)
        mean[method] = metrics["mismatch/logprob_abs_diff_mean"]
    assert mean["trace-all"] < mean["qat"] < mean["naive"]
    assert mean["trace-full"] < mean["qat"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_codes_hit_the_rollouts_values_exactly(dtype: str) -> None:
    """What the layers go on with, at every recorded site, is the rollout's dequantized value bit for bit."""
    batch, store = rollout("trace-full", dtype)
    trainer = make_trainer("trace-full", dtype, store)
    outputs: dict[tuple[str, int], Tensor] = {}
    original = trainer.context.round_site

    def spy(site: str, layer: int, x: Tensor) -> Tensor:
        y = original(site, layer, x)
        outputs.setdefault((site, layer), y.detach())
        return y

    plan = trainer._plan
    micros: list[Any] = []
    trainer._plan = lambda *args: micros.extend(plan(*args)) or micros  # type: ignore[method-assign]
    trainer.context.round_site = spy  # type: ignore[method-assign]
    metrics = trainer.update(batch)
    assert metrics["code_mismatch/after"] == metrics["scale_mismatch/after"] == metrics["d_act/after"] == 0
    if dtype == "bfloat16":
        assert metrics["code_mismatch/before"] > 0.001
    train_batch = micros[0][0].batch
    B, T = train_batch.input_ids.shape
    records = [store.get(t.guidance) for t in train_batch.trajectories]
    widths = {"expert_input": 64, "key": 64, "value": 64}
    want = assemble(records, [r.valid for r in records], trainer.recipe, 4.5, (0, 1), widths, T)
    rows = torch.zeros(B, T, dtype=torch.bool)
    for b, t in enumerate(train_batch.trajectories):
        rows[b, : t.num_rows] = True
    assert set(outputs) == set(want)
    for where, record in want.items():
        truth, _ = decode(record, torch.zeros(B * T, 64))
        values = get_format("nvfp4").dequantize(truth, dtype=getattr(torch, dtype))
        assert torch.equal(record.valid, rows.view(-1))
        assert torch.equal(outputs[where][record.valid], values[record.valid]), where


@pytest.mark.parametrize(("method", "layers"), [("trace", {1}), ("trace-all", {0, 1})])
def test_guided_layers_are_the_methods(method: str, layers: set[int]) -> None:
    batch, store = rollout(method, "bfloat16")
    metrics = make_trainer(method, "bfloat16", store).update(batch)
    assert metrics["guidance/guided_share"] == 1
    assert metrics["guidance/rows"] == sum(t.num_rows for t in batch.trajectories)
    for layer in (0, 1):
        before, after = (metrics[f"code_mismatch/{w}/expert_input/layer{layer}"] for w in ("before", "after"))
        assert before > 0
        assert (after < before) == (layer in layers), layer


def test_stale_records_fall_back_by_the_trainers_own_version() -> None:
    batch, store = rollout("trace-all")
    trainer = make_trainer("trace-all", "float32", store, max_version_diff=0)
    assert trainer.update(batch)["guidance/fallback/stale"] == 0
    metrics = trainer.update(batch)
    assert metrics["guidance/fallback/stale"] == metrics["guidance/rows"] > 0
    assert metrics["guidance/guided_share"] == 0


def test_the_mismatch_of_responses_without_an_old_row_stands_apart() -> None:
    batch, store = rollout("fp32")
    trainer = make_trainer("fp32", "float32", store)
    assert not any("fresh" in name for name in trainer.update(batch))
    fresh, half_old = batch.trajectories[:4], batch.trajectories[4]
    for t in [*fresh, half_old]:
        t.row_versions = torch.ones_like(t.row_versions)
    half_old.row_versions[0] = 0
    for t in fresh:
        t.logprobs = t.logprobs + 1.0
    metrics = trainer.update(batch)
    share = sum(t.num_sampled for t in fresh) / sum(t.num_sampled for t in batch.trajectories)
    assert metrics["mismatch/fresh_share"] == pytest.approx(share)
    assert metrics["mismatch/fresh_logprob_abs_diff_mean"] > 0.5
    assert metrics["mismatch/logprob_abs_diff_mean"] < metrics["mismatch/fresh_logprob_abs_diff_mean"]


# -- the update ---------------------------------------------------------------------------------------------------


def test_loss_and_gradient_equal_the_stock_models() -> None:
    """At ratio 1: loss -sum(w A) / tokens, gradient that of -sum(w A log p) / tokens, each response on its own."""
    batch, store = rollout("bf16")
    trainer = make_trainer("bf16", "float32", store, grad_clip=1e9)
    steps = spy_steps(trainer)
    metrics = trainer.update(batch)
    stock = tiny_model(tiny_config())
    tokens = sum(len(t.response_ids) for t in batch.trajectories)
    loss = torch.zeros(())
    for t in batch.trajectories:
        group = [o.reward for o in batch.trajectories if o.group == t.group]
        A = (t.reward - sum(group) / GROUP) / (torch.tensor(group).std(correction=0) + 1e-6)
        logp = torch.log_softmax(stock(input_ids=torch.tensor([t.token_ids])).logits[0], -1)
        start = len(t.prompt_ids) - 1
        taken = logp[torch.arange(start, start + len(t.response_ids)), list(t.response_ids)]
        loss = loss - (A * (taken.detach() - t.logprobs).exp() * (taken - taken.detach() + 1)).sum() / tokens
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in stock.parameters()))
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, p in stock.named_parameters():
        torch.testing.assert_close(steps[0][1][name], p.grad, rtol=1e-3, atol=1e-6 * norm, msg=name)


@pytest.mark.parametrize("method", ["bf16", "trace-full"])
def test_micro_batches_do_not_change_the_gradient(method: str) -> None:
    """FP32: a gradient is a sum over the rows; in another order it moves by at most rows * 2^-24 of its terms' sum,
    and these terms are at most about as large as the largest gradient of their tensor's model."""
    splits: list[dict[str, int]] = [{"micro_batch_size": n} for n in (1, 5, 8)]
    splits += [{"micro_batch_tokens": n} for n in (1, 40, 100, 10_000)]
    gradients, forwards = [], []
    for split in splits:
        batch, store = rollout(method)
        trainer = make_trainer(method, "float32", store, **split)
        steps = spy_steps(trainer)
        forwards.append(trainer.update(batch)["train/micro_batches"])
        assert len(steps) == 1
        gradients.append(steps[0][1])
    assert forwards[0] == forwards[3] == 12, "one trajectory each"
    assert forwards[4] > forwards[5] > forwards[6] == 1
    bound = sum(t.num_rows for t in rollout(method)[0].trajectories) * 2.0**-24
    scale = max(float(g.abs().max()) for g in gradients[0].values())
    for other in gradients[1:]:
        for name, g in gradients[0].items():
            assert (other[name] - g).abs().max() <= bound * scale, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_is_deterministic(dtype: str) -> None:
    results = []
    for _ in range(2):
        batch, store = rollout("trace", dtype)
        trainer = make_trainer("trace", dtype, store, updates_per_rollout=3, lr=1e-3)
        results.append((trainer.update(batch), weights(trainer)))
    assert results[0][0] == results[1][0]
    for name, w in results[0][1].items():
        assert torch.equal(w, results[1][1][name]), name


def test_gradient_checkpointing_changes_nothing() -> None:
    results = []
    for checkpointing in (False, True):
        batch, store = rollout("trace-all", "bfloat16")
        settings = {"gradient_checkpointing": checkpointing, "micro_batch_tokens": 100, "lr": 1e-3}
        trainer = make_trainer("trace-all", "bfloat16", store, **settings)
        results.append((trainer.update(batch), weights(trainer)))
    assert results[0][0]["train/micro_batches"] > 2
    assert results[0][0] == results[1][0]
    for name, w in results[0][1].items():
        assert torch.equal(w, results[1][1][name]), name


def test_old_log_probs_do_not_depend_on_the_number_of_updates() -> None:
    """They are taken before the first of them; only the padding differs, hence the last bits of FP32 sums."""
    metrics = []
    for updates in (1, 4):
        batch, store = rollout("trace-full")
        metrics.append(make_trainer("trace-full", "float32", store, updates_per_rollout=updates, lr=1e-2).update(batch))
    for name in ("mismatch/logprob_abs_diff_mean", "mismatch/kl_k1", "tis/mean"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], abs=2e-6)
    assert metrics[1]["train/ratio_mean"] != 1
    assert abs(metrics[1]["train/ratio_mean"] - 1) > 1e-3


def test_updates_share_the_trajectories_out() -> None:
    batch, store = rollout("bf16")
    trainer = make_trainer("bf16", "float32", store, updates_per_rollout=5, micro_batch_size=2)
    planned: list[list[Any]] = []
    plan = trainer._plan
    trainer._plan = lambda *args: planned.extend(plan(*args)) or planned  # type: ignore[method-assign]
    steps = spy_steps(trainer)
    trainer.update(batch)
    assert len(steps) == len(planned) == 5
    sizes = [len(m.batch.trajectories) for mini in planned for m in mini]
    assert max(sizes) <= 2
    names = [t.request_id for mini in planned for m in mini for t in m.batch.trajectories]
    assert sorted(names) == sorted(t.request_id for t in batch.trajectories)


def test_updates_raise_the_probability_of_rewarded_responses() -> None:
    batch, store = rollout("trace-all", "bfloat16")
    trainer = make_trainer("trace-all", "bfloat16", store, lr=3e-3, updates_per_rollout=1)
    terms = spy_losses(trainer)
    for _ in range(3):  # the same rollout: old log-probs move, the rollout's stay
        trainer.update(batch)
    surrogate = [t.loss.item() for t in terms]
    assert surrogate[2] < surrogate[0]


def test_bypass_takes_ratio_and_clip_against_the_rollout() -> None:
    batch, store = rollout("naive", "bfloat16")
    recomputed, bypass = (make_trainer("naive", "bfloat16", store, old_logprob=o) for o in ("recompute", "bypass"))
    first, second = spy_losses(recomputed), spy_losses(bypass)
    recomputed.update(batch)
    metrics = bypass.update(batch)
    assert (second[0].weight == 1).all()
    mask = first[0].weight < 5
    torch.testing.assert_close(second[0].ratio[mask], first[0].weight[mask])
    assert (second[0].ratio != 1).any()
    assert metrics["train/clip_frac"] > 0


def test_learning_rate_rises_over_the_warmup() -> None:
    batch, store = rollout("bf16")
    trainer = make_trainer("bf16", "float32", store, updates_per_rollout=2, warmup_steps=3, lr=6e-4)
    steps = spy_steps(trainer)
    trainer.update(batch)
    trainer.update(batch)
    assert [lr for lr, _ in steps] == pytest.approx([2e-4, 4e-4, 6e-4, 6e-4])


def test_without_a_signal_nothing_changes_but_the_version() -> None:
    batch, store = rollout("trace-all")
    trainer = make_trainer("trace-all", "float32", store, lr=1e-2)
    before = weights(trainer)
    batch = RolloutBatch([replace(t, reward=0.5) for t in batch.trajectories], 0)
    metrics = trainer.update(batch)
    assert metrics["train/no_advantage_share"] == 1.0
    assert metrics["mismatch/logprob_abs_diff_mean"] >= 0
    assert "train/loss" not in metrics
    assert trainer.version == 1
    for name, w in trainer.named_weights():
        assert torch.equal(w, before[name])


def test_groups_without_a_signal_are_not_trained_on() -> None:
    batch, store = rollout("trace-all")
    partly = [replace(t, reward=1.0) if t.group else t for t in batch.trajectories]
    trainer = make_trainer("trace-all", "float32", store)
    metrics = trainer.update(RolloutBatch(partly, 0))
    assert metrics["train/no_advantage_share"] == pytest.approx(2 / 3)
    assert metrics["guidance/rows"] == sum(t.num_rows for t in partly), "the distance is measured on all of them"
    counted = trainer.update(RolloutBatch([t for t in partly if not t.group], 0))
    assert counted["train/no_advantage_share"] == 0


def test_a_reward_that_is_not_finite_changes_nothing() -> None:
    batch, store = rollout("bf16")
    trainer = make_trainer("bf16", "float32", store)
    batch.trajectories[3].reward = math.nan
    with pytest.raises(ValueError, match="reward of r3 is nan"):
        trainer.update(batch)
    assert trainer.version == 0


def test_a_broken_weight_stops_the_run_without_an_update() -> None:
    batch, store = rollout("bf16")
    trainer = make_trainer("bf16", "float32", store)
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = math.nan
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match="not applied"):
        trainer.update(batch)
    for name, w in trainer.named_weights():
        assert torch.equal(w.nan_to_num(7), before[name].nan_to_num(7))


# -- weights to the rollout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_updated_weights_load_into_the_engine(tied: bool) -> None:
    """After an update and a transfer the two FP32 paths agree again; before it they do not."""
    config, store = tiny_config(tie_word_embeddings=tied), MemoryStore()
    engine = make_engine("bf16", "float32", config=config, store=store)
    settings = TrainConfig(dtype="float32", lr=1e-2, updates_per_rollout=2)
    trainer = GRPOTrainer(tiny_model(config), engine.recipe, get_method("bf16").forward, settings, store)
    names = [name for name, _ in trainer.named_weights()]
    assert ("lm_head.weight" in names) != tied
    assert set(names) <= set(tiny_weights(config))

    def requests(tag: str) -> Iterator[Any]:
        return (replace(r, request_id=f"{tag}{r.request_id}") for r in tiny_requests(8))

    first = trainer.update(RolloutBatch(rewarded(engine.generate(list(requests("a")))), 0))
    old = trainer.update(RolloutBatch(rewarded(engine.generate(list(requests("b")))), 0))
    assert first["mismatch/logprob_abs_diff_max"] <= 1e-5
    assert old["mismatch/logprob_abs_diff_max"] > 1e-2
    engine.update_weights(trainer.named_weights(), trainer.version)
    assert engine.version == trainer.version == 2
    new = trainer.update(RolloutBatch(rewarded(engine.generate(list(requests("c")))), 2))
    assert new["mismatch/logprob_abs_diff_max"] <= 1e-5


def test_a_response_without_sampled_tokens_teaches_nothing() -> None:
    batch, store = rollout("bf16", n=8)
    unspoken = batch.trajectories[4]
    tokens = len(unspoken.response_ids)
    unspoken = replace(unspoken, group=9, reward=1.0, sampled=torch.zeros(tokens, dtype=torch.bool))
    with_it = [*batch.trajectories[:4], unspoken, replace(unspoken, request_id="other", reward=0.0)]
    alone, both = make_trainer("bf16", "float32", store), make_trainer("bf16", "float32", store)
    metrics = alone.update(RolloutBatch(rewarded(batch.trajectories[:4]), 0))
    assert both.update(RolloutBatch(with_it, 0)) == metrics
    with pytest.raises(ValueError, match="no trajectory with a response"):
        both.update(RolloutBatch(with_it[4:], 0))
