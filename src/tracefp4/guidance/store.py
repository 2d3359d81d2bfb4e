"""Where a trajectory's guidance lives between rollout and trainer.

Legend: L1 rows of one trajectory (tokens - 1), G guided layers, W bytes of a packed row.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from tracefp4.guidance.schema import GuidanceError
from tracefp4.guidance.staging import HostCopy
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
    valid bool [L1], False where the rollout has no single right row (preemption). staged: set while the sites' tensors
    lie in staging memory and may still be on their way there (CUDA); see ``settled``.
    """

    recipe_hash: str
    bits: float
    layers: tuple[int, ...]
    sites: dict[str, SiteRows]
    token_ids: Tensor
    versions: Tensor
    valid: Tensor
    staged: HostCopy | None = field(default=None, compare=False, repr=False)

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

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor: what the record takes in memory."""
        tensors = [self.token_ids, self.versions, self.valid]
        for data in self.sites.values():
            tensors += [data.payload] if data.encode_scale is None else [data.payload, data.encode_scale]
        return sum(t.numel() * t.element_size() for t in tensors)

    def select(self, layers: Sequence[int] | None = None, rows: tuple[int, int] | None = None) -> TrajectoryGuidance:
        """Views of some layers and of rows [start, stop); None means all of them.

        Raises GuidanceError ("layers" or "rows" first in its text) for what the record does not have.
        """
        if layers is None and rows is None:
            return self
        start, stop = check_rows(rows, self.rows)
        index = layer_index(layers, self.layers)
        sites = {}
        for site, data in self.sites.items():
            scale = data.encode_scale
            if scale is not None and scale.ndim:
                scale = scale[index, start:stop]
            sites[site] = SiteRows(data.payload[index, start:stop], scale)
        return replace(
            self,
            layers=tuple(self.layers[i] for i in index),
            sites=sites,
            token_ids=self.token_ids[start:stop],
            versions=self.versions[start:stop],
            valid=self.valid[start:stop],
        )

    def settled(self) -> TrajectoryGuidance:
        """The same record in memory of its own, complete; its share of the staging memory is given back."""
        if self.staged is None:
            return self
        self.staged.wait()
        sites = {
            site: SiteRows(data.payload.clone(), None if data.encode_scale is None else data.encode_scale.clone())
            for site, data in self.sites.items()
        }
        self.staged.release()
        return replace(self, sites=sites, staged=None)

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
            crc = zlib.crc32(t.contiguous().numpy().data, crc)
        return crc


def check_rows(rows: tuple[int, int] | None, total: int) -> tuple[int, int]:
    """(start, stop) within `total` rows; None is all. Raises GuidanceError otherwise."""
    start, stop = (0, total) if rows is None else rows
    if not 0 <= start <= stop <= total:
        raise GuidanceError(f"rows: [{start}, {stop}) is no range of the record's {total} rows")
    return start, stop


def layer_index(layers: Sequence[int] | None, recorded: Sequence[int]) -> list[int]:
    """Positions of `layers` among the recorded ones; None is all. Raises GuidanceError for one that is not there."""
    if layers is None:
        return list(range(len(recorded)))
    where = {layer: i for i, layer in enumerate(recorded)}
    if unknown := [layer for layer in layers if layer not in where]:
        raise GuidanceError(f"layers: {unknown} were not recorded; the record has layers {list(recorded)}")
    return [where[layer] for layer in layers]


def check_handle(handle: GuidanceHandle, rows: int, recipe_hash: str) -> None:
    """Raises GuidanceError where a stored record is not the one that the handle describes."""
    if rows != handle.rows:
        raise GuidanceError(f"rows: sample {handle.sample_id} has {rows} rows, its handle says {handle.rows}")
    if recipe_hash != handle.recipe_hash:
        raise GuidanceError(
            f"recipe: sample {handle.sample_id} was recorded under {recipe_hash}, its handle says {handle.recipe_hash}"
        )


def handle_of(sample_id: str, record: TrajectoryGuidance) -> GuidanceHandle:
    return GuidanceHandle(sample_id, record.rows, record.recipe_hash, record.payload_nbytes)


class GuidanceStore(Protocol):
    """What the rollout writes to and the trainer reads from. ``get`` raises GuidanceError, never returns garbage.

    ``put`` returns None where the store had to drop the record: the trajectory goes on without guidance.
    ``get`` reads all of a record, or some layers (by number) and rows [start, stop) of it. ``flush`` and ``close`` wait
    until what was put can be read, up to a time limit in seconds, and say whether it can. ``stats`` are counters of
    this process, by metric name. ``drop_below`` removes what ran wholly under versions below one, ``clear`` everything.
    """

    def put(self, sample_id: str, record: TrajectoryGuidance) -> GuidanceHandle | None: ...

    def get(
        self, handle: GuidanceHandle, layers: Sequence[int] | None = None, rows: tuple[int, int] | None = None
    ) -> TrajectoryGuidance: ...

    def discard(self, handles: Sequence[GuidanceHandle]) -> None: ...

    def flush(self, timeout: float | None = None) -> bool: ...

    def close(self, timeout: float | None = 30.0) -> bool: ...

    def stats(self) -> dict[str, float]: ...

    def drop_below(self, version: int) -> int: ...

    def clear(self) -> int: ...

    def __contains__(self, sample_id: str) -> bool: ...


class MemoryStore:
    """Keeps records in this process; checksummed all the same, since a wrong record is worse than none."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[TrajectoryGuidance, int]] = {}

    def put(self, sample_id: str, record: TrajectoryGuidance) -> GuidanceHandle:
        """Raises GuidanceError for a sample id that is already there: a record is written once."""
        if sample_id in self._records:
            raise GuidanceError(f"guidance of sample {sample_id} is already in the store")
        record = record.settled()
        self._records[sample_id] = (record, record.checksum())
        return handle_of(sample_id, record)

    def get(
        self, handle: GuidanceHandle, layers: Sequence[int] | None = None, rows: tuple[int, int] | None = None
    ) -> TrajectoryGuidance:
        """Raises GuidanceError: "missing", "rows", "layers", "recipe" or "checksum" first in its text."""
        if handle.sample_id not in self._records:
            raise GuidanceError(f"missing: no guidance of sample {handle.sample_id}")
        record, crc = self._records[handle.sample_id]
        check_handle(handle, record.rows, record.recipe_hash)
        if record.checksum() != crc:
            raise GuidanceError(f"checksum: stored bytes of sample {handle.sample_id} changed since they were written")
        return record.select(layers, rows)

    def discard(self, handles: Sequence[GuidanceHandle]) -> None:
        for handle in handles:
            self._records.pop(handle.sample_id, None)

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def close(self, timeout: float | None = 30.0) -> bool:
        return True

    def stats(self) -> dict[str, float]:
        """None: nothing waits here, and nothing is dropped."""
        return {}

    def drop_below(self, version: int) -> int:
        """How many records it removed."""
        old = [
            name for name, (record, _) in self._records.items() if max(record.versions.tolist(), default=-1) < version
        ]
        for name in old:
            del self._records[name]
        return len(old)

    def clear(self) -> int:
        """How many records it removed."""
        removed = len(self._records)
        self._records.clear()
        return removed

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._records

    def __len__(self) -> int:
        return len(self._records)
