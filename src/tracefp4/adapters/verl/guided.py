"""The guided forward of a sharded trainer: a transformers model, its context, and micro-batches from verl's rows.

Knows nothing of verl: the engine subclass hands rows in and arms what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tracefp4.adapters.verl.probes import probe_handle
from tracefp4.adapters.verl.rows import LossWatch, read_trajectory
from tracefp4.adapters.verl.segments import SegmentBuilder
from tracefp4.adapters.verl.settings import AdapterSettings
from tracefp4.errors import TracefpError
from tracefp4.guidance.disk import make_store
from tracefp4.nn import GuidanceContext, MicroBatch, prepare_model
from tracefp4.nn.attention import ATTENTION_NAME
from tracefp4.nn.experts import EXPERTS_NAME
from tracefp4.train.slices import RowCounts
from tracefp4.types import SITES, TrainBatch


@dataclass(frozen=True)
class Row:
    """One sequence of a micro-batch: tokens int64 [L], prompt first; routed int [>= L - 1, M, K] or None.

    eligible: False for rows that only pad the batch to a size; they are not counted.
    """

    tokens: Tensor
    prompt_tokens: int
    note: Mapping[str, Any] | None
    routed: Tensor | None = None
    eligible: bool = True


class GuidedForward:
    """Prepares a model before it is sharded, and builds the guidance of each micro-batch.

    Raises TracefpError as ``prepare_model`` does, and where the guidance store cannot be opened.
    """

    def __init__(self, model: Any, settings: AdapterSettings, pad_id: int = 0, config: Any = None) -> None:
        config = model.config if config is None else config
        self.settings, self.pad_id = settings, pad_id
        self.forward = settings.mode.forward
        self.recipe = settings.recipe(config.num_hidden_layers)
        self.context, self.moe_layers = self._prepare(model)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv = config.num_key_value_heads * head
        self.builder = SegmentBuilder(
            make_store(settings.guidance),
            self.recipe,
            self.forward.guided,
            {"expert_input": config.hidden_size, "key": kv, "value": kv},
            self.moe_layers,
            getattr(config, "num_experts_per_tok", 0),
            settings.guidance.max_version_diff,
        )
        self.watch = LossWatch(settings.guidance.lost_below, settings.guidance.lost_after_steps)
        self._proved = False

    def _prepare(self, model: PreTrainedModel) -> tuple[GuidanceContext, tuple[int, ...]]:
        """(the model's context, the numbers of all layers with routed experts)."""
        layers = model.get_decoder().layers
        moe_layers = tuple(i for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts"))
        return prepare_model(model, self.recipe, self.forward), moe_layers

    def check_applied(self, model: nn.Module) -> None:
        """After sharding: raises TracefpError naming the first layer that lost its hook."""
        for i, layer in enumerate(model.get_decoder().layers):  # type: ignore[operator]
            wanted = [("attention", layer.self_attn, "_attn_implementation", ATTENTION_NAME)]
            if i in self.moe_layers:
                wanted.append(("experts", layer.mlp.experts, "_experts_implementation", EXPERTS_NAME))
                if not layer.mlp.gate._forward_hooks:
                    raise TracefpError(f"layer {i}: the router lost its replay hook while the model was sharded")
            elif getattr(layer.mlp, "tracefp4_context", self.context) is not self.context:
                raise TracefpError(f"layer {i}: the MLP lost its guidance context while the model was sharded")
            for what, module, attribute, name in wanted:
                if getattr(module, "tracefp4_context", None) is not self.context:
                    raise TracefpError(f"layer {i}: the {what} lost the guidance context while the model was sharded")
                if getattr(module.config, attribute) != name:
                    raise TracefpError(
                        f"layer {i}: the {what} went back to {getattr(module.config, attribute)!r} from {name!r} "
                        "while the model was sharded"
                    )

    def micro_batch(
        self, rows: Sequence[Row], version: int | None, probing: bool = False
    ) -> tuple[MicroBatch, RowCounts, int]:
        """(guidance of a padded micro-batch, its row counts, the version it was taken at).

        version: the trainer's; None takes the newest that these rows were rolled out under. probing: read the full
        codes of probed rows too. Raises GuidanceError where a row's recipe differs.
        """
        trajectories = [read_trajectory(r.tokens, r.prompt_tokens, r.note, r.routed, self.recipe.hash) for r in rows]
        if version is None:
            version = max((int(t.row_versions.max()) for t in trajectories if t.num_rows), default=0)
        for row, trajectory in zip(rows, trajectories, strict=True):
            if not row.eligible:
                trajectory.segments, trajectory.routed_experts = (), None
            elif probing:
                trajectory.probe = probe_handle(trajectory, self.recipe.hash)
        counts = RowCounts()
        batch = TrainBatch.collate(trajectories, self.pad_id, rows[0].tokens.device)
        micro = self.builder.build(batch, version, counts)
        padding = sum(t.num_rows for r, t in zip(rows, trajectories, strict=True) if not r.eligible)
        if counts.total:
            counts.total -= padding
            counts.reasons["missing"] -= padding
        if counts.forwarded:
            counts.forwarded -= padding
        return micro, counts, version

    @contextmanager
    def proving(self) -> Iterator[None]:
        """Around the first forward: raises TracefpError for a recorded site that the model never rounded."""
        if self._proved:
            yield
            return
        met: set[tuple[str, int]] = set()
        context, rounding = self.context, self.context.round_site

        def round_site(site: str, layer: int, x_NK: Tensor) -> Tensor:
            met.add((site, layer))
            return rounding(site, layer, x_NK)

        context.round_site = round_site  # type: ignore[method-assign]
        try:
            yield
        finally:
            del context.round_site
        lost = sorted(self._expected_sites() - met)
        if lost:
            raise TracefpError(f"the trainer's forward never reached site {lost[0][0]} of layer {lost[0][1]}"
                               f" ({len(lost)} such): its quantized forward is not in use")  # fmt: skip
        self._proved = True

    def _expected_sites(self) -> set[tuple[str, int]]:
        layers, dense = range(self.recipe.num_layers), not self.moe_layers
        return {(s, i) for s in SITES for i in layers if s != "expert_input" or dense or i in self.moe_layers}

    def forget_weights(self, model: nn.Module) -> None:
        """Drops cached quantized weights: a sharded parameter keeps its identity and version while it changes."""
        for module in model.modules():
            module.__dict__.pop("_tracefp4_weights", None)


def keep_own_dtypes(model: nn.Module) -> None:
    """Takes autocast out of a model's forward: what it computes then depends on its weights' dtype alone.

    FSDP2 casts weights and inputs, so that autocast has nothing left to do but harm: on a GPU it makes every sum an
    FP32 tensor, such as that of a token's experts, and from there on the trainer no longer computes what the rollout
    did. What verl does with the logits stays under its autocast.
    """
    forward = model.forward

    @wraps(forward)
    def run(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(input_ids.device.type, enabled=False):  # a checkpointed layer remembers it
            return forward(input_ids, *args, **kwargs)

    model.forward = run
