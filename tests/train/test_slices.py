"""From stored records to rows: which fall back, why, and that the rest line up with their tokens."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.guidance import GuidanceError, decode, encode, pack_rows
from tracefp4.guidance.store import MemoryStore, SiteRows, TrajectoryGuidance
from tracefp4.nn import GuidanceContext, MicroBatch
from tracefp4.recipe import QuantRecipe, TrainerForward
from tracefp4.train.slices import MicroBatchBuilder, RowCounts, padding_metrics, replayed_experts, split_micro_batches
from tracefp4.types import GuidanceHandle, TrainBatch, Trajectory

WIDTHS = {"expert_input": 32, "key": 16, "value": 16}
LAYERS, MOE_LAYERS, TOP_K = (1, 2), (0, 1, 2), 2
RECIPE = QuantRecipe(
    num_layers=3, weights="nvfp4", activations="nvfp4", kv="nvfp4", kv_encode_scale=2.0, guided_layers=LAYERS, bits=4.5
)
REASONS = ("missing", "checksum", "recipe", "rows", "token", "stale", "invalid")


def site_values(site: str, layer: int, token: int, position: int) -> Tensor:
    """Values that no other (site, layer, token, position) has; representable well enough to be told apart."""
    seed = hash((("expert_input", "key", "value").index(site), layer, token, position)) % 2**31
    return torch.randn(WIDTHS[site], generator=torch.Generator().manual_seed(seed))


def quantized(site: str, x: Tensor, recipe: QuantRecipe) -> QuantizedBlocks:
    return get_format(recipe.site_format(site)).quantize(x, encode_scale=recipe.site_encode_scale(site))


def record_of(
    tokens: tuple[int, ...], recipe: QuantRecipe = RECIPE, layers: tuple[int, ...] = LAYERS
) -> TrajectoryGuidance:
    rows = len(tokens) - 1
    sites = {}
    for site in WIDTHS:
        if recipe.site_format(site) is None:
            continue
        payload, scale = [], []
        for layer in layers:
            x = torch.stack([site_values(site, layer, tokens[i], i) for i in range(rows)])
            blocks = quantized(site, x, recipe)
            payload.append(pack_rows(blocks, recipe.bits))
            scale.append(blocks.encode_scale)
        kind = scale[0]
        static = kind if kind is None or kind.ndim == 0 else torch.stack(scale)[..., 0]
        sites[site] = SiteRows(torch.stack(payload), static)
    return TrajectoryGuidance(
        recipe.hash,
        recipe.bits,
        layers,
        sites,
        torch.tensor(tokens[:-1], dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
        torch.ones(rows, dtype=torch.bool),
    )


def trajectory(name: str, tokens: tuple[int, ...], prompt: int = 2) -> Trajectory:
    response = tokens[prompt:]
    g = torch.Generator().manual_seed(len(tokens))
    return Trajectory(
        request_id=name,
        prompt_ids=tokens[:prompt],
        response_ids=response,
        logprobs=torch.zeros(len(response)),
        versions=torch.zeros(len(response), dtype=torch.int32),
        row_versions=torch.zeros(len(tokens) - 1, dtype=torch.int32),
        routed_experts=torch.randint(0, 8, (len(tokens) - 1, 3, TOP_K), generator=g).to(torch.int16),
        finish_reason="stop",
        reward=0.0,
        advantage=1.0,
        group=0,
    )


def stored(store: MemoryStore, name: str, tokens: tuple[int, ...], **changes: Tensor) -> Trajectory:
    t = trajectory(name, tokens)
    t.guidance = store.put(name, replace(record_of(tokens), **changes))
    return t


def build(
    store: MemoryStore,
    trajectories: list[Trajectory],
    recipe: QuantRecipe = RECIPE,
    version: int = 0,
    guided: bool = True,
    max_version_diff: int = 3,
) -> tuple[MicroBatch, RowCounts]:
    counts = RowCounts()
    builder = MicroBatchBuilder(store, recipe, guided, WIDTHS, MOE_LAYERS, TOP_K, max_version_diff)
    return builder.build(TrainBatch.collate(trajectories, 0), version, counts), counts


def check_totals(counts: RowCounts, trajectories: list[Trajectory]) -> None:
    m = counts.metrics()
    assert m["guidance/rows"] == sum(t.num_rows for t in trajectories)
    assert m["guidance/guided_rows"] + sum(m[f"guidance/fallback/{r}"] for r in REASONS) == m["guidance/rows"]
    assert m["guidance/guided_share"] == m["guidance/guided_rows"] / m["guidance/rows"]
    assert sum(counts.reasons.values()) == sum(m[f"guidance/fallback/{r}"] for r in REASONS)


# -- rows and tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "formats", [{}, {"encode_scale": "row"}, {"activations": "mxfp4-rceil", "kv": None, "bits": 4.25}], ids=str
)
def test_every_row_is_the_record_of_its_token(formats: dict) -> None:
    recipe, store = replace(RECIPE, **formats), MemoryStore()
    batch = [trajectory("a", (5, 6, 7, 8, 9)), trajectory("b", (9, 9, 9)), trajectory("c", (1, 2, 3, 4))]
    for t in batch:
        t.guidance = store.put(t.request_id, record_of(t.token_ids, recipe))
    mb, counts = build(store, batch, recipe)
    T = 5
    sites = [s for s in WIDTHS if recipe.site_format(s) is not None]
    assert set(mb.guidance) == {(site, layer) for site in sites for layer in LAYERS}
    for (site, layer), guidance in mb.guidance.items():
        assert guidance.header.recipe_hash == recipe.hash
        noise = torch.zeros(len(batch) * T, WIDTHS[site])
        blocks, valid = decode(guidance, noise, own_encode_scale=recipe.site_encode_scale(site))
        got = get_format(blocks.format).dequantize(blocks)
        for b, t in enumerate(batch):
            for i in range(T):
                row = b * T + i
                assert bool(valid[row]) == (i < t.num_rows), "padding and last tokens have no row"
                if valid[row]:
                    x = site_values(site, layer, t.token_ids[i], i)[None]
                    want = get_format(blocks.format).dequantize(quantized(site, x, recipe))
                    assert torch.equal(got[row], want[0])
                else:
                    assert (got[row] == 0).all()
    assert counts.guided == counts.total == 4 + 2 + 3
    check_totals(counts, batch)


def test_records_of_older_weights_have_a_band_and_those_of_the_same_have_none() -> None:
    """Values between the recorded slots and others: the trajectory of this version follows its record, one row of an
    older version gives the whole trajectory a band, since later rows read its K and V."""
    recipe, store = replace(RECIPE, band=0.1), MemoryStore()
    names, tokens = ("old", "new", "mixed"), (5, 6, 7, 8)
    batch = [trajectory(name, tokens) for name in names]
    versions = ([3, 3, 3], [4, 4, 4], [3, 4, 4])
    for t, own in zip(batch, versions, strict=True):
        record = replace(record_of(tokens, recipe), versions=torch.tensor(own, dtype=torch.int32))
        t.guidance = store.put(t.request_id, record)
    mb, _ = build(store, batch, recipe, version=4)
    context = GuidanceContext(recipe, TrainerForward(activations=True, kv=True, guided=True))
    for (site, layer), guidance in mb.guidance.items():
        assert guidance.stale is not None
        assert guidance.stale.view(3, 4)[:, 0].tolist() == [True, False, True]
        recorded = torch.stack([site_values(site, layer, tokens[i], i) for i in range(3)])
        moved = 1.4 * recorded  # another slot for most, the border far away
        x = torch.nn.functional.pad(moved, (0, 0, 0, 1)).repeat(3, 1)
        with context.armed(mb):
            y = context.round_site(site, layer, x).view(3, 4, -1)[:, :3]
        fmt = get_format("nvfp4")
        assert torch.equal(y[1], fmt.dequantize(quantized(site, recorded, recipe)))
        for b in (0, 2):
            rows = guidance.select([4 * b, 4 * b + 1, 4 * b + 2])
            held = decode(rows, moved, band=0.1)[0]
            assert torch.equal(y[b], fmt.dequantize(held))
            assert (y[b] != y[1]).float().mean() > 0.3
    alone = build(store, batch[1:2], recipe, version=4)[0]
    assert alone.guidance
    for (site, layer), guidance in alone.guidance.items():
        assert guidance.stale is None, "all of this version: no forward asks for a band"
        recorded = torch.stack([site_values(site, layer, tokens[i], i) for i in range(3)])
        with context.armed(alone):
            y = context.round_site(site, layer, torch.nn.functional.pad(1.4 * recorded, (0, 0, 0, 1)))[:3]
        assert torch.equal(y, get_format("nvfp4").dequantize(quantized(site, recorded, recipe)))
    assert all(g.stale is None for g in build(store_of(batch), batch, version=4)[0].guidance.values())


def store_of(batch: list[Trajectory]) -> MemoryStore:
    """Records without a band of the same trajectories."""
    store = MemoryStore()
    for t in batch:
        t.guidance = store.put(t.request_id, record_of(t.token_ids))
    return store


def test_replayed_experts_line_up_and_end_with_the_rows() -> None:
    batch = [trajectory("a", (5, 6, 7, 8, 9)), trajectory("b", (9, 9, 9)), trajectory("c", (1, 2, 3))]
    batch[2].routed_experts = None
    experts = replayed_experts(TrainBatch.collate(batch, 0), (0, 2, 3), TOP_K, 0)
    assert set(experts) == {0, 2, 3}
    for column, layer in enumerate((0, 2, 3)):
        chosen, valid = experts[layer]
        assert chosen.dtype == torch.int64
        assert valid.view(3, 5).sum(-1).tolist() == [4, 2, 0]
        for b, t in enumerate(batch[:2]):
            assert valid.view(3, 5)[b, : t.num_rows].all()
            assert torch.equal(chosen.view(3, 5, 2)[b, : t.num_rows], t.routed_experts[:, column].long())


def test_experts_of_another_shape_are_refused() -> None:
    t = trajectory("a", (5, 6, 7, 8))
    t.routed_experts = t.routed_experts[:-1]
    with pytest.raises(GuidanceError, match=r"routed experts of a have shape \(2, 3, 2\), expected \(3, 3, 2\)"):
        replayed_experts(TrainBatch.collate([t], 0), MOE_LAYERS, TOP_K, 0)


def test_rows_recomputed_or_too_old_are_not_replayed() -> None:
    t = stored(MemoryStore(), "a", (1, 2, 3, 4))
    assert t.routed_experts is not None
    t.routed_experts[0] = -1
    t.row_versions = torch.tensor([5, 1, 5], dtype=torch.int32)
    batch = TrainBatch.collate([t], 0)
    experts, valid = replayed_experts(batch, MOE_LAYERS, TOP_K, oldest_version=2)[MOE_LAYERS[0]]
    assert valid.tolist() == [False, False, True, False]
    assert (experts >= 0).all()
    counts = RowCounts()
    counts.add_replay(batch, {0: (experts, valid)})
    assert counts.replay_metrics() == {"router/replayed_share": 1 / 3}


def test_keys_are_unique_and_unguided_batches_carry_experts_only() -> None:
    store = MemoryStore()
    batch = [stored(store, "a", (1, 2, 3))]
    builder = MicroBatchBuilder(store, RECIPE, False, WIDTHS, MOE_LAYERS, TOP_K, 3)
    counts = RowCounts()
    built = [builder.build(TrainBatch.collate(batch, 0), 0, counts) for _ in range(3)]
    assert len({mb.key for mb in built}) == 3
    assert not any(mb.guidance for mb in built)
    assert set(built[0].experts) == set(MOE_LAYERS)
    assert (counts.total, counts.guided, counts.reasons) == (0, 0, Counter())
    assert counts.replay_metrics() == {"router/replayed_share": 1.0}
    assert counts.metrics()["guidance/guided_share"] == 0


# -- micro-batches ------------------------------------------------------------------------------------------------


def of_lengths(*lengths: int) -> list[Trajectory]:
    return [trajectory(f"t{i}", tuple(range(2, 2 + n))) for i, n in enumerate(lengths)]


def sizes(groups: list[list[Trajectory]]) -> list[list[int]]:
    return [[len(t.token_ids) for t in group] for group in groups]


@pytest.mark.parametrize(
    ("size", "tokens", "want"),
    [
        (2, 0, [[3, 3], [5, 6], [20]]),
        (9, 0, [[3, 3, 5, 6, 20]]),
        (1, 6, [[3, 3], [5], [6], [20]]),
        (1, 15, [[3, 3, 5], [6], [20]]),
        (1, 24, [[3, 3, 5, 6], [20]]),
        (1, 23, [[3, 3, 5], [6], [20]]),
        (9, 1, [[3], [3], [5], [6], [20]]),
        (1, 100, [[3, 3, 5, 6, 20]]),
    ],
)
def test_micro_batches_are_filled_up_to_their_budget(size: int, tokens: int, want: list[list[int]]) -> None:
    trajectories = of_lengths(5, 20, 3, 6, 3)
    groups = split_micro_batches(trajectories, size, tokens)
    assert sizes(groups) == want
    assert sorted(t.request_id for g in groups for t in g) == ["t0", "t1", "t2", "t3", "t4"]


def test_no_trajectories_make_no_micro_batch() -> None:
    assert split_micro_batches([], 4) == split_micro_batches([], 4, 100) == []


def test_padding_is_the_share_of_positions_without_a_token() -> None:
    batches = [TrainBatch.collate(of_lengths(3, 5), 0), TrainBatch.collate(of_lengths(10), 0)]
    assert padding_metrics(batches) == {"train/micro_batches": 2.0, "train/padding_share": pytest.approx(2 / 20)}


def test_a_model_without_routers_replays_nothing_and_says_so() -> None:
    t = stored(MemoryStore(), "a", (1, 2, 3, 4))
    t.routed_experts = None
    counts = RowCounts()
    batch = TrainBatch.collate([t], 0)
    assert replayed_experts(batch, (), 0, 0) == {}
    counts.add_replay(batch, {})
    assert counts.replay_metrics() == {}


# -- falling back -------------------------------------------------------------------------------------------------


def only(counts: RowCounts) -> dict[str, int]:
    return {reason: n for reason, n in counts.reasons.items() if n}


def invalid_everywhere(mb: MicroBatch, b: int, T: int) -> bool:
    return not any(g.valid.view(-1, T)[b].any() for g in mb.guidance.values())


@pytest.mark.parametrize("reason", ["missing", "discarded", "checksum", "rows", "handle rows", "handle recipe"])
def test_a_whole_trajectory_falls_back(reason: str) -> None:
    """Its neighbour in the batch stays guided."""
    store = MemoryStore()
    bad, good = stored(store, "bad", (1, 2, 3, 4, 5)), stored(store, "good", (5, 4, 3))
    handle = bad.guidance
    assert handle is not None
    if reason == "missing":
        bad.guidance = None
    elif reason == "discarded":
        store.discard([handle])
    elif reason == "checksum":
        store.get(handle).sites["value"].payload[1, 2, 0] ^= 1
    elif reason == "rows":
        bad.guidance = store.put("short", record_of((1, 2, 3, 4)))
    elif reason == "handle rows":
        bad.guidance = GuidanceHandle("bad", 3, RECIPE.hash)
    else:
        bad.guidance = GuidanceHandle("bad", 4, "0123456789abcdef")
    mb, counts = build(store, [bad, good])
    name = {"discarded": "missing", "handle rows": "rows", "handle recipe": "recipe"}.get(reason, reason)
    assert only(counts) == {name: 4}
    assert counts.guided == 2
    assert invalid_everywhere(mb, 0, 5)
    assert not invalid_everywhere(mb, 1, 5)
    check_totals(counts, [bad, good])


@pytest.mark.parametrize("field", ["payload", "encode_scale", "token_ids", "versions", "valid"])
def test_any_changed_byte_of_a_record_is_noticed(field: str) -> None:
    store = MemoryStore()
    t = stored(store, "a", (1, 2, 3, 4))
    record = store.get(t.guidance)
    site = record.sites["expert_input"]
    tensor = getattr(site, field) if hasattr(site, field) else getattr(record, field)
    tensor.view(-1).view(torch.uint8)[0] ^= 1
    _, counts = build(store, [t])
    assert only(counts) == {"checksum": 3}


def test_another_recipe_is_refused_by_name() -> None:
    store = MemoryStore()
    t = stored(store, "a", (1, 2, 3, 4))
    mine = replace(RECIPE, kv_encode_scale=4.0)
    with pytest.raises(GuidanceError, match=f"guidance of a was recorded under recipe {RECIPE.hash}.*{mine.hash}"):
        build(store, [t], mine)


def test_single_rows_fall_back_by_their_first_reason() -> None:
    """Row 0 has every fault, row 1 is stale and invalid, row 2 invalid, rows 3 and 4 are fine."""
    store, tokens = MemoryStore(), (1, 2, 3, 4, 5, 6)
    t = stored(
        store,
        "a",
        tokens,
        token_ids=torch.tensor([9, 2, 3, 4, 5], dtype=torch.int32),
        versions=torch.tensor([0, 0, 2, 2, 9], dtype=torch.int32),
        valid=torch.tensor([False, False, False, True, True]),
    )
    mb, counts = build(store, [t], version=5)
    assert only(counts) == {"token": 1, "stale": 1, "invalid": 1}
    assert counts.guided == 2
    for guidance in mb.guidance.values():
        assert guidance.valid.tolist() == [False, False, False, True, True, False]
    check_totals(counts, [t])


@pytest.mark.parametrize(("version", "guided"), [(0, 2), (3, 2), (4, 0)])
def test_staleness_begins_beyond_the_allowed_difference(version: int, guided: int) -> None:
    store = MemoryStore()
    _, counts = build(store, [stored(store, "a", (1, 2, 3))], version=version, max_version_diff=3)
    assert counts.guided == guided
    assert counts.reasons["stale"] == 2 - guided


# -- probes -------------------------------------------------------------------------------------------------------


def test_probe_covers_the_valid_rows_of_the_probed_trajectories() -> None:
    """Three trajectories, the second and third probed; row 1 of the third is invalid."""
    store = MemoryStore()
    batch = [stored(store, n, tokens) for n, tokens in (("a", (1, 2, 3, 4)), ("b", (5, 6, 7)), ("c", (8, 9, 9, 2)))]
    batch[1].probe = store.put("b/probe", record_of(batch[1].token_ids, layers=(0, 1, 2)))
    full = record_of(batch[2].token_ids, layers=(0, 1, 2))
    batch[2].probe = store.put("c/probe", replace(full, valid=torch.tensor([True, False, True])))
    mb, counts = build(store, batch)
    assert mb.probe_rows.tolist() == [4, 5, 8, 10]
    assert set(mb.probe) == {(site, layer) for site in WIDTHS for layer in (0, 1, 2)}
    for (site, layer), probe in mb.probe.items():
        assert probe.rows == 4
        assert probe.valid.all()
        where = [(batch[1], 0), (batch[1], 1), (batch[2], 0), (batch[2], 2)]
        x = torch.stack([site_values(site, layer, t.token_ids[i], i) for t, i in where])
        want = encode(quantized(site, x, RECIPE), 4.5)
        assert torch.equal(probe.payload, want.payload)
    assert counts.total == 3 + 2 + 3
    check_totals(counts, batch)


def test_a_lost_probe_is_no_error_and_not_counted() -> None:
    store = MemoryStore()
    t = stored(store, "a", (1, 2, 3))
    t.probe = GuidanceHandle("a/probe", 2, RECIPE.hash)
    mb, counts = build(store, [t])
    assert mb.probe == {}
    assert mb.probe_rows is None
    assert only(counts) == {}
