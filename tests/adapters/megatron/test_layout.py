"""Which rows a rank computes, and the records of them; plain torch, so it runs without megatron-core."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.adapters.megatron.context import LocalMicroBatch, ScheduledContext
from tracefp4.adapters.megatron.layout import head_columns, localize, rank_layout, row_numbers
from tracefp4.formats import get_format
from tracefp4.guidance import CompactGuidance, GuidanceError, decode, encode
from tracefp4.nn import MicroBatch, TrainerForward
from tracefp4.recipe import QuantRecipe


def config(**changes: Any) -> Any:
    return SimpleNamespace(**{"sequence_parallel": False, "num_query_groups": 4, "kv_channels": 32, **changes})


def test_rows_follow_hidden_states_not_sequences() -> None:
    """[s, b, H] flattened: position by position, over the sequences of a batch."""
    first, second = row_numbers([3, 2])
    assert first.tolist() == [1, 2, 3]
    assert second.tolist() == [4, 5]
    padded = torch.stack([first, torch.cat([second, torch.zeros(1, dtype=torch.int64)])])
    layout = rank_layout(padded, config(), 0, 1)
    assert layout.attention.tolist() == layout.experts.tolist() == [0, 3, 1, 4, 2, -1]
    assert layout.heads == (0, 4)


def test_sequence_parallel_ranks_split_the_experts_rows_and_all_see_the_heads_rows() -> None:
    packed = torch.tensor([[1, 2, 3, 0, 4, 5]])
    parts = [rank_layout(packed, config(sequence_parallel=True), rank, 2) for rank in (0, 1)]
    assert [p.experts.tolist() for p in parts] == [[0, 1, 2], [-1, 3, 4]]
    assert all(p.attention.tolist() == [0, 1, 2, -1, 3, 4] for p in parts)
    assert [p.heads for p in parts] == [(0, 2), (2, 4)]
    # without it, tensor-parallel ranks all compute all rows
    assert rank_layout(packed, config(), 1, 2).experts.tolist() == [0, 1, 2, -1, 3, 4]


def test_ranks_beyond_the_heads_share_them() -> None:
    packed = torch.tensor([[1, 2]])
    heads = [rank_layout(packed, config(num_query_groups=2), rank, 4).heads for rank in range(4)]
    assert heads == [(0, 1), (0, 1), (1, 2), (1, 2)]


def record(format_name: str, bits: float, rows: int, k: int, seed: int = 0) -> tuple[Tensor, CompactGuidance]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g)
    fmt = get_format(format_name)
    blocks = fmt.quantize(x, encode_scale=torch.tensor(1.0) if fmt.scale_kind == "e4m3" else None)
    return x, encode(blocks, bits, "hash", torch.rand(rows, generator=g) > 0.2)


@pytest.mark.parametrize("head_size", [16, 48, 128])
@pytest.mark.parametrize(
    ("format_name", "bits"),
    [("nvfp4", 4.5), ("nvfp4", 1.5), ("nvfp4", 1.125), ("nvfp4-4over6", 1.125), ("nvfp4", 1.0625), ("nvfp4", 0.125)],
)
def test_the_record_of_some_heads_is_what_recording_them_alone_gives(
    format_name: str, bits: float, head_size: int
) -> None:
    x, whole = record(format_name, bits, 5, 4 * head_size)
    for heads in ((0, 4), (0, 1), (1, 3), (3, 4)):
        first, end = heads[0] * head_size, heads[1] * head_size
        part = head_columns(whole, heads, head_size)
        fmt = get_format(format_name)
        alone = encode(fmt.quantize(x[:, first:end], encode_scale=torch.tensor(1.0)), bits, "hash", whole.valid)
        assert torch.equal(part.payload, alone.payload)
        assert part.header == alone.header
        assert torch.equal(part.valid, whole.valid)


def test_the_record_of_some_heads_of_an_mx_cache() -> None:
    x, whole = record("mxfp4-rceil", 1.25, 3, 256)
    part = head_columns(whole, (1, 2), 64)
    alone = encode(get_format("mxfp4-rceil").quantize(x[:, 64:128]), 1.25, "hash", whole.valid)
    assert torch.equal(part.payload, alone.payload)


def test_localized_rows_are_those_of_the_padded_micro_batch() -> None:
    x, inputs = record("nvfp4", 1.125, 6, 64)
    _, keys = record("nvfp4", 1.125, 6, 128, seed=1)
    older = torch.tensor([False] * 3 + [True] * 3)  # the second sequence
    inputs, keys = (replace(r, stale=older) for r in (inputs, keys))
    experts = torch.arange(12).view(6, 2)
    micro = MicroBatch(
        7, {(s, layer): r for layer in (0, 1) for s, r in (("expert_input", inputs), ("key", keys), ("value", keys))},
        dict.fromkeys((0, 1), (experts, inputs.valid)),
    )  # fmt: skip
    packed = torch.cat(row_numbers([3, 2]))[None]  # 3 padded positions a sequence; the sixth row is padding
    packed = torch.cat([packed, torch.zeros(1, 1, dtype=torch.int64)], dim=1)
    layout = rank_layout(packed, config(sequence_parallel=True), 1, 2)
    tokens = torch.tensor([11, 12, 13, 21, 22, 0])
    local = localize(micro, layout, {1}, tokens)
    assert local.key == 7
    assert {layer for _, layer in local.guidance} == set(local.experts) == {1}
    assert local.tokens is not None
    assert local.tokens.tolist() == [[11, 12, 13, 21, 22, -1]]
    own = local.guidance["expert_input", 1]
    assert own.rows == 3
    assert own.valid.tolist() == [bool(inputs.valid[3]), bool(inputs.valid[4]), False]
    assert own.stale is not None
    assert own.stale.tolist() == [True, True, False]
    on_heads = local.guidance["key", 1].stale
    assert on_heads is not None
    assert on_heads.tolist() == [False, False, False, True, True, False]
    got, _ = decode(own, x[[3, 4, 0]])
    want, _ = decode(inputs.select([3, 4]), x[[3, 4]])
    assert torch.equal(got.codes[:2], want.codes)
    assert local.guidance["key", 1].header.shape == (6, 64)
    assert local.experts[1][0].tolist() == [[6, 7], [8, 9], [0, 1]]
    assert local.experts[1][1].tolist() == [*inputs.valid[3:5].tolist(), False]


@pytest.mark.parametrize("stale", [True, False])
def test_the_rows_that_records_share_are_laid_out_and_sent_once(stale: bool) -> None:
    """Bit for bit what each record by itself gives; on a device that is not the host's."""
    older = torch.tensor([False, True, True, False, True, False]) if stale else None
    valid = torch.tensor([True, False, True, True, True, False])
    made = {("expert_input", 64): 0, ("key", 128): 1, ("value", 128): 2}
    micro = MicroBatch(7, {
        (site, layer): replace(record("nvfp4", 1.125, 6, k, seed=3 * layer + seed)[1], valid=valid, stale=older)
        for layer in (0, 1, 2) for (site, k), seed in made.items()
    })  # fmt: skip
    packed = torch.cat([torch.cat(row_numbers([3, 2])), torch.zeros(1, dtype=torch.int64)])[None]
    layout = rank_layout(packed, config(sequence_parallel=True), 0, 2)
    tokens = torch.zeros(6, dtype=torch.int64)
    local = localize(micro, layout, {0, 2}, tokens)
    assert len(local.guidance) == 6
    for (site, layer), got in local.guidance.items():
        rows = layout.experts if site == "expert_input" else layout.attention
        alone = micro.guidance[site, layer].select(rows.clamp(min=0))
        if site != "expert_input":
            alone = head_columns(alone, layout.heads, layout.head_size)
        assert torch.equal(got.payload, alone.payload)
        assert got.header == alone.header
        assert torch.equal(got.valid, alone.valid & (rows >= 0))
        assert (got.stale is None) == (older is None)
        if got.stale is not None and alone.stale is not None:
            assert torch.equal(got.stale[rows >= 0], alone.stale[rows >= 0])
    sent = localize(micro, layout, {0, 2}, tokens, "meta").guidance.values()
    for mask in ("valid", "stale"):
        masks = [getattr(g, mask) for g in (*local.guidance.values(), *sent)]
        assert len({id(m) for m in masks}) == (4 if mask == "valid" or stale else 1)  # rows of experts, and of heads
    assert {t.device.type for g in sent for t in (g.payload, g.valid, g.stale) if t is not None} == {"meta"}


