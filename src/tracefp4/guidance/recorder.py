"""The rollout's side of guidance: device buffers written inside the step, gathered when a trajectory ends.

Rows are kept by cache slot, like K and V themselves: a slot is owned by one sequence from its prefill until its
pages are released, and the engine gathers before it releases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks
from tracefp4.guidance.codec import pack_rows
from tracefp4.guidance.schema import row_bytes, site_bits
from tracefp4.guidance.staging import HostStaging
from tracefp4.guidance.store import SiteRows, TrajectoryGuidance
from tracefp4.recipe import QuantRecipe


class SlotRecorder:
    """Packed guidance of ``layers`` for every slot of the cache.

    widths: values per row of each recorded site. Memory: slots * layers * row bytes, allocated once. staging: host
    memory for asynchronous copies; made where the device is CUDA, not used on the CPU unless given.
    """

    def __init__(
        self,
        recipe: QuantRecipe,
        layers: Sequence[int],
        bits: float,
        num_slots: int,
        widths: Mapping[str, int],
        device: str,
        staging: HostStaging | None = None,
    ) -> None:
        self._staging = HostStaging(device) if staging is None and torch.device(device).type == "cuda" else staging
        self.recipe_hash = recipe.hash
        self.layers = tuple(layers)
        self.bits = bits
        self._index = {layer: i for i, layer in enumerate(self.layers)}
        self._payload: dict[str, Tensor] = {}
        self._row_scale: dict[str, Tensor] = {}
        self._static_scale: dict[str, Tensor | None] = {}
        for site, width in widths.items():
            name = recipe.site_format(site)
            if name is None:
                continue
            size = row_bytes(name, site_bits(name, bits), width)
            self._payload[site] = torch.zeros(len(self.layers), num_slots, size, dtype=torch.uint8, device=device)
            kind = recipe.site_encode_scale(site)
            if isinstance(kind, str):
                self._row_scale[site] = torch.ones(len(self.layers), num_slots, device=device)
            else:
                self._static_scale[site] = None if kind is None else torch.tensor(float(kind))

    def write(
        self, slots: Tensor, blocks: Mapping[tuple[str, int], QuantizedBlocks], rows: Tensor | None = None
    ) -> None:
        """Packs a step's blocks into its slots. rows int64: only these rows of the step (slots match them)."""
        for (site, layer), b in blocks.items():
            i = self._index.get(layer)
            if i is None or site not in self._payload:
                continue
            if rows is not None:
                b = b.rows(rows)
            self._payload[site][i].index_copy_(0, slots, pack_rows(b, site_bits(b.format, self.bits)))
            if site in self._row_scale:
                assert b.encode_scale is not None
                self._row_scale[site][i].index_copy_(0, slots, b.encode_scale.reshape(-1))

    def gather(self, slots: Tensor, token_ids: Tensor, versions: Tensor, valid: Tensor) -> TrajectoryGuidance:
        """The record of one trajectory on the host. slots int64 [L1] in order of position; the rest: see the type.

        With staging the rows are gathered on the device now and may reach the host later (``record.staged``).
        """
        rows = {site: payload[:, slots] for site, payload in self._payload.items()}
        scales = {site: scale[:, slots] for site, scale in self._row_scale.items()}
        staged = None
        if self._staging is None:
            host = [t.cpu() for t in (*rows.values(), *scales.values())]
        else:
            host, staged = self._staging.copy([*rows.values(), *scales.values()])
        payloads = dict(zip(rows, host, strict=False))
        row_scales = dict(zip(scales, host[len(rows) :], strict=True))
        sites = {
            site: SiteRows(payload, row_scales[site] if site in row_scales else self._static_scale[site])
            for site, payload in payloads.items()
        }
        return TrajectoryGuidance(self.recipe_hash, self.bits, self.layers, sites, token_ids, versions, valid, staged)
