"""What the tests of verl's two engines share: a rollout under an engine's weights, and the batch that verl makes of it.

Imports verl: import it after ``pytest.importorskip("verl")``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from tiny import make_engine, tiny_requests
from tracefp4.adapters.verl.figures import rename_figures
from tracefp4.adapters.verl.probes import PROBED
from tracefp4.adapters.verl.rows import FIELD, make_note, stack_experts
from tracefp4.guidance.disk import ShardStore


def rollout(method: str, url: Path, weights: Any, n: int = 6, probe_every: int = 0) -> tuple[list[Any], str]:
    """n trajectories under the weights that a verl engine gives out; their records are in the store at url."""
    store = ShardStore(str(url))
    engine = make_engine(method, store=store, load=False)
    engine.update_weights(stack_experts(weights), 0)
    requests = tiny_requests(n, max_new_tokens=12, probe_every=probe_every)
    done = engine.generate([replace(r, request_id=r.request_id + PROBED) if r.probe else r for r in requests])
    assert store.close()
    return done, engine.recipe.hash


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch_of(trajectories: list[Any], recipe_hash: str, use_remove_padding: bool = False) -> TensorDict:
    """The fields that verl's worker gets, nested as it gets them."""
    tokens = [torch.tensor(t.token_ids) for t in trajectories]
    routed = [torch.cat([t.routed_experts, t.routed_experts.new_zeros(1, *t.routed_experts.shape[1:])])
              for t in trajectories]  # fmt: skip
    fields = {
        "input_ids": nested(tokens),
        "position_ids": nested([torch.arange(len(t)) for t in tokens]),
        "prompts": nested([torch.tensor(t.prompt_ids) for t in trajectories]),
        "responses": nested([torch.tensor(t.response_ids) for t in trajectories]),
        "loss_mask": nested([torch.ones(len(t.response_ids), dtype=torch.int64) for t in trajectories]),
        "routed_experts": nested(routed),
    }
    notes = [{FIELD: make_note(t, recipe_hash)} for t in trajectories]
    return tu.get_tensordict(
        {**fields, "extra_fields": notes},
        {
            "temperature": 1.0,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 3,
            "use_remove_padding": use_remove_padding,
        },
    )


def distance(engine: Any, batch: TensorDict, trajectories: list[Any]) -> float:
    """Mean |log-prob difference| of the responses between a verl engine and the rollout."""
    with engine.eval_mode():
        output = engine.infer_batch(batch)
    rows = output["model_output"]["log_probs"].unbind()
    logprobs = torch.cat([r[len(t.prompt_ids) - 1 : -1] for r, t in zip(rows, trajectories, strict=True)])
    return float((logprobs - torch.cat([t.logprobs for t in trajectories])).abs().mean())


def update(
    engine: Any, trajectories: list[Any], recipe_hash: str, loss_mode: str, use_remove_padding: bool = False
) -> dict[str, Any]:
    """verl's two passes of a step, old log-probs and one update by ``ppo_loss``; the figures as they are logged."""
    batch = batch_of(trajectories, recipe_hash, use_remove_padding)
    with engine.eval_mode():
        output = engine.infer_batch(batch)
    old = output["model_output"]["log_probs"].unbind()
    lengths = [len(t.response_ids) for t in trajectories]

    more = {
        "old_log_probs": nested([r[-n - 1 : -1].float() for r, n in zip(old, lengths, strict=True)]),
        "rollout_log_probs": nested([t.logprobs for t in trajectories]),
        "advantages": nested([torch.full((n,), 1.0 if i % 2 else -1.0) for i, n in enumerate(lengths)]),
        "response_mask": nested([torch.ones(n) for n in lengths]),
    }
    batch = batch_of(trajectories, recipe_hash, use_remove_padding)
    batch.update(more)
    tu.assign_non_tensor(batch, global_batch_size=len(trajectories))
    actor = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=3, policy_loss=PolicyLossConfig(loss_mode=loss_mode)
    )
    with engine.train_mode():
        metrics = engine.train_batch(batch, loss_function=partial(ppo_loss, config=actor))["metrics"]
    figures = {f"actor/{k}": v.aggregate() for k, v in metrics.items() if hasattr(v, "aggregate")}
    rename_figures(figures)
    return figures


def check_code_mismatch(make: Callable[[str, Path], Any], folder: Path, use_remove_padding: bool = False) -> None:
    """Asserts what an update of probed rows reports: every recorded site and layer, and that guidance brings the slots
    together.

    make: a verl engine of a method, with its store at a path.
    """
    figures = {}
    for method in ("qat", "trace-all"):
        url = folder / method
        engine = make(method, url)
        done, recipe_hash = rollout(method, url, engine.get_per_tensor_param()[0], probe_every=2)
        figures[method] = update(engine, done, recipe_hash, "vanilla", use_remove_padding)
    qat, trace = figures["qat"], figures["trace-all"]
    for name in ("code_mismatch/before", "code_mismatch/after", "scale_mismatch/before", "d_act/after"):
        per_layer = {n for n in qat if n.startswith(f"{name}/")}
        assert per_layer == {f"{name}/{s}/layer{i}" for s in ("expert_input", "key", "value") for i in (0, 1)}
    assert qat["code_mismatch/before"] == qat["code_mismatch/after"] > 0
    assert trace["code_mismatch/after"] < 0.2 * trace["code_mismatch/before"]
    assert 0 <= trace["router/topk_disagreement"] < 0.2
