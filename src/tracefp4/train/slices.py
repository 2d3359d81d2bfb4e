"""From stored records to the rows of a padded micro-batch.

Legend: B trajectories, T padded length, N = B * T flattened positions, G guided layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tracefp4.device import to_device
from tracefp4.formats import get_format
from tracefp4.guidance import CompactGuidance, GuidanceError, GuidanceHeader
from tracefp4.guidance.schema import row_bytes, site_bits
from tracefp4.guidance.store import GuidanceStore, TrajectoryGuidance
from tracefp4.nn import MicroBatch
from tracefp4.recipe import QuantRecipe
from tracefp4.types import GuidanceHandle, TrainBatch, Trajectory


@dataclass
class RowCounts:
    """Rows of a step: all that were forwarded, those guided, and the others by reason."""

    total: int = 0
    guided: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    forwarded: int = 0
    replayed: int = 0

    def add_replay(self, batch: TrainBatch, experts: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Counts the rows whose routing is replayed (the same in every layer); none in a model without routers."""
        if experts:
            self.forwarded += sum(t.num_rows for t in batch.trajectories)
            self.replayed += int(next(iter(experts.values()))[1].sum())

    def replay_metrics(self) -> dict[str, float]:
        return {"router/replayed_share": self.replayed / self.forwarded} if self.forwarded else {}

    def metrics(self) -> dict[str, float]:
        """``guided_share`` is the share of forwarded rows with a usable record; it says nothing of unguided layers."""
        out = {"guidance/rows": float(self.total), "guidance/guided_rows": float(self.guided)}
        out["guidance/guided_share"] = self.guided / self.total if self.total else 0.0
        for reason in ("missing", "checksum", "recipe", "rows", "token", "stale", "invalid"):
            out[f"guidance/fallback/{reason}"] = float(self.reasons[reason])
        return out


def usable_rows(
    record: TrajectoryGuidance,
    trajectory: Trajectory,
    version: int,
    max_version_diff: int,
    counts: RowCounts,
    start: int = 0,
) -> Tensor:
    """bool [rows]: rows that may guide; the others are counted by the first reason that rules them out.

    start: the trajectory's row that is the record's first.
    """
    tokens = trajectory.token_ids[start : start + record.rows]
    return _usable(record.token_ids, record.versions, record.valid, tokens, version - max_version_diff, counts)


def _usable(
    recorded: Tensor, versions: Tensor, valid: Tensor, tokens: Sequence[int], oldest: int, counts: RowCounts
) -> Tensor:
    """bool [rows], of rows of any number of records behind one another. recorded, versions int32, valid bool: theirs;
    tokens: the trajectories'."""
    same_token = recorded == torch.tensor(tokens, dtype=torch.int32)
    fresh = versions >= oldest
    usable = same_token & fresh
    same, young, good = int(same_token.sum()), int(usable.sum()), int(usable.logical_and_(valid).sum())
    counts.reasons["token"] += len(recorded) - same
    counts.reasons["stale"] += same - young
    counts.reasons["invalid"] += young - good
    return usable


def fetch(
    store: GuidanceStore,
    handle: GuidanceHandle | None,
    trajectory: Trajectory,
    recipe: QuantRecipe,
    counts: RowCounts,
    part: tuple[int, int] | None = None,
) -> TrajectoryGuidance | None:
    """The record of a trajectory, or None with its rows counted by reason. Waits no longer than the store does.

    part: rows [start, stop) of both instead of all of them.
    """
    rows = trajectory.num_rows if part is None else part[1] - part[0]
    if handle is None:
        counts.reasons["missing"] += rows
        return None
    try:
        record = store.get(handle, rows=part)
    except GuidanceError as error:
        reason = str(error).partition(":")[0]
        counts.reasons[reason if reason in ("missing", "checksum", "recipe", "rows") else "missing"] += rows
        return None
    if record.rows != rows:
        counts.reasons["rows"] += rows
        return None
    if record.recipe_hash != recipe.hash:
        raise GuidanceError(
            f"guidance of {trajectory.request_id} was recorded under recipe {record.recipe_hash}, the trainer holds "
            f"{recipe.hash}; start rollout and trainer from the same recipe"
        )
    return record


