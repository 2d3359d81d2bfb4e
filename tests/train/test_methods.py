"""Every loss and ablation through the trainer, over real rollouts of a tiny model."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest

from tiny import tiny_config, tiny_model, tiny_requests, tiny_weights
from tracefp4.config import ConfigError, load_config
from tracefp4.guidance.store import MemoryStore
from tracefp4.loop import RunConfig
from tracefp4.methods import MethodConfig, QuantConfig, get_method
from tracefp4.rollout.engine import RolloutConfig, RolloutEngine
from tracefp4.train.losses import LossTerms, make_loss
from tracefp4.train.trainer import GRPOTrainer, TrainConfig
from tracefp4.types import RolloutBatch, Trajectory

GROUP = 4


@functools.cache
def _rollout(method: str, bits: float | None) -> tuple[list[Trajectory], MemoryStore, RolloutEngine]:
    m = get_method(method).configured(MethodConfig(bits=bits))
    store = MemoryStore()
    recipe = m.recipe(QuantConfig(), 2)
    engine = RolloutEngine(tiny_config(), recipe, RolloutConfig(max_num_seqs=16, max_model_len=64), store)
    engine.update_weights(tiny_weights(tiny_config()).items(), 0)
    head = make_loss(m.loss, TrainConfig()).top_logprobs
    requests = [
        replace(r, sampling=replace(r.sampling, top_logprobs=head)) for r in tiny_requests(12, stop=True, probe_every=3)
    ]
    return engine.generate(requests), store, engine


def setup(method: str, bits: float | None = None, **config: Any) -> tuple[GRPOTrainer, RolloutBatch]:
    trajectories, store, engine = _rollout(method, bits)
    batch = [
        replace(t, group=i // GROUP, reward=float(i % GROUP == i // GROUP % GROUP)) for i, t in enumerate(trajectories)
    ]
    m = get_method(method)
    settings = TrainConfig(**{"updates_per_rollout": 1, "lr": 1e-3, **config})
    trainer = GRPOTrainer(tiny_model(tiny_config()), engine.recipe, m.forward, settings, store, loss=m.loss)
    return trainer, RolloutBatch(batch, 0)


def losses_of(trainer: GRPOTrainer) -> list[LossTerms]:
    seen: list[LossTerms] = []
    original = trainer._loss

    def spy(*args: Any) -> LossTerms:
        seen.append(original(*args))
        return seen[-1]

    trainer._loss = spy  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("method", "metrics"),
    [
        ("qarl", {"tbpo/dropped_share", "tbpo/weight_mean", "tbpo/weight_far_share", "tbpo/ratio_abs_log_mean"}),
        ("score_centering", {"score_centering/head_mass_train", "score_centering/truncated_share"}),
        ("triage", {"triage/gated_share", "triage/gate_mean_negative", "triage/repair_mean_positive"}),
    ],
)
def test_a_methods_own_metrics(method: str, metrics: set[str]) -> None:
    trainer, batch = setup(method, updates_per_rollout=3)
    logged = trainer.update(batch)
    assert metrics <= set(logged)
    assert all(math.isfinite(v) for v in logged.values())
    assert logged["train/grad_norm"] > 0
    if method == "qarl":
        assert 0 < logged["tbpo/dropped_share"] <= 1
    if method == "score_centering":
        assert logged["score_centering/head_mass_rollout"] == pytest.approx(1, abs=1e-5)  # a vocabulary of 32


def test_a_head_smaller_than_the_vocabulary() -> None:
    trainer, batch = setup("score_centering")
    for t in batch.trajectories:
        assert t.head is not None
        t.head = replace(t.head, ids=t.head.ids[:, :4], logprobs=t.head.logprobs[:, :4])
    logged = trainer.update(batch)
    assert 0.1 < logged["score_centering/head_mass_rollout"] < 0.99
    assert logged["score_centering/head_mass_train"] == pytest.approx(
        logged["score_centering/head_mass_rollout"], abs=0.05
    )


def test_responses_weigh_equally_in_a_loss_per_response() -> None:
    """The gradient is the mean over responses: other micro-batches, and then other padding, change nothing."""
    results = []
    for size in (1, 12):
        trainer, batch = setup("qarl", micro_batch_size=size, grad_clip=1e9, dtype="float32")
        terms = losses_of(trainer)
        logged = trainer.update(batch)
        results.append((logged["train/loss"], logged["train/grad_norm"], logged["tbpo/dropped_share"]))
        total = sum(float(t.loss.detach()) for t in terms)
        assert logged["train/loss"] == pytest.approx(total / 12, abs=1e-6)
    assert results[0] == pytest.approx(results[1], rel=1e-3, abs=1e-6)


def test_triage_reports_its_own_cap() -> None:
    trainer, batch = setup("triage")
    for t in batch.trajectories:
        t.logprobs = t.logprobs - 3.0  # w = e^3
    logged = trainer.update(batch)
    assert logged["tis/max"] == 2.0
    assert logged["tis/clip_frac"] == 1.0


def test_guidance_can_end_after_the_first_update() -> None:
    """The first update is guided as before; later ones round to nearest."""
    rounded: dict[int, list[int]] = {}
    for updates in (0, 1):
        trainer, batch = setup("trace-all", updates_per_rollout=3, guided_updates=updates)
        original = trainer._optimizer_step
        seen: list[int] = []

        def spy(mini: Any, own: Any, original: Any = original, seen: list[int] = seen) -> Any:
            seen.append(sum(len(m.guidance.guidance) for m in mini))
            return original(mini, own)

        trainer._optimizer_step = spy  # type: ignore[method-assign]
        logged = trainer.update(batch)
        assert logged["guidance/guided_share"] == 1
        rounded[updates] = seen
    assert all(n > 0 for n in rounded[0])
    assert [n > 0 for n in rounded[1]] == [True, False, False]


def test_routing_need_not_be_replayed() -> None:
    on, off = (setup("qat", replay=replay)[0] for replay in (True, False))
    assert on.context.forward.replay
    assert not off.context.forward.replay
    a, b = (t.update(setup("qat")[1]) for t in (on, off))
    assert min(a["router/topk_disagreement"], b["router/topk_disagreement"]) > 0
    assert a["mismatch/logprob_abs_diff_mean"] != b["mismatch/logprob_abs_diff_mean"]


def test_clipped_straight_through_changes_gradients_and_no_values() -> None:
    """K and V at a static scale of 100 saturate; row scales leave little beyond their range."""
    runs = []
    for rule in ("identity", "clipped"):
        m = get_method("qat")
        recipe = m.recipe(QuantConfig(kv_encode_scale=1e4), 2)
        trajectories, store, _ = _rollout("qat", None)
        settings = TrainConfig(updates_per_rollout=1, straight_through=rule)  # type: ignore[arg-type]
        trainer = GRPOTrainer(tiny_model(tiny_config()), recipe, m.forward, settings, store)
        batch = [
            replace(t, group=i // GROUP, reward=float(i % GROUP == 0), probe=None) for i, t in enumerate(trajectories)
        ]
        runs.append(trainer.update(RolloutBatch(batch, 0)))
    a, b = runs
    assert a["mismatch/logprob_abs_diff_mean"] == b["mismatch/logprob_abs_diff_mean"]
    assert a["train/loss"] == b["train/loss"]
    assert a["train/grad_norm"] != b["train/grad_norm"]


@pytest.mark.parametrize("bits", [0.5, 0.125])
def test_scales_alone_help_less_than_codes(bits: float) -> None:
    """With the rollout's scales known, values still round to other slots."""
    trainer, batch = setup("trace-all", bits)
    scales = trainer.update(batch)
    trainer, batch = setup("trace-all")
    codes = trainer.update(batch)
    assert scales["scale_mismatch/after"] == 0
    assert scales["code_mismatch/after"] > 10 * codes["code_mismatch/after"]
    assert scales["code_mismatch/after"] < scales["code_mismatch/before"]