@pytest.mark.parametrize(("groups", "sequence_parallel"), [(4, True), (4, False), (1, False)])
def test_tensor_parallel_ranks_count_each_probed_value_once(groups: int, sequence_parallel: bool) -> None:
    rows, head = torch.tensor([0, 2, 4]), 128 // groups
    (x, inputs), (y, keys) = record("nvfp4", 4.5, 3, 64), record("nvfp4", 4.5, 3, 128, seed=1)
    inputs, keys = (replace(r, valid=torch.ones(3, dtype=torch.bool)) for r in (inputs, keys))
    micro = MicroBatch(7, probe={("expert_input", 1): inputs, ("key", 1): keys}, probe_rows=rows)
    packed = F.pad(torch.cat(row_numbers([3, 2])), (1, 2))[None]  # padding before and behind
    fields = config(num_query_groups=groups, kv_channels=head, sequence_parallel=sequence_parallel)
    seen: dict[str, list[tuple[int, int]]] = {"expert_input": [], "key": []}
    for rank in (0, 1):
        layout = rank_layout(packed, fields, rank, 2)
        local = localize(micro, layout, {1}, torch.zeros(6, dtype=torch.int64))
        for site, whole, values in (("expert_input", inputs, x), ("key", keys, y)):
            if (site, 1) not in local.probe:
                continue
            numbers = (layout.experts if site == "expert_input" else layout.attention)[local.probed(site)].tolist()
            first, end = (0, 64) if site == "expert_input" else (layout.heads[0] * head, layout.heads[1] * head)
            place = [rows.tolist().index(n) for n in numbers]
            got, _ = decode(local.probe[site, 1], values[place, first:end])
            want, _ = decode(whole.select(place), values[place])
            assert torch.equal(got.unpacked_codes(), want.unpacked_codes()[:, first:end])
            seen[site] += [(n, column) for n in numbers for column in range(first, end)]
    for site, width in (("expert_input", 64), ("key", 128)):
        assert sorted(seen[site]) == [(n, column) for n in rows.tolist() for column in range(width)]


