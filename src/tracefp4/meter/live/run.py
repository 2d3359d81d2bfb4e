"""`tracefp4 meter live`: generates, scores under every switch, and says which causes are the largest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracefp4.align.metrics import importance_metrics, mismatch_metrics
from tracefp4.errors import TracefpError
from tracefp4.guidance.store import MemoryStore
from tracefp4.loop.parts import Parts, model_path, preflight
from tracefp4.meter.findings import Verdict, number
from tracefp4.meter.live.attribution import Attribution, Distance, attribute
from tracefp4.meter.live.experts import SHOWN, ExpertShare, by_expert, expert_causes
from tracefp4.meter.live.plan import LiveRequest, read_prompts
from tracefp4.meter.live.scoring import Conditions, TrainerScorer, prefill_logprobs
from tracefp4.meter.live.switches import Switchboard, Switches
from tracefp4.nn import SiteObserver, prepare_model
from tracefp4.nn.loading import load_policy
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.tasks import Prompt
from tracefp4.train.slices import MicroBatchBuilder
from tracefp4.types import Trajectory

TAG, FLOOR_METHOD = "meter", "bf16"
OUTLIERS, CONTEXT = 25, 24
RESAMPLES = 2000
LEAST_FLOOR = 1e-7
"""Below this a ratio to the floor says nothing: it is rounding of the FP32 log-softmax."""

Say = Callable[[str], None]


@dataclass
class Setup:
    """A method on both paths over the same trajectories: all that the switches act on."""

    parts: Parts
    engine: RolloutEngine
    scorer: TrainerScorer
    trajectories: list[Trajectory]
    rollout: list[Tensor]

    @property
    def temperature(self) -> float:
        return self.parts.config.sampling.temperature


@dataclass
class LiveResult:
    """What ``meter.json`` holds of a live meter."""

    facts: dict[str, Any]
    verdict: Verdict
    full: Distance
    floor: Distance
    ratio: tuple[float, float, float]
    attribution: Attribution
    metrics: dict[str, float]
    codes: dict[str, float]
    outliers: list[dict[str, Any]]
    experts: list[ExpertShare] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        value, low, high = self.ratio
        return {
            "kind": "live",
            **self.facts,
            "verdict": self.verdict.as_dict(),
            "metrics": self.metrics,
            "floor": {"mean": self.floor.mean, "tokens": self.floor.tokens},
            "over_floor": {"value": value, "low": low, "high": high},
            **self.attribution.as_dict(),
            "code_mismatch": self.codes,
            "experts": [e.as_dict() for e in self.experts],
            "outliers": self.outliers,
            "notices": self.notices,
        }


def meter_live(
    request: LiveRequest, say: Say = lambda _: None, alter: Callable[[RolloutEngine], None] | None = None
) -> LiveResult:
    """Measures and attributes. say: told what is being done. alter: called with the engine once it has its weights, to
    plant a fault. Raises TracefpError for whatever the user can mend."""
    floor_config = request.config.model_copy(
        update={
            "method": request.config.method.model_copy(update={"name": FLOOR_METHOD}),
            "rollout": request.config.rollout.model_copy(update={"dtype": "bfloat16"}),
            "train": request.config.train.model_copy(update={"dtype": "bfloat16"}),
        }
    )
    if request.config.run.threads:
        torch.set_num_threads(request.config.run.threads)
    parts = preflight(request.config, training=False)
    try:
        prompts = read_prompts(request, parts)
        say(f"floor: {FLOOR_METHOD} of the same weights")
        floor_parts = preflight(floor_config, training=False)
        try:
            floor = _floor(floor_parts, prompts, request)
        finally:
            floor_parts.close()
        say(f"{parts.method.name}: {len(prompts)} prompts x {request.samples} samples")
        setup = prepare(parts, prompts, request, alter)
        return _measured(request, setup, floor, say)
    finally:
        parts.close()


def prepare(
    parts: Parts, prompts: Sequence[Prompt], request: LiveRequest, alter: Callable[[RolloutEngine], None] | None = None
) -> Setup:
    """Loads both sides, generates, and keeps the full codes of every response."""
    config = parts.config
    store = MemoryStore()
    model: Any = load_policy(parts.path, parts.train.dtype).eval().to(parts.device)
    engine = parts.make_engine(store)
    weights = model if request.rollout is None else load_policy(model_path(request.rollout), parts.train.dtype)
    try:
        engine.update_weights(((name, p.detach()) for name, p in weights.named_parameters()), 0)
    except TracefpError as error:
        raise TracefpError(f"the rollout cannot use {request.rollout or parts.path}: {error}") from error
    if alter is not None:
        alter(engine)
    kept, encoded = parts.encode(prompts)
    requests = parts.requests(kept, request.samples, TAG, encoded=encoded)
    if parts.recipe.quantized:
        requests = [replace(r, probe=True) for r in requests]
    trajectories = [t for t in engine.generate(requests) if t.response_ids]
    c = model.config
    layers = model.get_decoder().layers
    kv_width = c.num_key_value_heads * (getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    builder = MicroBatchBuilder(
        store,
        parts.recipe,
        parts.method.forward.guided,
        {"expert_input": c.hidden_size, "key": kv_width, "value": kv_width},
        [i for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts")],
        getattr(c, "num_experts_per_tok", 0),
        config.train.max_version_diff,
    )
    context = prepare_model(model, parts.recipe, parts.method.forward)
    board = Switchboard(model, context, engine)
    pad = parts.tokenizer.pad_token_id
    size = config.train.micro_batch_size
    scorer = TrainerScorer(model, board, builder, store, trajectories, size, pad, parts.device)
    rollout = [t.logprobs.double() for t in trajectories]
    setup = Setup(parts, engine, scorer, trajectories, rollout)
    if request.rollout_logprobs == "raw" and setup.temperature != 1:
        setup.rollout = [prefill_logprobs(engine, t, 1.0) for t in trajectories]
    return setup


def _floor(parts: Parts, prompts: Sequence[Prompt], request: LiveRequest) -> Distance:
    setup = prepare(parts, prompts, replace(request, rollout=None, rollout_logprobs="processed"))
    return Distance.of(setup.scorer.score(Switches(), Conditions(setup.temperature)), setup.rollout)


def _measured(request: LiveRequest, setup: Setup, floor: Distance, say: Say) -> LiveResult:
    temperature = 1.0 if request.train_logprobs == "raw" else setup.temperature
    conditions = Conditions(temperature)
    observer = SiteObserver()
    train = setup.scorer.score(Switches(), conditions, observer, rates=True)
    rates = setup.scorer.rates
    full = Distance.of(train, setup.rollout)
    attribution = attribute(setup, train, full, conditions, request, say)
    experts = by_expert(setup.trajectories, setup.scorer.builder.moe_layers, train, setup.rollout)
    attribution.causes += expert_causes(experts) if full.mean > request.band * max(floor.mean, LEAST_FLOOR) else []
    ratio = _ratio(full, floor)
    a, b = torch.cat(train), torch.cat(setup.rollout)
    cap = setup.parts.config.train.tis_cap
    return LiveResult(
        facts=_facts(request, setup),
        verdict=_verdict(request, full, floor, ratio),
        full=full,
        floor=floor,
        ratio=ratio,
        attribution=attribution,
        metrics=mismatch_metrics(a, b) | importance_metrics(a - b, cap),
        codes=observer.metrics(),
        outliers=_outliers(setup, train, rates),
        experts=experts[:SHOWN],
        notices=_notices(setup),
    )


def _ratio(full: Distance, floor: Distance) -> tuple[float, float, float]:
    """(full over floor, its 95 % interval by a bootstrap over responses)."""
    rng = np.random.default_rng(0)

    def draws(d: Distance) -> np.ndarray:
        index = rng.integers(0, len(d.sums), (RESAMPLES, len(d.sums)))
        sums: np.ndarray = d.sums[index].sum(1) / d.counts[index].sum(1)
        return sums

    drawn = draws(full) / np.maximum(draws(floor), LEAST_FLOOR)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return full.mean / max(floor.mean, LEAST_FLOOR), float(low), float(high)


def _verdict(request: LiveRequest, full: Distance, floor: Distance, ratio: tuple[float, float, float]) -> Verdict:
    limit = request.band * max(floor.mean, LEAST_FLOOR)
    reasons = []
    if full.mean > limit:
        value, low, high = ratio
        reasons.append(
            f"mean |log-prob difference| {number(full.mean)} is {value:.2f} times the floor (95 % interval "
            f"{low:.2f} to "
            f"{high:.2f}), more than {request.band:g}"
        )
    source = f"{request.band:g} times the {FLOOR_METHOD} floor {number(floor.mean)}"
    return Verdict(not reasons, limit, source, tuple(reasons))


def _facts(request: LiveRequest, setup: Setup) -> dict[str, Any]:
    parts = setup.parts
    return {
        "train": parts.config.model.path,
        "rollout": request.rollout or parts.config.model.path,
        "method": parts.method.name,
        "recipe_hash": parts.recipe.hash,
        "formats": {k: getattr(parts.recipe, k) for k in ("weights", "activations", "kv")},
        "dtype": parts.train.dtype,
        "device": parts.device,
        "backend": setup.engine.config.backend,
        "prompts": "held-out problems of the task" if request.prompts is None else Path(request.prompts).name,
        "responses": len(setup.trajectories),
        "tokens": int(sum(t.num_sampled for t in setup.trajectories)),
        "temperature": setup.temperature,
        "layers": parts.recipe.num_layers,
    }


def _notices(setup: Setup) -> list[str]:
    recipe = setup.parts.recipe
    if recipe.quantized and all(t.probe is None for t in setup.trajectories):
        return [
            f"full codes of {recipe.activations} and {recipe.kv} have no common width, so codes, scales and KV "
            "could not be "
            "switched"
        ]
    return []


def _outliers(setup: Setup, train: list[Tensor], rates: list[dict[tuple[str, int], Tensor]]) -> list[dict[str, Any]]:
    """The tokens farthest apart, with their text and the share of other slots in each layer's row that predicts "
    "them."""
    found = []
    for i, (a, b) in enumerate(zip(train, setup.rollout, strict=True)):
        size = (a - b).abs()
        found += [(float(size[k]), i, k) for k in size.argsort(descending=True)[:OUTLIERS].tolist()]
    decode = setup.parts.tokenizer.decode
    out = []
    for size_, i, k in sorted(found, reverse=True)[:OUTLIERS]:
        t = setup.trajectories[i]
        ids = t.token_ids
        at = len(t.prompt_ids) + k
        by_layer: dict[str, list[float | None]] = {}
        for (site, _), values in sorted(rates[i].items()):
            share = float(values[k])
            by_layer.setdefault(site, []).append(None if share != share else share)
        out.append(
            {
                "request": t.request_id,
                "position": k,
                "token": int(ids[at]),
                "text": decode([ids[at]]),
                "before": decode(list(ids[max(0, at - CONTEXT) : at])),
                "after": decode(list(ids[at + 1 : at + 1 + CONTEXT // 3])),
                "train": float(train[i][k]),
                "rollout": float(setup.rollout[i][k]),
                "abs_diff": size_,
                "code_mismatch": by_layer,
            }
        )
    return out
