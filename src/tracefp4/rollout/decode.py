"""A decode step over memory that stays where it is, captured once per batch size and replayed.

Legend: M most sequences of a step, B rows of a captured step (a bucket), P pages of a block table.

A step reads token, position and block table of every row and leaves the next token and position in their place, so
that as long as the batch stays the same the host sends nothing but new pages. Rows past the batch have position -1:
their K and V go to a scratch page, their record to a scratch row, their context is empty; what they compute is thrown
away. Without CUDA graphs, and on the CPU, the very same step runs eagerly.

The host waits for a small copy of tokens, log-probs and one flag per row. Then, where no row has come to its end, it
launches the next step at once and keeps its books while the device works (``ahead``). Should the next batch be another
one after all, such a step is dropped: its rows run again, write the same slots and draw the same tokens.

Where a step takes the device less time than the host's books, several are launched in a row (a burst): what a row draws
behind its stop token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tracefp4.guidance.stream import StreamRecorder
from tracefp4.rollout.head import append_head, likeliest
from tracefp4.rollout.kernel_model import KernelModel, KernelStep, Recording
from tracefp4.rollout.paged_pool import PagedPool
from tracefp4.rollout.sampler import SamplingTensors, draw, not_finite
from tracefp4.rollout.sequence import Drawn
from tracefp4.rollout.sequence import Sequence as Seq
from tracefp4.types import SamplingParams

PADDING = SamplingParams(temperature=0.0)
Size = tuple[int, bool, bool]
"""What a step is captured for: rows, whether some are sampled by top-p, whether some are probed."""


def buckets(most: int) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, then steps of 8, 16, 32 and 64, and the most itself."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, 512, 32), *range(512, most, 64)]
    return [n for n in sizes if n < most] + [most]


class DecodeRunner:
    """Runs one token of up to ``max_num_seqs`` sequences over static buffers.

    max_pages: columns of a block table. recorder: what the steps record to, if anything. graphs: capture and replay.
    burst: most steps of a run.
    """

    def __init__(
        self,
        model: KernelModel,
        pool: PagedPool,
        max_num_seqs: int,
        max_pages: int,
        recorder: StreamRecorder | None,
        graphs: bool,
        burst: int = 1,
    ) -> None:
        self.model, self.pool, self.graphs = model, pool, graphs
        self.buckets = buckets(max_num_seqs)
        self._recorder = recorder
        M, device = max_num_seqs, torch.device(model.device)
        self._pinned = pinned = device.type == "cuda"
        self.tokens, self.positions = (torch.zeros(M, dtype=torch.int64, device=device) for _ in range(2))
        self.tables = torch.zeros(M, max_pages, dtype=torch.int32, device=device)
        self.first_record, self.first_probe = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.probe: StreamRecorder | None = None  # of full codes, for the rows that ask for it
        self.probe_places = torch.full((M,), -1, dtype=torch.int64, device=device)  # among those; -1: none
        self.settings = SamplingTensors.of([PADDING] * M).to(device)
        self.out = torch.zeros(3, M, dtype=torch.float64, device=device)  # token, log-prob, whether it is finite
        self.heads: Tensor | None = None  # [2, M, k]: ids and log-probs of the likeliest tokens, where they are kept
        self._host_heads: Tensor | None = None
        self._index = torch.arange(M, device=device)
        self.burst, self._launched = burst, 0
        self._host_out = torch.zeros(burst, 3, M, dtype=torch.float64, pin_memory=pinned)
        self._host_state = torch.zeros(2, M, dtype=torch.int64, pin_memory=pinned)
        self._host_settings = SamplingTensors.of([PADDING] * M)
        if pinned:
            self._host_settings = self._host_settings.pinned()
        self._host_tables = torch.zeros(M, max_pages, dtype=torch.int32, pin_memory=pinned)
        self._host_places = torch.full((M,), -1, dtype=torch.int64, pin_memory=pinned)
        self.ahead = pinned
        self._flying = False
        self._event: torch.cuda.Event | None = None
        self._tables_sent: torch.cuda.Event | None = None
        self._size: Size = (0, False, False)
        self._rows: list[Seq] = []
        self._row_of: dict[int, int] = {}  # by id of the sequence
        self._lengths = torch.zeros(0, dtype=torch.int64)  # of the rows' tokens, as the device has them
        self._room = torch.zeros(0, dtype=torch.int64)  # tokens that each row may still be given
        self._stops = torch.zeros(0, dtype=torch.int64)  # of these rows and earlier ones
        self._slots = torch.zeros(0, dtype=torch.int64)  # that each row's pages hold
        self._pages: list[int] = []
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        # Where captured steps of all sizes leave their logits: top-p reads them behind the graph, whose own memory is
        # the next graph's too. So that memory holds none, of which a smaller size's would not do for a larger one.
        V = model.shape.vocab
        self._logits = torch.empty(M, V, dtype=model.dtype, device=device) if graphs else None
        self._memory: Any = None
        self.captures = 0

    # -- one step on the device ----------------------------------------------------------------------------------

    def _forward(self, B: int, probed: bool) -> Tensor:
        """Logits [B, V] of the rows as the buffers have them: in ``_logits`` where steps are captured."""
        page = self.pool.page_size
        positions, tables = self.positions[:B], self.tables[:B]
        at = positions.clamp_min(0)
        slots = tables.gather(1, (at // page)[:, None])[:, 0].long() * page + at % page
        recordings: tuple[Recording, ...] = ()
        if self._recorder is not None:
            rows = torch.where(positions >= 0, self.first_record + self._index[:B], self._recorder.scratch_row)
            recordings = (Recording(self._recorder, rows),)
        if probed:
            assert self.probe is not None
            places = self.probe_places[:B]
            rows = torch.where((places >= 0) & (positions >= 0), self.first_probe + places, self.probe.scratch_row)
            recordings += (Recording(self.probe, rows),)
        step = KernelStep(self.tokens[:B], positions, slots, recordings, tables=tables, lengths=(positions + 1).int())
        return self.model.run(step, self.pool, None if self._logits is None else self._logits[:B])

    def _draw(self, logits: Tensor, B: int, nucleus: bool) -> None:
        """Samples, and moves every row on to its next token."""
        positions = self.positions[:B]
        ids, logprobs, finite = draw(logits, self.settings.rows(slice(B)), positions + 1, nucleus, self.model.backend)
        for row, values in zip(self.out[:, :B], (ids, logprobs, finite), strict=True):
            row.copy_(values)
        if self.heads is not None:
            kept = likeliest(logits, self.settings.temperature[:B], self.heads.shape[-1])
            for part, found in zip(self.heads[:, :B], kept, strict=True):
                part.copy_(found)
        self.tokens[:B].copy_(ids)
        positions.add_((positions >= 0).long())

    def _eager(self, B: int, nucleus: bool, probed: bool) -> None:
        self._draw(self._forward(B, probed), B, nucleus)

    def _captured(self, B: int, nucleus: bool, probed: bool) -> None:
        """What the graph of a size holds. All that it leaves is in buffers that were there before it."""
        logits = self._forward(B, probed)
        if not nucleus:
            self._draw(logits, B, nucleus)

    def _replay(self, B: int, nucleus: bool, probed: bool) -> None:
        """Top-p sorts, whose scratch memory a graph would keep for every size: it follows the graph, eagerly."""
        self._graphs[B, nucleus, probed].replay()
        if nucleus:
            assert self._logits is not None
            self._draw(self._logits[:B], B, nucleus)

    @torch.no_grad()
    def capture(self, B: int, nucleus: bool = False, probed: bool = False) -> None:
        """Captures the step of a batch size; rows in flight are padding meanwhile and have to be sent again."""
        self._reset()
        self._eager(B, nucleus, probed)  # compiles and allocates what a capture must not
        self._reset()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device, as the guidance store's writer does.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._captured(B, nucleus, probed)
        self._memory = self._memory or graph.pool()
        self._graphs[B, nucleus, probed] = graph
        self.captures += 1

    def _reset(self) -> None:
        """All rows padding."""
        self.positions.fill_(-1)
        self.tokens.zero_()
        self.tables[:, 0] = self.pool.scratch_page
        self._rows, self._lengths, self._pages = [], torch.zeros(0, dtype=torch.int64), []
        self._row_of = {}
        self._flying = False

    # -- the batch -----------------------------------------------------------------------------------------------

    def run(self, batch: Sequence[Seq], before_wait: Callable[[], None] | None = None) -> list[Drawn]:
        """Forwards each sequence's last token, samples the next, and so on: what was drawn for each sequence, up to its
        stop token, in the order of the batch.

        before_wait: called while the device works. Raises FloatingPointError where logits are not finite; the same
        batch can be run again then.
        """
        rows = self.order(batch)
        same = self._unchanged(rows)
        if not (self._flying and same):
            nucleus = any(s.request.sampling.top_p < 1 for s in batch)
            probed = self.probe is not None and any(s.request.probe for s in batch)
            size = (next(n for n in self.buckets if n >= len(batch)), nucleus, probed)
            if self.graphs and size not in self._graphs:
                self.capture(*size)
                same = False
            self._size = size
            self._send(rows, same)
            self._launch(max(1, self._possible()))
            self._flying = True  # should anything raise below, the very same batch finds what was drawn for it
        self._send_tables(rows)  # of the steps after these
        if before_wait is not None:
            before_wait()
        if self._event is not None:
            self._event.synchronize()
        self._flying = False
        n, steps = len(rows), self._launched
        out = self._host_out[:steps, :, :n].clone()
        heads = None if self._host_heads is None else self._host_heads[:steps, :, :n].clone()
        ids = out[:, 0].long()
        stops = torch.isin(ids, self._stops)
        live = stops.cumsum(0) - stops.long() == 0  # the stop token itself counts
        if not bool((out[:, 2].bool() | ~live).all()):
            self._reset()
            raise not_finite()
        self._lengths += steps
        self._room -= steps
        self._host_state[0, :n], self._host_state[1, :n] = ids[-1], self._lengths - 1
        if self.ahead and not bool(stops.any()) and (more := self._possible()):
            self._launch(more)
            self._flying = True
        self._lengths[stops[:-1].any(0)] = -1  # the device went on behind a stop: such a row is no known one
        counts = live.sum(0).tolist()
        if heads is not None:
            for i, (seq, count) in enumerate(zip(rows, counts, strict=True)):
                append_head(seq, heads[:count, 0, i], heads[:count, 1, i])
        drawn = [
            (row[:count], values[:count])
            for row, values, count in zip(ids.T.tolist(), out[:, 1].T.tolist(), counts, strict=True)
        ]
        return [drawn[self._row_of[id(s)]] for s in batch]

    def keep_heads(self, k: int) -> None:
        """From the next step on keeps the k likeliest tokens of every position, or more where that was asked before."""
        k = min(k, self.model.shape.vocab)
        if self.heads is not None and self.heads.shape[-1] >= k:
            return
        self._reset()  # the captured steps keep fewer
        self._graphs.clear()
        self._memory = None
        M = len(self.tokens)
        self.heads = torch.zeros(2, M, k, dtype=torch.float64, device=self.tokens.device)
        self._host_heads = torch.zeros(self.burst, 2, M, k, dtype=torch.float64, pin_memory=self._pinned)

    def drop(self) -> None:
        """Forgets a step that was launched ahead: weights are about to change."""
        self._reset()

    def _possible(self) -> int:
        """Steps that may be launched now: no row may pass its last token, or the slots that its pages hold."""
        room = torch.minimum(self._room, self._slots - self._lengths + 1)
        return max(0, min(self.burst, int(room.min())))

    def _launch(self, steps: int) -> None:
        """Steps of the rows that the buffers hold, and the copies of what they draw."""
        page, tables = self.pool.page_size, self._host_tables[: len(self._lengths)]
        for step in range(steps):
            if self._recorder is not None or self._size[2]:
                at = self._lengths - 1 + step
                slots = tables.gather(1, (at // page)[:, None])[:, 0].long() * page + at % page
                if self._recorder is not None:
                    self.first_record.fill_(self._recorder.begin(slots))
                if self._size[2]:
                    assert self.probe is not None
                    self.first_probe.fill_(self.probe.begin(slots[self._host_places[: len(slots)] >= 0]))
            with torch.no_grad():
                (self._replay if self.graphs else self._eager)(*self._size)
            self._host_out[step].copy_(self.out, non_blocking=True)  # whole: a part would be no plain copy, and wait
            if self.heads is not None and self._host_heads is not None:
                self._host_heads[step].copy_(self.heads, non_blocking=True)
        self._launched = steps
        self._event = torch.cuda.current_stream().record_event() if self._pinned else None

    def _unchanged(self, rows: list[Seq]) -> bool:
        """Whether these are the rows that the device has, at the lengths it has them."""
        if len(rows) != len(self._rows):
            return False
        return all(
            s is t and len(s.tokens) == n for s, t, n in zip(rows, self._rows, self._lengths.tolist(), strict=True)
        )

    def order(self, batch: Sequence[Seq]) -> list[Seq]:
        """The batch in the order of its rows: who stays keeps its row, newcomers fill the gaps."""
        if len(batch) == len(self._rows) and all(id(s) in self._row_of for s in batch):
            return self._rows
        wanted = {id(s) for s in batch}
        new = iter([s for s in batch if id(s) not in self._row_of])
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
            self._send_tables(rows)
            return
        self._wait_for_tables()
        before = zip(rows, self._rows, self._lengths.tolist(), strict=False)
        # A row whose length is not the expected one may have been preempted, and have other pages.
        known = [s is t and len(s.tokens) == length for s, t, length in before]
        known += [False] * (n - len(known))
        self._place(rows, [i for i, here in enumerate(known) if not here])
        self._rows, self._row_of = rows, {id(s): i for i, s in enumerate(rows)}
        self._pages = [*self._pages, *[0] * n][:n]
        self._send_tables(rows, known, force=True)

    def _place(self, rows: list[Seq], new: list[int]) -> None:
        """Fills in the rows at these places, on the host, and sends state and settings; the others are there."""
        n, state = len(rows), self._host_state
        seqs, places = [rows[i] for i in new], torch.tensor(new, dtype=torch.int64)
        lengths, room = (torch.zeros(n, dtype=torch.int64) for _ in range(2))
        for to, have in ((lengths, self._lengths[:n]), (room, self._room[:n])):
            to[: len(have)] = have
        own = torch.tensor([len(s.tokens) for s in seqs], dtype=torch.int64)
        lengths[places] = own
        room[places] = torch.tensor([s.request.sampling.max_new_tokens - s.num_new for s in seqs], dtype=torch.int64)
        state[0, places] = torch.tensor([s.tokens[-1] for s in seqs], dtype=torch.int64)
        state[1, places] = own - 1
        state[0, n:], state[1, n:] = 0, -1
        self._host_tables[n:, 0] = self.pool.scratch_page
        self.tokens.copy_(state[0], non_blocking=True)
        self.positions.copy_(state[1], non_blocking=True)
        if new:
            settings = SamplingTensors.of([s.request.sampling for s in seqs])
            for name in ("temperature", "top_p", "seeds", "greedy"):
                host = getattr(self._host_settings, name)
                host[places] = getattr(settings, name)
                getattr(self.settings, name).copy_(host, non_blocking=True)
            self._stops = torch.tensor(
                sorted({t for s in seqs for t in s.request.sampling.stop_token_ids} | set(self._stops.tolist())),
                dtype=torch.int64,
            )
        self._lengths, self._room = lengths, room
        if self.probe is not None:
            flags = torch.tensor([s.request.probe for s in rows])
            self._host_places.fill_(-1)
            self._host_places[:n] = torch.where(flags, flags.long().cumsum(0) - 1, -1)
            self.probe_places.copy_(self._host_places, non_blocking=True)

    def _send_tables(self, rows: list[Seq], known: list[bool] | None = None, force: bool = False) -> None:
        """Sends the block tables where a row has pages that the device does not know. known: whether it knows any."""
        pages = self._pages
        more = [i for i, s in enumerate(rows) if len(s.block_table) != pages[i] or not (known is None or known[i])]
        if not (more or force):
            return
        self._wait_for_tables()
        for i in more:
            table = rows[i].block_table
            start = pages[i] if known is None or known[i] else 0
            self._host_tables[i, start : len(table)] = torch.tensor(table[start:], dtype=torch.int32)
            pages[i] = len(table)
        self._slots = torch.tensor(pages) * self.pool.page_size
        B = self._size[0]
        self.tables[:B].copy_(self._host_tables[:B], non_blocking=True)
        self._tables_sent = torch.cuda.current_stream().record_event() if self._pinned else None

    def _wait_for_tables(self) -> None:
        """Before the host's tables change: a step launched ahead must not be sent pages of a later batch."""
        if self._tables_sent is not None:
            self._tables_sent.synchronize()