def test_experts_that_are_not_distinct_are_not_replayed() -> None:
    micro = MicroBatch(1, experts={0: (torch.tensor([[3, 1], [2, 2], [0, 7]]), torch.tensor([True, True, True]))})
    layout = rank_layout(torch.cat(row_numbers([3]))[None], config(), 0, 1)
    assert localize(micro, layout, {0}, torch.tensor([5, 6, 7])).experts[0][1].tolist() == [True, False, True]


class Stage(torch.nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids


def test_tokens_that_are_not_the_guidances_are_an_error() -> None:
    context = ScheduledContext(QuantRecipe(num_layers=1), TrainerForward())
    model = Stage()
    context.check_tokens_of(model)
    with context.armed(LocalMicroBatch(3, tokens=torch.tensor([[5, 6, -1]]))):
        model(input_ids=torch.tensor([[5, 6, 0]]))
        model(torch.tensor([[5, 6, 9]]))
        with pytest.raises(GuidanceError, match=r"micro-batch 3: the tokens that Megatron lays out"):
            model(input_ids=torch.tensor([[6, 5, 0]]))
        with pytest.raises(GuidanceError, match=r"\[1, 4\].* not those .*\[1, 3\]"):
            model(input_ids=torch.tensor([[5, 6, 0, 0]]))
    model(input_ids=torch.tensor([[6, 5, 0]]))  # disarmed


def test_a_forward_within_another_is_an_error_and_one_within_a_backward_is_not() -> None:
    context = ScheduledContext(QuantRecipe(num_layers=1), TrainerForward())
    block = torch.nn.Linear(2, 2)
    context.follow(block)
    with context.armed(MicroBatch(1)):
        y = block(torch.ones(1, 2))
        with pytest.raises(GuidanceError, match="micro-batch 1 is still armed"), context.armed(MicroBatch(2)):
            pass
    assert context.current is None
    y.sum().backward()
    assert context.current is not None
    assert context.current.key == 1
    block(torch.ones(1, 2))  # a forward that nothing was armed for
    assert context.current is None
    y = block(torch.ones(1, 2))
    y.sum().backward()
    assert context.current is None