@pytest.mark.parametrize("method", ["trace-all@mxfp4-w4a8", "trace-full@mxfp4-w4a8", "trace-all@mxfp4-w4a4"])
def test_mx_formats_are_guided_and_probed(method: str) -> None:
    """W4A8 with a KV cache of four bits: one record whose sites have codes of different widths."""
    trainer, batch = setup(method)
    logged = trainer.update(batch)
    assert logged["guidance/guided_share"] == 1
    for site in ("expert_input", "key", "value"):
        before, after = (logged[f"d_act/{when}/{site}/layer1"] for when in ("before", "after"))
        assert after < 0.2 * before, site
        if method.startswith("trace-full"):
            assert after == 0
    assert all(math.isfinite(v) for v in logged.values())


def test_every_mode_takes_a_step() -> None:
    """What is left: one update of each remaining mode over its own rollout."""
    for method in ("quads", "resq", "w4a16", "w4a16-kv", "qat@mxfp4-w4a8"):
        trainer, batch = setup(method, updates_per_rollout=2)
        logged = trainer.update(batch)
        assert logged["train/grad_norm"] > 0, method
        assert 0 < logged["mismatch/logprob_abs_diff_mean"] < 0.2, method


# -- keys -----------------------------------------------------------------------------------------------------------


def load(tmp_path: Any, *overrides: str) -> RunConfig:
    path = tmp_path / "r.toml"
    path.write_text('[method]\nname = "qarl"\n')
    return load_config(path, list(overrides), RunConfig)


def test_settings_of_the_losses_are_keys(tmp_path: Any) -> None:
    config = load(tmp_path, "train.tbpo.eps_low=1e-3", "train.triage.repair_coef=0", "train.score_centering.cap=3")
    assert config.train.tbpo.eps_low == 1e-3
    assert config.train.triage.repair_coef == 0
    assert config.train.score_centering.cap == 3
    for override, message in (
        ("train.tbpo.eps_lo=1", "unknown key train.tbpo.eps_lo .* did you mean train.tbpo.eps_low"),
        ("train.triage.gate_segmnt=3", "did you mean train.triage.gate_segment"),
        ("method.compensation.shar=0.5", "did you mean method.compensation.share"),
        ("method.layer='all'", "did you mean method.layers"),
        ("train.tbpo.eps_low=0", "train.tbpo.eps_low"),
        ("method.bits=3", "method.bits must be one of 4.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, override)
    with pytest.raises(ConfigError, match=r"run.lag 4 exceeds train.max_version_diff 3"):
        load(tmp_path, "run.lag=4", "method.name='trace'")
    with pytest.raises(ConfigError, match=r"run.lag is for synchronous runs"):
        load(tmp_path, "run.lag=1", "run.asynchronous=true")
    with pytest.raises(ConfigError, match=r"ptq:nvfp4 evaluates in another form"):
        load(tmp_path, "method.name='ptq:nvfp4'", "run.asynchronous=true")
