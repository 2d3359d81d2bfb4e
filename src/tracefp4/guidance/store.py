"""Where a trajectory's guidance lives between rollout and trainer.

Legend: L1 rows of one trajectory (tokens - 1), G guided layers, W bytes of a packed row.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tracefp4.guidance.schema import GuidanceError
from tracefp4.types import GuidanceHandle


@dataclass(frozen=True)
class SiteRows:
    """Packed rows of one site: payload uint8 [G, L1, W]; encode_scale f32 [G, L1], f32 [] (static) or None (MX)."""

    payload: Tensor
    encode_scale: Tensor | None


@dataclass(frozen=True)
class TrajectoryGuidance:
    """All guidance of one trajectory.

    layers: the G guided layers, ascending; bits per value; sites: "expert_input", "key", "value" as recorded;
    token_ids int32 [L1], the token each row forwarded; versions int32 [L1], the policy version it ran under;
    valid bool [L1], False where the rollout has no single right row (preemption).
    """

    recipe_hash: str
    bits: float
    layers: tuple[int, ...]
    sites: dict[str, SiteRows]
    token_ids: Tensor
    versions: Tensor
    valid: Tensor

    def __post_init__(self) -> None:
        rows = len(self.token_ids)
        for site, data in self.sites.items():
            if tuple(data.payload.shape[:2]) != (len(self.layers), rows):
                raise GuidanceError(
                    f"{site}: payload {tuple(data.payload.shape)} does not hold {len(self.layers)} layers x {rows} rows"
                )
        if len(self.versions) != rows or len(self.valid) != rows:
            raise GuidanceError(f"{rows} token ids, {len(self.versions)} versions and {len(self.valid)} valid bits")

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of packed guidance and per-row encode scales: what has to move for each trajectory."""
        total = 0
        for data in self.sites.values():
            total += data.payload.numel()
            if data.encode_scale is not None and data.encode_scale.ndim:
                total += 4 * data.encode_scale.numel()
        return total

    def checksum(self) -> int:
        """CRC32 over every stored byte and the header fields."""
        header = f"{self.recipe_hash}|{self.bits}|{self.layers}|{sorted(self.sites)}"
        crc = zlib.crc32(header.encode())
        tensors = [self.token_ids, self.versions, self.valid]
        for site in sorted(self.sites):
            tensors.append(self.sites[site].payload)
            scale = self.sites[site].encode_scale
            if scale is not None:
                tensors.append(scale)
        for t in tensors:
            crc = zlib.crc32(t.contiguous().view(-1).view(torch.uint8).numpy().data, crc)
        return crc


class GuidanceStore(Protocol):
    """What the rollout writes to and the trainer reads from. ``get`` raises GuidanceError, never returns garbage."""

    def put(self, sample_id: str, record: TrajectoryGuidance) -> GuidanceHandle: ...

    def get(self, handle: GuidanceHandle) -> TrajectoryGuidance: ...

    def discard(self, handles: Sequence[GuidanceHandle]) -> None: ...

    def __contains__(self, sample_id: str) -> bool: ...


class MemoryStore:
    """Keeps records in this process; checksummed all the same, since a wrong record is worse than none."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[TrajectoryGuidance, int]] = {}

    def put(self, sample_id: str, record: TrajectoryGuidance) -> GuidanceHandle:
        """Raises GuidanceError for a sample id that is already there: a record is written once."""
        if sample_id in self._records:
            raise GuidanceError(f"guidance of sample {sample_id} is already in the store")
        self._records[sample_id] = (record, record.checksum())
        return GuidanceHandle(sample_id, record.rows, record.recipe_hash, record.payload_nbytes)

    def get(self, handle: GuidanceHandle) -> TrajectoryGuidance:
        """Raises GuidanceError: "missing", "rows", "recipe" or "checksum" first in its text."""
        if handle.sample_id not in self._records:
            raise GuidanceError(f"missing: no guidance of sample {handle.sample_id}")
        record, crc = self._records[handle.sample_id]
        if record.rows != handle.rows:
            raise GuidanceError(
                f"rows: sample {handle.sample_id} has {record.rows} rows, its handle says {handle.rows}"
            )
        if record.recipe_hash != handle.recipe_hash:
            raise GuidanceError(
                f"recipe: sample {handle.sample_id} was recorded under {record.recipe_hash}, "
                f"its handle says {handle.recipe_hash}"
            )
        if record.checksum() != crc:
            raise GuidanceError(f"checksum: stored bytes of sample {handle.sample_id} changed since they were written")
        return record

    def discard(self, handles: Sequence[GuidanceHandle]) -> None:
        for handle in handles:
            self._records.pop(handle.sample_id, None)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._records

    def __len__(self) -> int:
        return len(self._records)
