"""From the rows of a padded micro-batch to those that one rank computes.

Legend: B sequences padded to T tokens, N = B * T; b, s the batch and sequence sizes that Megatron's model is given
(packed sequences: b = 1); M = s * b rows of hidden states; G heads of K and V, of D values each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tracefp4.adapters.megatron.context import LocalMicroBatch
from tracefp4.guidance import CompactGuidance
from tracefp4.guidance.schema import pack_bits, unpack_bits
from tracefp4.nn import MicroBatch


@dataclass(frozen=True)
class RankLayout:
    """Which rows a rank computes, in the order of its hidden states ([s, b, H], flattened).

    numbers int64 [b, s]: number (sequence * T + position) of each token that the model is given, -1 on padding.
    attention int64 [M]: of the rows of K and V. experts int64 [M], or [M / tp] under sequence parallelism: of the rows
    that enter the router. heads: (first, end) of the G heads of K and V that the rank holds. head_size: D.
    counts_experts, counts_heads: False where another tensor-parallel rank has the same, and counts it in diagnostics.
    """

    numbers: Tensor
    attention: Tensor
    experts: Tensor
    heads: tuple[int, int]
    head_size: int
    counts_experts: bool = True
    counts_heads: bool = True


def row_numbers(lengths: Sequence[int]) -> list[Tensor]:
    """int64 [L] for each sequence: 1 + the number of each of its rows in a batch padded to the longest.

    To be laid out by whatever lays out the tokens, with its 0 for padding.
    """
    T = max(lengths)
    return [1 + b * T + torch.arange(length) for b, length in enumerate(lengths)]


def rank_layout(packed_bs: Tensor, config: Any, tp_rank: int, tp_size: int) -> RankLayout:
    """The layout of a rank whose model is given ``packed_bs``: the row numbers, int64 [b, s] with 0 on padding."""
    numbers = packed_bs.cpu() - 1
    rows = numbers.T.reshape(-1)
    part = len(rows) // tp_size
    split = config.sequence_parallel and tp_size > 1
    experts = rows[tp_rank * part : (tp_rank + 1) * part] if split else rows
    groups = config.num_query_groups
    holders = max(1, tp_size // groups)  # ranks that hold the same head
    if groups >= tp_size:
        heads = (tp_rank * groups // tp_size, (tp_rank + 1) * groups // tp_size)
    else:
        heads = (tp_rank // holders, tp_rank // holders + 1)
    counts = (split or tp_rank == 0, tp_rank % holders == 0)
    return RankLayout(numbers, rows, experts, heads, config.kv_channels, *counts)


def localize(
    micro_batch: MicroBatch,
    layout: RankLayout,
    layers: Collection[int],
    token_ids_N: Tensor,
    device: torch.device | str = "cpu",
) -> LocalMicroBatch:
    """The rows of a micro-batch (its N padded ones, on the CPU) that a rank computes, of the layers that it holds.

    token_ids_N int64 [N]. Rows of Megatron's own padding have no record, and choose their experts by themselves, as do
    rows whose recorded experts are not distinct. Probed rows are those that this rank counts.
    """
    rows_of = {"attention": layout.attention, "experts": layout.experts}
    masks: dict[tuple[int, str], Tensor] = {}  # all records share theirs: each is laid out and sent once

    def shared(mask_N: Tensor, name: str) -> Tensor:
        key = (id(mask_N), name)
        if key not in masks:
            masks[key] = (mask_N[rows_of[name].clamp(min=0)] & (rows_of[name] >= 0)).to(device)
        return masks[key]

    guidance = {}
    for (site, layer), record in micro_batch.guidance.items():
        if layer not in layers:
            continue
        name = "experts" if site == "expert_input" else "attention"
        local = record.select(rows_of[name].clamp(min=0))
        if site != "expert_input":
            local = head_columns(local, layout.heads, layout.head_size)
        valid, stale = shared(record.valid, name), None if record.stale is None else shared(record.stale, name)
        guidance[site, layer] = replace(local, valid=valid, stale=stale).to(device)  # those two lie there already
    routing: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, (experts_NK, valid_N) in micro_batch.experts.items():
        if layer in layers:
            rows = layout.experts.clamp(min=0)
            local_experts, usable = experts_NK[rows], valid_N[rows] & (layout.experts >= 0)
            # A row that names an expert twice was filled in by somebody; Megatron would send it once, and lose count.
            usable &= (local_experts.sort(-1).values.diff(dim=-1) != 0).all(-1)
            routing[layer] = (local_experts.to(device), usable.to(device))
    tokens = torch.where(layout.numbers >= 0, token_ids_N[layout.numbers.clamp(min=0)], -1).to(device)
    probe, probed = _local_probe(micro_batch, layout, layers, len(token_ids_N), device)
    return LocalMicroBatch(
        micro_batch.key, guidance, routing, probe, None, micro_batch.decoded, tokens=tokens, probed_by_site=probed
    )


def _local_probe(
    micro_batch: MicroBatch, layout: RankLayout, layers: Collection[int], N: int, device: torch.device | str
) -> tuple[dict[tuple[str, int], CompactGuidance], dict[str, Tensor]]:
    """(records of the probed rows that this rank computes and counts, which of its rows those are, by site)."""
    probe: dict[tuple[str, int], CompactGuidance] = {}
    probed: dict[str, Tensor] = {}
    if micro_batch.probe_rows is None:
        return probe, probed
    place_N = torch.full((N,), -1, dtype=torch.int64)
    place_N[micro_batch.probe_rows] = torch.arange(len(micro_batch.probe_rows))
    for (site, layer), record in micro_batch.probe.items():
        experts = site == "expert_input"
        if layer not in layers or not (layout.counts_experts if experts else layout.counts_heads):
            continue
        rows = layout.experts if experts else layout.attention
        place = torch.where(rows >= 0, place_N[rows.clamp(min=0)], -1)
        mine = (place >= 0).nonzero()[:, 0]
        local = record.select(place[mine])
        probe[site, layer] = (local if experts else head_columns(local, layout.heads, layout.head_size)).to(device)
        probed[site] = mine.to(device)
    return probe, probed


def head_columns(record: CompactGuidance, heads: tuple[int, int], head_size: int) -> CompactGuidance:
    """The record of some heads only, of values [first * D, end * D) of each row; its encode scale must be static."""
    header = record.header
    first, end = heads[0] * head_size, heads[1] * head_size
    if (first, end) == (0, header.k):
        return record
    blocks = (first // header.block_size, end // header.block_size)
    layout = header.layout
    code_bytes, block_bytes = layout.plane_bytes(header.k, header.block_size)
    sizes = [code_bytes] * layout.code_bits + [block_bytes] * (layout.choice_bits + layout.scale_bits)
    planes = []
    for i, plane in enumerate(record.payload.split(sizes, dim=1)):
        lo, hi = (first, end) if i < layout.code_bits else blocks
        planes.append(pack_bits(unpack_bits(plane, hi)[:, lo:]))
    return replace(
        record, header=replace(header, shape=(record.rows, end - first)), payload=torch.cat(planes, dim=1).contiguous()
    )