def assemble(
    records: Sequence[TrajectoryGuidance | None],
    usable: Sequence[Tensor | None],
    recipe: QuantRecipe,
    bits: float,
    layers: Sequence[int],
    widths: dict[str, int],
    T: int,
    device: torch.device | str = "cpu",
    stale: Sequence[Tensor | None] | None = None,
) -> dict[tuple[str, int], CompactGuidance]:
    """Records of B trajectories laid out as one record of B * T rows per site and layer; gaps are invalid.

    stale: bool [rows] of each trajectory, those that follow their record within the recipe's band only; None: no row.
    They reach the device packed, one copy per site; the forward decodes them there.
    """
    B = len(records)
    valid_N = to_device(_padded(usable, T), device)
    stale_N = None if stale is None else to_device(_padded(stale, T), device)
    out: dict[tuple[str, int], CompactGuidance] = {}
    for site, width in widths.items():
        name = recipe.site_format(site)
        if name is None:
            continue
        own_bits = site_bits(name, bits)
        payload = torch.zeros(len(layers), B, T, row_bytes(name, own_bits, width), dtype=torch.uint8)
        kind = recipe.site_encode_scale(site)
        scale = torch.ones(len(layers), B, T, 1) if isinstance(kind, str) else None
        for b, record in enumerate(records):
            if record is None:
                continue
            data = record.sites[site]
            payload[:, b, : record.rows] = data.payload
            if scale is not None:
                assert data.encode_scale is not None
                scale[:, b, : record.rows, 0] = data.encode_scale
        # Filled in on the device: a copy of a number from the host would stall it.
        static = torch.full((), float(kind), device=device) if isinstance(kind, (int, float)) else None
        payload, scale = to_device(payload, device), None if scale is None else to_device(scale, device)
        header = GuidanceHeader(recipe.hash, name, own_bits, (B * T, width), get_format(name).block_size)
        for i, layer in enumerate(layers):
            row_scale = static if scale is None else scale[i].view(B * T, 1)
            out[site, layer] = CompactGuidance(header, payload[i].view(B * T, -1), row_scale, valid_N, stale_N)
    return out


def _padded(masks: Sequence[Tensor | None], T: int) -> Tensor:
    """bool [B * T] of masks bool [rows] of B trajectories; False where there is none."""
    out = torch.zeros(len(masks), T, dtype=torch.bool)
    for b, mask in enumerate(masks):
        if mask is not None:
            out[b, : len(mask)] = mask
    return out.view(-1)


