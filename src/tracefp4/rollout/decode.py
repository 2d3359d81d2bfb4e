"""A decode step over memory that stays where it is, captured once per batch size and replayed.

Legend: M most sequences of a step, B rows of a captured step (a bucket), P pages of a block table.

A step reads token, position and block table of every row and leaves the next token and position in their place, so
that as long as the batch stays the same the host sends nothing but new pages. Rows past the batch have position -1:
their K and V go to a scratch page, their record to a scratch row, their context is empty; what they compute is thrown
away. Without CUDA graphs, and on the CPU, the very same step runs eagerly.

The host waits for a small copy of tokens, log-probs and one flag per row. Then, where no row has come to its end, it
launches the next step at once and keeps its books while the device works (``ahead``). Should the next batch be another
one after all, such a step is dropped: its rows run again, write the same slots and draw the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tracefp4.guidance.stream import StreamRecorder
from tracefp4.rollout.kernel_model import KernelModel, KernelStep, Recording
from tracefp4.rollout.paged_pool import PagedPool
from tracefp4.rollout.sampler import NOT_FINITE, SamplingTensors, draw
from tracefp4.rollout.sequence import Sequence as Seq
from tracefp4.types import SamplingParams

PADDING = SamplingParams(temperature=0.0)


def buckets(most: int) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, then steps of 8, 16, 32 and 64, and the most itself."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, 512, 32), *range(512, most, 64)]
    return [n for n in sizes if n < most] + [most]


class DecodeRunner:
    """Runs one token of up to ``max_num_seqs`` sequences over static buffers.

    max_pages: columns of a block table. recorder: what the steps record to, if anything. graphs: capture and replay.
    """

    def __init__(
        self,
        model: KernelModel,
        pool: PagedPool,
        max_num_seqs: int,
        max_pages: int,
        recorder: StreamRecorder | None,
        graphs: bool,
    ) -> None:
        self.model, self.pool, self.graphs = model, pool, graphs
        self.buckets = buckets(max_num_seqs)
        self._recorder = recorder
        M, device = max_num_seqs, torch.device(model.device)
        self._pinned = pinned = device.type == "cuda"
        self.tokens, self.positions = (torch.zeros(M, dtype=torch.int64, device=device) for _ in range(2))
        self.tables = torch.zeros(M, max_pages, dtype=torch.int32, device=device)
        self.first_record = torch.zeros(1, dtype=torch.int64, device=device)
        self.settings = SamplingTensors.of([PADDING] * M).to(device)
        self.out = torch.zeros(3, M, dtype=torch.float64, device=device)  # token, log-prob, whether it is finite
        self._index = torch.arange(M, device=device)
        self._host_out = torch.zeros(3, M, dtype=torch.float64, pin_memory=pinned)
        self._host_state = torch.zeros(2, M, dtype=torch.int64, pin_memory=pinned)
        self._host_tables = torch.zeros(M, max_pages, dtype=torch.int32, pin_memory=pinned)
        self.ahead = pinned
        self._flying = False
        self._event: torch.cuda.Event | None = None
        self._tables_sent: torch.cuda.Event | None = None
        self._size = (0, False)
        self._rows: list[Seq] = []
        self._lengths = torch.zeros(0, dtype=torch.int64)  # of the rows' tokens, as the device has them
        self._room = torch.zeros(0, dtype=torch.int64)  # tokens that each row may still be given
        self._stops = torch.zeros(0, dtype=torch.int64)
        self._pages: list[int] = []
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._logits: dict[tuple[int, bool], Tensor] = {}
        self._memory: Any = None
        self.captures = 0

    # -- one step on the device ----------------------------------------------------------------------------------

    def _forward(self, B: int) -> Tensor:
        """Logits [B, V] of the rows as the buffers have them."""
        page = self.pool.page_size
        positions, tables = self.positions[:B], self.tables[:B]
        at = positions.clamp_min(0)
        slots = tables.gather(1, (at // page)[:, None])[:, 0].long() * page + at % page
        recordings: tuple[Recording, ...] = ()
        if self._recorder is not None:
            rows = torch.where(positions >= 0, self.first_record + self._index[:B], self._recorder.scratch_row)
            recordings = (Recording(self._recorder, rows),)
        step = KernelStep(self.tokens[:B], positions, slots, recordings, tables=tables, lengths=(positions + 1).int())
        return self.model.run(step, self.pool)

    def _draw(self, logits: Tensor, B: int, nucleus: bool) -> None:
        """Samples, and moves every row on to its next token."""
        positions = self.positions[:B]
        ids, logprobs, finite = draw(logits, self.settings.rows(B), positions + 1, nucleus, self.model.backend)
        for row, values in zip(self.out[:, :B], (ids, logprobs, finite), strict=True):
            row.copy_(values)
        self.tokens[:B].copy_(ids)
        positions.add_((positions >= 0).long())

    def _eager(self, B: int, nucleus: bool) -> None:
        self._draw(self._forward(B), B, nucleus)

    def _replay(self, B: int, nucleus: bool) -> None:
        """Top-p sorts, whose scratch memory a graph would keep for every size: it follows the graph, eagerly."""
        self._graphs[B, nucleus].replay()
        if nucleus:
            self._draw(self._logits[B, nucleus], B, nucleus)

    @torch.no_grad()
    def capture(self, B: int, nucleus: bool = False) -> None:
        """Captures the step of a batch size; rows in flight are padding meanwhile and have to be sent again."""
        self._reset()
        self._eager(B, nucleus)  # compiles and allocates what a capture must not
        self._reset()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device, as the guidance store's writer does.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = self._forward(B)
            if not nucleus:
                self._draw(logits, B, nucleus)
        self._memory = self._memory or graph.pool()
        self._graphs[B, nucleus] = graph
        if nucleus:  # the others' logits may be the next graph's memory
            self._logits[B, nucleus] = logits
        self.captures += 1

    def _reset(self) -> None:
        """All rows padding."""
        self.positions.fill_(-1)
        self.tokens.zero_()
        self.tables[:, 0] = self.pool.scratch_page
        self._rows, self._lengths, self._pages = [], torch.zeros(0, dtype=torch.int64), []
        self._flying = False

    # -- the batch -----------------------------------------------------------------------------------------------

    def run(self, batch: Sequence[Seq], before_wait: Callable[[], None] | None = None) -> list[tuple[int, float]]:
        """Forwards each sequence's last token and samples the next: (token, log-prob), in the order of the batch.

        before_wait: called while the device works. Raises FloatingPointError where logits are not finite; the same
        batch can be run again then.
        """
        rows = self.order(batch)
        same = self._unchanged(rows)
        if not (self._flying and same):
            nucleus = any(s.request.sampling.top_p < 1 for s in batch)
            size = (next(n for n in self.buckets if n >= len(batch)), nucleus)
            if self.graphs and size not in self._graphs:
                self.capture(*size)
                same = False
            self._size = size
            self._send(rows, same)
            self._launch()
        self._send_tables(rows, [True] * len(rows))  # of the step after this one
        if before_wait is not None:
            before_wait()
        if self._event is not None:
            self._event.synchronize()
        self._flying = False
        n = len(rows)
        out = self._host_out[:, :n].clone()
        if not bool(out[2].all()):
            self._reset()
            raise NOT_FINITE
        ids = out[0].long()
        self._lengths += 1
        self._room -= 1
        if self.ahead and self._goes_on(ids):
            self._launch()
            self._flying = True
        drawn = {id(s): (t, p) for s, t, p in zip(rows, ids.tolist(), out[1].tolist(), strict=True)}
        return [drawn[id(s)] for s in batch]

    def drop(self) -> None:
        """Forgets a step that was launched ahead: weights are about to change."""
        self._reset()

    def _launch(self) -> None:
        """One step of the rows that the buffers hold, and the copy of what it draws."""
        if self._recorder is not None:
            at, page = self._lengths - 1, self.pool.page_size
            tables = self._host_tables[: len(at)]
            slots = tables.gather(1, (at // page)[:, None])[:, 0].long() * page + at % page
            self.first_record.fill_(self._recorder.begin(slots))
        with torch.no_grad():
            (self._replay if self.graphs else self._eager)(*self._size)
        self._host_out.copy_(self.out, non_blocking=True)  # whole: a part would be no plain copy, and wait
        self._event = torch.cuda.current_stream().record_event() if self._pinned else None

    def _goes_on(self, ids: Tensor) -> bool:
        """Whether no row ends with its token, int64 [n], and each has a slot for it."""
        slots = torch.tensor(self._pages) * self.pool.page_size
        return bool(
            (self._room > 0).all() and (self._lengths <= slots).all() and not torch.isin(ids, self._stops).any()
        )

    def _unchanged(self, rows: list[Seq]) -> bool:
        """Whether these are the rows that the device has, at the lengths it has them."""
        if len(rows) != len(self._rows):
            return False
        return all(
            s is t and len(s.tokens) == n for s, t, n in zip(rows, self._rows, self._lengths.tolist(), strict=True)
        )

    def order(self, batch: Sequence[Seq]) -> list[Seq]:
        """The batch in the order of its rows: who stays keeps its row, newcomers fill the gaps."""
        wanted = {id(s) for s in batch}
        here = {id(s) for s in self._rows}
        new = iter([s for s in batch if id(s) not in here])
        rows: list[Seq | None] = [s if id(s) in wanted else next(new, None) for s in self._rows]
        rows += list(new)
        while None in rows:  # the last row moves into a gap
            last = rows.pop()
            if last is not None:
                rows[rows.index(None)] = last
        return [s for s in rows if s is not None]

    def _send(self, rows: list[Seq], same: bool) -> None:
        """Brings the buffers up to date with a batch. same: only its pages may be new."""
        n = len(rows)
        if same:
            self._send_tables(rows, [True] * n)
            return
        self._wait_for_tables()
        state, tables = self._host_state, self._host_tables
        lengths = torch.tensor([len(s.tokens) for s in rows])
        state[0, :n] = torch.tensor([s.tokens[-1] for s in rows])
        state[1, :n] = lengths - 1
        state[0, n:], state[1, n:] = 0, -1
        tables[n:, 0] = self.pool.scratch_page
        self.tokens.copy_(state[0], non_blocking=True)
        self.positions.copy_(state[1], non_blocking=True)
        settings = SamplingTensors.of([s.request.sampling for s in rows])
        for name in ("temperature", "top_p", "seeds", "greedy"):
            getattr(self.settings, name)[:n].copy_(getattr(settings, name))
        before = zip(rows, self._rows, self._lengths.tolist(), strict=False)
        # A row whose length is not the expected one may have been preempted, and have other pages.
        known = [s is t and len(s.tokens) == length for s, t, length in before]
        self._rows, self._lengths = rows, lengths
        self._room = torch.tensor([s.request.sampling.max_new_tokens - s.num_new for s in rows])
        self._stops = torch.tensor(
            sorted({t for s in rows for t in s.request.sampling.stop_token_ids}), dtype=torch.int64
        )
        self._pages = [*self._pages, *[0] * n][:n]
        self._send_tables(rows, known + [False] * (n - len(known)), force=True)

    def _send_tables(self, rows: list[Seq], known: list[bool], force: bool = False) -> None:
        """Sends the block tables where a row has pages that the device does not know."""
        changed = force
        for i, s in enumerate(rows):
            start, stop = self._pages[i] if known[i] else 0, len(s.block_table)
            if start != stop:
                if not changed:
                    self._wait_for_tables()
                self._host_tables[i, start:stop] = torch.tensor(s.block_table[start:], dtype=torch.int32)
                self._pages[i] = stop
                changed = True
        if changed:
            B = self._size[0]
            self.tables[:B].copy_(self._host_tables[:B], non_blocking=True)
            self._tables_sent = torch.cuda.current_stream().record_event() if self._pinned else None

    def _wait_for_tables(self) -> None:
        """Before the host's tables change: a step launched ahead must not be sent pages of a later batch."""
        if self._tables_sent is not None:
            self._tables_sent.synchronize()
