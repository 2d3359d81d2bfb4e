"""Log-probs of given tokens: by the switched trainer, and once more by the rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracefp4.device import to_device
from tracefp4.guidance import full_bits
from tracefp4.guidance.store import GuidanceStore
from tracefp4.meter.live.switches import Batch, Switchboard, Switches
from tracefp4.nn import SiteObserver
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.kernel_model import Context, KernelModel, KernelStep, Span
from tracefp4.rollout.kv_pool import make_kv_pool
from tracefp4.rollout.model import StepInput
from tracefp4.rollout.paged_pool import PagedPool
from tracefp4.train.slices import MicroBatchBuilder, RowCounts, assemble, fetch, split_micro_batches
from tracefp4.types import TrainBatch, Trajectory


@dataclass(frozen=True)
class Conditions:
    """How the trainer computes, besides its sites. alone: one sequence at a time, unpadded; else micro-batches.
    temperature: of the log-probs. math: attention by plain products in place of torch's fused kernel."""

    temperature: float
    alone: bool = False
    math: bool = False


class TrainerScorer:
    """The trainer's log-probs of fixed trajectories under any switches."""

    def __init__(
        self,
        model: Any,
        board: Switchboard,
        builder: MicroBatchBuilder,
        store: GuidanceStore,
        trajectories: Sequence[Trajectory],
        micro_batch_size: int,
        pad_id: int,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.model, self.board, self.builder, self.store = model, board, builder, store
        self.trajectories = list(trajectories)
        order = {id(t): i for i, t in enumerate(self.trajectories)}
        self._groups = [
            [self._prepare(group, order, pad_id) for group in split_micro_batches(self.trajectories, size)]
            for size in (micro_batch_size, 1)
        ]
        self.rates: list[dict[tuple[str, int], Tensor]] = []

    def _prepare(
        self, group: list[Trajectory], order: dict[int, int], pad_id: int
    ) -> tuple[TrainBatch, Any, Batch, list[int]]:
        batch = TrainBatch.collate(group, pad_id, self.device)
        micro = self.builder.build(batch, 0, RowCounts())
        T = batch.input_ids.shape[1]
        prompt = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
        for b, t in enumerate(group):
            prompt[b, : len(t.prompt_ids) - 1] = True  # the last prompt row predicts the first response token
        return (
            batch,
            micro,
            Batch(self._records(group, T), to_device(prompt.view(-1), self.device), micro.experts),
            [order[id(t)] for t in group],
        )

    def _records(self, group: list[Trajectory], T: int) -> dict[Any, Any]:
        """The rollout's full codes as one record of B * T rows a site and layer; none where it recorded none."""
        recipe = self.builder.recipe
        records = [fetch(self.store, t.probe, t, recipe, RowCounts()) for t in group]
        known = [r for r in records if r is not None]
        if not known:
            return {}
        usable = [None if r is None else r.valid for r in records]
        bits = full_bits(next(name for name in (recipe.activations, recipe.kv) if name is not None))
        return assemble(records, usable, recipe, bits, known[0].layers, self.builder.widths, T, self.device)

    @torch.no_grad()
    def score(
        self,
        switches: Switches,
        conditions: Conditions,
        observer: SiteObserver | None = None,
        rates: bool = False,
    ) -> list[Tensor]:
        """f64 [R] of every trajectory, in their order, on the host. rates: keep each row's share of other slots in
        ``self.rates``."""
        out: list[Tensor] = [torch.empty(0)] * len(self.trajectories)
        if rates:
            self.rates = [{}] * len(self.trajectories)
        board, context = self.board, self.board.context
        kernel = sdpa_kernel(SDPBackend.MATH) if conditions.math else nullcontext()
        with board.set(switches), kernel:
            for batch, micro, mine, indices in self._groups[conditions.alone]:
                board.batch, board.observer = mine, observer
                mine.rates = {} if rates else None
                micro.experts = board.replayed()
                mask = None if batch.input_ids.is_cuda else batch.attention_mask  # as the trainer does
                try:
                    with context.armed(micro, observer) as kwargs:
                        logits = self.model(
                            input_ids=batch.input_ids, attention_mask=mask, use_cache=False, **kwargs
                        ).logits[:, :-1]
                finally:
                    board.batch, board.observer = None, None
                    micro.experts = mine.experts
                logp = torch.log_softmax(logits.float() / conditions.temperature, dim=-1)
                logp = logp.gather(-1, batch.input_ids[:, 1:, None])[..., 0].double().cpu()
                for b, index in enumerate(indices):
                    t = self.trajectories[index]
                    start = len(t.prompt_ids) - 1
                    out[index] = logp[b, start : start + len(t.response_ids)]
                    if mine.rates is not None:
                        width = batch.input_ids.shape[1]
                        rows = slice(b * width + start, b * width + start + len(t.response_ids))
                        self.rates[index] = {where: r[rows].cpu() for where, r in mine.rates.items()}
        return out


@torch.no_grad()
def prefill_logprobs(engine: RolloutEngine, trajectory: Trajectory, temperature: float) -> Tensor:
    """f64 [R]: the engine's log-probs of a finished trajectory, all rows in one step and over a cache of its own, where
    generation took them one by one among other sequences."""
    tokens = torch.tensor(trajectory.token_ids, device=engine.device)
    first = len(trajectory.prompt_ids) - 1
    logits = (_prefill if engine.kernels is None else _kernel_prefill)(engine, tokens[:-1], first)
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logp.gather(-1, tokens[first + 1 :, None])[:, 0].double().cpu()


def _prefill(engine: RolloutEngine, tokens: Tensor, first: int) -> Tensor:
    """Logits of the rows from ``first`` on, [n - first, V]."""
    shape, model, recipe, n = engine.shape, engine.model, engine.recipe, len(tokens)
    scale = recipe.site_encode_scale("key")
    pool = make_kv_pool(
        shape.layers,
        n,
        shape.kv_heads,
        shape.head_dim,
        model.dtype,
        recipe.kv,
        float(scale) if scale is not None else None,
        engine.device,
    )
    rows = torch.arange(n, device=engine.device)
    logits, _ = model.forward(StepInput(tokens, rows, rows, rows[None], rows[None], rows[first:]), pool)
    return logits


def _kernel_prefill(engine: RolloutEngine, tokens: Tensor, first: int) -> Tensor:
    model, n, page = engine.model, len(tokens), engine.config.page_size
    assert isinstance(model, KernelModel)
    pool = PagedPool(engine.shape, engine.recipe, -(-n // page), page, engine.device, model.backend)
    rows = torch.arange(n, device=engine.device)
    step = KernelStep(tokens, rows, rows, contexts=(Context(rows, (Span(0, n, 0, n),)),), last_rows=rows[first:])
    return model.run(step, pool)
