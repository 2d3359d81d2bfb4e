"""Runs scheduled rows over the kernels: decode by static buffers, everything else eagerly; records as rows leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tracefp4.device import to_device
from tracefp4.guidance import full_bits
from tracefp4.guidance.stream import RowLayout, StreamRecorder
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.block_manager import slots_of
from tracefp4.rollout.config import RolloutConfig
from tracefp4.rollout.decode import DecodeRunner
from tracefp4.rollout.head import keep_heads
from tracefp4.rollout.kernel_model import Context, KernelModel, KernelStep, Recording, Span
from tracefp4.rollout.model import ModelShape
from tracefp4.rollout.paged_pool import PagedPool
from tracefp4.rollout.sampler import sample
from tracefp4.rollout.scheduler import Scheduled
from tracefp4.rollout.sequence import Drawn

CONTEXT_ROWS = 1 << 16
"""Context rows that a prefill step reads back at a time (one sequence's at least)."""


def row_layout(shape: ModelShape, recipe: QuantRecipe, probe: bool = False) -> RowLayout | None:
    """What a run keeps of a row, or what a probe does: full codes of all layers. None where there is nothing."""
    kv_width = shape.kv_heads * shape.head_dim
    widths = {"expert_input": shape.hidden, "key": kv_width, "value": kv_width}
    if probe:
        full = {full_bits(name) for name in (recipe.activations, recipe.kv) if name}
        return RowLayout(recipe, range(shape.layers), max(full), widths) if full else None
    layout = RowLayout(
        recipe, recipe.guided_layers, recipe.bits, widths, (shape.routed_layers, shape.experts_per_token)
    )
    return layout if layout.nbytes else None


def chunk_rows(config: RolloutConfig) -> int:
    """Rows of a recorder's device buffer: the most that a step can have."""
    return max(config.max_tokens_per_step, config.max_num_seqs)


class KernelExecutor:
    """recipe: what is recorded. config: resolved. num_pages: of the cache, without its scratch page."""

    def __init__(self, model: KernelModel, recipe: QuantRecipe, config: RolloutConfig, num_pages: int) -> None:
        self.model, self.recipe, self.config, self.device = model, recipe, config, model.device
        shape = model.shape
        self.pool = PagedPool(shape, recipe, num_pages, config.page_size, self.device, model.backend)
        self._slots = num_pages * config.page_size
        layout = row_layout(shape, recipe)
        self.recorder = None if layout is None else self._make_recorder(layout)
        self.probe: StreamRecorder | None = None
        self.runner = DecodeRunner(
            model,
            self.pool,
            config.max_num_seqs,
            -(-config.max_model_len // config.page_size),
            self.recorder,
            graphs=config.cuda_graphs and torch.device(self.device).type == "cuda",
            burst=config.steps_per_sync,
        )

    def _make_recorder(self, layout: RowLayout) -> StreamRecorder:
        return StreamRecorder(layout, self._slots, chunk_rows(self.config), self.device)

    def expect_probes(self) -> None:
        """Makes the recorder of full codes, which is large, when the first request asks for it."""
        if self.probe is None and (layout := row_layout(self.model.shape, self.recipe, probe=True)) is not None:
            self.probe = self.runner.probe = self._make_recorder(layout)

    def run(self, batch: list[Scheduled], meanwhile: Callable[[], None] | None = None) -> list[Drawn]:
        """What was drawn for every scheduled sequence whose rows are complete, in order: a token each, or, in decode
        steps, up to ``steps_per_sync``. meanwhile: called while the device works.

        Raises FloatingPointError where logits are not finite; the same rows can run again then.
        """
        meanwhile = meanwhile or self.poll
        if all(s.stop - s.start == 1 and s.samples for s in batch):
            return self.runner.run([s.seq for s in batch], meanwhile)
        probed = self.probe is not None and any(s.seq.request.probe for s in batch)
        given = [s for s in batch if s.samples]
        # Neighbours of equal lengths attend in one call: so prompts of one length stand together.
        batch = sorted(batch, key=lambda s: (s.stop - s.start, s.stop))
        step = self._prepare(batch, probed)
        logits = self.model.run(step, self.pool)
        meanwhile()
        seqs = [s.seq for s in batch if s.samples]
        if not seqs:
            return []
        positions = torch.tensor([len(s.tokens) for s in seqs], device=self.device)
        ids, logprobs = sample(logits, [s.request.sampling for s in seqs], positions, self.model.backend)
        keep_heads(seqs, logits)
        drawn = {id(s): ([i], [p]) for s, i, p in zip(seqs, ids.tolist(), logprobs.tolist(), strict=True)}
        return [drawn[id(s.seq)] for s in given]

    def _prepare(self, batch: list[Scheduled], probed: bool) -> KernelStep:
        """Rows of any number per sequence; where each has one, attention is that of a decode step."""
        page = self.config.page_size
        tokens = torch.tensor([t for s in batch for t in s.seq.tokens[s.start : s.stop]])
        positions = torch.cat([torch.arange(s.start, s.stop) for s in batch])
        whole = [slots_of(s.seq.block_table, 0, s.stop, page) for s in batch]
        slots = torch.cat([x[s.start :] for x, s in zip(whole, batch, strict=True)])
        counts = torch.tensor([s.stop - s.start for s in batch])
        last = (counts.cumsum(0) - 1)[torch.tensor([s.samples for s in batch])]
        recordings = []
        if self.recorder is not None:
            first = self.recorder.begin(slots)
            recordings.append(Recording(self.recorder, to_device(torch.arange(first, first + len(slots)), self.device)))
        if probed:
            flags = torch.repeat_interleave(torch.tensor([s.seq.request.probe for s in batch]), counts)
            recordings.append(self._probe_rows(slots, flags))
        step = KernelStep(
            to_device(tokens, self.device),
            to_device(positions, self.device),
            to_device(slots, self.device),
            tuple(recordings),
            last_rows=to_device(last, self.device),
        )
        if int(counts.max()) > 1:
            return replace(step, contexts=self._contexts(batch, whole))
        tables = torch.zeros(len(batch), max(len(s.seq.block_table) for s in batch), dtype=torch.int32)
        for row, s in zip(tables, batch, strict=True):
            row[: len(s.seq.block_table)] = torch.tensor(s.seq.block_table, dtype=torch.int32)
        return replace(
            step, tables=to_device(tables, self.device), lengths=to_device((positions + 1).int(), self.device)
        )

    def _probe_rows(self, slots: Tensor, flags: Tensor) -> Recording:
        assert self.probe is not None
        first = self.probe.begin(slots[flags])
        rows = torch.where(flags, first + flags.long().cumsum(0) - 1, self.probe.scratch_row)
        return Recording(self.probe, to_device(rows, self.device))

    def _contexts(self, batch: list[Scheduled], whole: list[Tensor]) -> tuple[Context, ...]:
        groups: list[tuple[list[Tensor], list[Span]]] = []
        first = start = 0
        for s, slots in zip(batch, whole, strict=True):
            if not groups or start + len(slots) > CONTEXT_ROWS:
                groups.append(([], []))
                start = 0
            groups[-1][0].append(slots)
            groups[-1][1].append(Span(first, s.stop - s.start, start, start + len(slots)))
            first, start = first + s.stop - s.start, start + len(slots)
        return tuple(Context(to_device(torch.cat(slots), self.device), tuple(spans)) for slots, spans in groups)

    def poll(self, wait: bool = False) -> None:
        """Works off records that have reached the host."""
        for recorder in (self.recorder, self.probe):
            if recorder is not None:
                recorder.poll(wait)
