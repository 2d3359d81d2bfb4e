"""Records that leave the device as they are written: a few steps on the device, the rest on the host.

Kept by cache slot on the device, guidance would take a third of the memory of an FP4 cache. So a step writes its rows
into a small buffer there, all sites and layers of a row side by side; filled rows are copied to pinned memory on a
stream of their own, and the host puts them into their slots while the device runs the next step. What is kept by slot
is plain host memory, taken as it is first written.

Order is what makes it right: copies, scatters and gathers form one queue. A slot's next owner writes rows that come
later in it than the gather of the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tracefp4.guidance.schema import row_bytes, site_bits
from tracefp4.guidance.staging import HostCopy, HostStaging
from tracefp4.guidance.store import SiteRows, TrajectoryGuidance
from tracefp4.kernels.quantize_record import RecordTarget
from tracefp4.recipe import QuantRecipe


class RowLayout:
    """What is kept of one row and where: chosen experts, then encode scales, then payloads, site by site.

    widths: values per row of each recorded site. routed: (layers, experts per token) of the routing, (0, 0) to leave it
    out. nbytes: of one row, a multiple of 16.
    """

    def __init__(
        self,
        recipe: QuantRecipe,
        layers: Sequence[int],
        bits: float,
        widths: Mapping[str, int],
        routed: tuple[int, int] = (0, 0),
    ) -> None:
        self.recipe_hash, self.layers, self.bits, self.routed = recipe.hash, tuple(layers), bits, routed
        self.sizes: dict[str, int] = {}
        self.widths: dict[str, float] = {}  # bits a value
        self.static_scale: dict[str, Tensor | None] = {}
        self._scale_at: dict[str, int] = {}
        self._payload_at: dict[str, int] = {}
        end = -(-2 * routed[0] * routed[1] // 4) * 4
        for site, width in widths.items():
            name = recipe.site_format(site)
            if name is None or not self.layers:
                continue
            self.widths[site] = site_bits(name, bits)
            self.sizes[site] = row_bytes(name, self.widths[site], width)
            kind = recipe.site_encode_scale(site)
            if isinstance(kind, str):
                self._scale_at[site] = end
                end += 4 * len(self.layers)
            else:
                self.static_scale[site] = None if kind is None else torch.tensor(float(kind))
        for site, size in self.sizes.items():
            self._payload_at[site] = end
            end += size * len(self.layers)
        self.nbytes = -(-end // 16) * 16

    def payload(self, rows: Tensor, site: str, i: int) -> Tensor:
        """uint8 [R, row bytes]: the columns of a site in the i-th recorded layer, of rows uint8 [R, nbytes]."""
        size = self.sizes[site]
        return rows.narrow(1, self._payload_at[site] + i * size, size)

    def encode_scale(self, rows: Tensor, site: str, i: int) -> Tensor | None:
        """f32 [R], or None where S is static."""
        at = self._scale_at.get(site)
        return None if at is None else rows.view(torch.float32).select(1, at // 4 + i)

    def experts(self, rows: Tensor) -> Tensor:
        """int16 [R, layers, K] of the routing."""
        layers, k = self.routed
        return rows.view(torch.int16).narrow(1, 0, layers * k).unflatten(1, self.routed)

    def sites(self, rows: Tensor) -> dict[str, SiteRows]:
        """Guidance of gathered rows, layer by layer, in memory of its own."""
        n, L = len(rows), len(self.layers)
        out = {}
        for site, size in self.sizes.items():
            columns = rows.narrow(1, self._payload_at[site], L * size)
            payload = columns.reshape(n, L, size).transpose(0, 1).contiguous()
            at = self._scale_at.get(site)
            if at is None:
                out[site] = SiteRows(payload, self.static_scale[site])
            else:
                out[site] = SiteRows(payload, rows.view(torch.float32).narrow(1, at // 4, L).T.contiguous())
        return out


@dataclass
class GatheredRows:
    """Rows of one trajectory that a recorder will hand out. rows uint8 [n, nbytes], None until they are there."""

    layout: RowLayout
    slots: Tensor
    rows: Tensor | None = None

    @property
    def ready(self) -> bool:
        return self.rows is not None

    def experts(self) -> Tensor:
        """int16 [n, layers, K], in memory of its own."""
        assert self.rows is not None
        return self.layout.experts(self.rows).clone()

    def guidance(self, token_ids: Tensor, versions: Tensor, valid: Tensor) -> TrajectoryGuidance:
        assert self.rows is not None
        layout, sites = self.layout, self.layout.sites(self.rows)
        return TrajectoryGuidance(layout.recipe_hash, layout.bits, layout.layers, sites, token_ids, versions, valid)


@dataclass
class _Scatter:
    copy: HostCopy | None
    rows: Tensor
    slots: Tensor


class StreamRecorder:
    """Rows by cache slot on the host, filled from two device buffers in turn.

    num_slots: of the cache. chunk_rows: rows of a device buffer; no step may write more.
    """

    def __init__(self, layout: RowLayout, num_slots: int, chunk_rows: int, device: str) -> None:
        self.layout, self.chunk_rows = layout, chunk_rows
        self._device_rows = torch.zeros(2 * chunk_rows + 1, layout.nbytes, dtype=torch.uint8, device=device)
        # Untouched pages of a numpy array take no memory; torch.zeros would touch them.
        self._host_rows = torch.from_numpy(np.zeros((num_slots, layout.nbytes), dtype=np.uint8))
        self._staging = HostStaging(device, max(1 << 20, 3 * self.chunk_bytes))
        self._chunk = 0
        self._begun: list[Tensor] = []
        self._filled = 0
        self._copies: list[HostCopy | None] = [None, None]
        self._queue: deque[_Scatter | GatheredRows] = deque()

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_rows * self.layout.nbytes

    @property
    def scratch_row(self) -> int:
        """A row of the device buffer that padding may write to."""
        return 2 * self.chunk_rows

    @staticmethod
    def device_bytes(layout: RowLayout, chunk_rows: int) -> int:
        """What a recorder takes of the device's memory."""
        return (2 * chunk_rows + 1) * layout.nbytes

    def begin(self, slots: Tensor) -> int:
        """Makes room for a step's rows, int64 [N] slots on the host; the first of the N device rows to write.

        Raises ValueError where a step has more rows than a buffer.
        """
        n = len(slots)
        if n > self.chunk_rows:
            raise ValueError(f"a step of {n} rows exceeds the recorder's {self.chunk_rows}")
        if self._filled + n > self.chunk_rows:
            self.flush()
        first = self._chunk * self.chunk_rows + self._filled
        self._begun.append(slots)
        self._filled += n
        return first

    def target(self, site: str, layer: int, rows: Tensor) -> RecordTarget | None:
        """Where a site's guidance goes; rows int64 [N] of the device buffer. None where it is not recorded."""
        if site not in self.layout.sizes or layer not in self.layout.layers:
            return None
        i = self.layout.layers.index(layer)
        scale = self.layout.encode_scale(self._device_rows, site, i)
        return RecordTarget(self.layout.payload(self._device_rows, site, i), rows, self.layout.widths[site], scale)

    def write_experts(self, rows: Tensor, experts_NLK: Tensor) -> None:
        """Keeps the routing of a step, int64 [N, layers, K]."""
        if self.layout.routed[0]:
            self.layout.experts(self._device_rows).index_copy_(0, rows, experts_NLK.to(torch.int16))

    def flush(self) -> None:
        """Starts the copy of the rows written since the last one and turns to the other buffer; waits for nothing but
        that buffer's own last copy, two flushes ago."""
        if not self._filled:
            return
        start = self._chunk * self.chunk_rows
        (rows,), copy = self._staging.copy([self._device_rows[start : start + self._filled]])
        self._queue.append(_Scatter(copy, rows, torch.cat(self._begun)))
        self._copies[self._chunk] = copy
        self._chunk, self._begun, self._filled = 1 - self._chunk, [], 0
        last = self._copies[self._chunk]
        if last is not None:
            last.hold_back()

    def gather(self, slots: Tensor) -> GatheredRows:
        """Asks for the rows of some slots, as written so far; ``poll`` brings them."""
        self.flush()
        wanted = GatheredRows(self.layout, slots)
        self._queue.append(wanted)
        return wanted

    def poll(self, wait: bool = False) -> None:
        """Works off what has arrived; wait: everything, however long it takes."""
        while self._queue:
            job = self._queue[0]
            if isinstance(job, _Scatter):
                if job.copy is not None:
                    if wait:
                        job.copy.wait()
                    elif not job.copy.ready():
                        return
                self._host_rows.index_copy_(0, job.slots, job.rows)
                if job.copy is not None:
                    job.copy.release()
            else:
                job.rows = self._host_rows.index_select(0, job.slots)
            self._queue.popleft()