def replayed_experts(
    batch: TrainBatch, moe_layers: Sequence[int], experts_per_token: int, oldest_version: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """Per layer the rollout's experts, (int64 [N, K], bool [N] valid) on the batch's device.

    Padding, last tokens, rows marked -1 (recomputed after a preemption) and rows of versions below oldest_version are
    invalid: there the router chooses by itself.
    """
    return _by_layer(*_host_experts(batch, moe_layers, experts_per_token, oldest_version), moe_layers, batch)


def _by_layer(
    experts: Tensor, valid: Tensor, moe_layers: Sequence[int], batch: TrainBatch
) -> dict[int, tuple[Tensor, Tensor]]:
    device = batch.input_ids.device
    experts, flat = to_device(experts, device).long().flatten(0, 1), to_device(valid.view(-1), device)
    return {layer: (experts[:, i].contiguous(), flat) for i, layer in enumerate(moe_layers)}


def _host_experts(
    batch: TrainBatch, moe_layers: Sequence[int], experts_per_token: int, oldest_version: int
) -> tuple[Tensor, Tensor]:
    """(int16 [B, T, layers, K], bool [B, T] valid) on the host."""
    B, T = batch.input_ids.shape
    experts = torch.zeros(B, T, len(moe_layers), experts_per_token, dtype=torch.int16)
    valid = torch.zeros(B, T, dtype=torch.bool)
    for b, t in enumerate(batch.trajectories):
        if t.routed_experts is None:
            continue
        n = t.num_rows
        if tuple(t.routed_experts.shape) != (n, len(moe_layers), experts_per_token):
            raise GuidanceError(
                f"routed experts of {t.request_id} have shape {tuple(t.routed_experts.shape)}, "
                f"expected {(n, len(moe_layers), experts_per_token)}"
            )
        if moe_layers:
            experts[b, :n] = t.routed_experts
            valid[b, :n] = t.row_versions >= oldest_version
    if moe_layers:
        valid &= experts[:, :, 0, 0] >= 0
    return experts.clamp_(min=0), valid


def split_micro_batches(trajectories: Sequence[Trajectory], size: int, tokens: int = 0) -> list[list[Trajectory]]:
    """Micro-batches of trajectories of similar length, shortest first; each trajectory whole in one of them.

    size: most trajectories of one. tokens: where not 0, most padded tokens (rows times longest) of one instead; a
    trajectory longer than that goes alone.
    """
    out: list[list[Trajectory]] = []
    for t in sorted(trajectories, key=lambda t: len(t.token_ids)):
        rows = len(out[-1]) + 1 if out else 0
        fits = rows * len(t.token_ids) <= tokens if tokens else rows <= size  # t is the longest so far
        if out and fits:
            out[-1].append(t)
        else:
            out.append([t])
    return out


def padding_metrics(batches: Sequence[TrainBatch]) -> dict[str, float]:
    """Number of micro-batches of a step, and the share of their positions that is padding."""
    positions = sum(b.attention_mask.numel() for b in batches)
    real = sum(len(t.token_ids) for b in batches for t in b.trajectories)
    return {"train/micro_batches": float(len(batches)), "train/padding_share": 1 - real / positions}


class MicroBatchBuilder:
    """Builds the MicroBatch of a TrainBatch from the store, counting every row that cannot be guided."""

    def __init__(
        self,
        store: GuidanceStore,
        recipe: QuantRecipe,
        guided: bool,
        widths: dict[str, int],
        moe_layers: Sequence[int],
        experts_per_token: int,
        max_version_diff: int,
    ) -> None:
        self.store, self.recipe, self.guided, self.widths = store, recipe, guided, widths
        self.moe_layers, self.experts_per_token = tuple(moe_layers), experts_per_token
        self.max_version_diff = max_version_diff
        self._key = 0

    def build(self, batch: TrainBatch, version: int, counts: RowCounts) -> MicroBatch:
        """version: the trainer's policy version before this step's updates; rows recorded under versions older than
        it by more than max_version_diff fall back."""
        self._key += 1
        oldest = version - self.max_version_diff
        host = _host_experts(batch, self.moe_layers, self.experts_per_token, oldest)
        counts.add_replay(batch, dict.fromkeys(self.moe_layers[:1], host))
        mb = MicroBatch(self._key, experts=_by_layer(*host, self.moe_layers, batch))
        T = batch.input_ids.shape[1]
        if self.guided and self.recipe.guided_layers:
            records, usable = self._records(batch, version, counts)
            counts.total += sum(t.num_rows for t in batch.trajectories)
            there = [m for m in usable if m is not None]
            counts.guided += int(torch.cat(there).sum()) if there else 0
            layers = self.recipe.guided_layers
            stale = None
            if self.recipe.band is not None:
                pairs = zip(records, batch.trajectories, strict=True)
                found = [None if r is None else self._stale(r, t, version) for r, t in pairs]
                if any(bool(rows.any()) for rows in found if rows is not None):  # else the forward knows of no band
                    stale = found
            mb.guidance = assemble(
                records, usable, self.recipe, self.recipe.bits, layers, self.widths, T, batch.input_ids.device, stale
            )
        self._add_probe(mb, batch, T)
        return mb

    def _stale(self, record: TrajectoryGuidance, trajectory: Trajectory, version: int) -> Tensor:
        """bool [rows]: recorded under another version. A row reads K and V of the rows before it: one makes all so."""
        return torch.full((record.rows,), bool((record.versions != version).any()))

    def _records(
        self, batch: TrainBatch, version: int, counts: RowCounts
    ) -> tuple[list[TrajectoryGuidance | None], list[Tensor | None]]:
        """(record, bool [rows] of those that may guide) of each trajectory; every other row is counted by reason."""
        records = [fetch(self.store, t.guidance, t, self.recipe, counts) for t in batch.trajectories]
        pairs = [(r, t) for r, t in zip(records, batch.trajectories, strict=True) if r is not None]
        if not pairs:
            return records, [None] * len(records)
        recorded, versions, valid = (
            torch.cat([getattr(r, name) for r, _ in pairs]) for name in ("token_ids", "versions", "valid")
        )
        tokens = [i for _, t in pairs for i in t.token_ids[: t.num_rows]]
        rows = _usable(recorded, versions, valid, tokens, version - self.max_version_diff, counts)
        parts = iter(rows.split([r.rows for r, _ in pairs]))
        return records, [None if r is None else next(parts) for r in records]

    def _add_probe(self, mb: MicroBatch, batch: TrainBatch, T: int) -> None:
        """Full-width records of the trajectories that carry one, restricted to their rows."""
        ignored = RowCounts()
        records = [
            fetch(self.store, t.probe, t, self.recipe, ignored) if t.probe is not None else None
            for t in batch.trajectories
        ]
        first = next((r for r in records if r is not None), None)
        if first is None:
            return
        usable = [None if r is None else r.valid for r in records]
        full = assemble(records, usable, self.recipe, first.bits, first.layers, self.widths, T)
        rows = next(iter(full.values())).valid.nonzero()[:, 0]
        device = batch.input_ids.device
        mb.probe_rows = to_device(rows, device)
        mb.probe = {where: guidance.select(rows).to(device) for where, guidance in full.items()}
