"""Records that pass through a small device buffer equal those of a buffer by slot, whatever the order of events."""

from __future__ import annotations

import pytest
import torch

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.guidance.recorder import SlotRecorder
from tracefp4.guidance.store import TrajectoryGuidance
from tracefp4.guidance.stream import RowLayout, StreamRecorder
from tracefp4.kernels.quantize_record.ref import record
from tracefp4.recipe import QuantRecipe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = {"expert_input": 64, "key": 32, "value": 32}
SLOTS, ROUTED = 24, (3, 2)


def recipe(bits: float = 1.125, activations: str | None = "nvfp4") -> QuantRecipe:
    return QuantRecipe(4, activations=activations, kv="nvfp4", kv_encode_scale=2.0, guided_layers=(1, 3), bits=bits)


def blocks(r: QuantRecipe, site: str, n: int, seed: int) -> QuantizedBlocks:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, WIDTHS[site], generator=g) * 4
    S = r.site_encode_scale(site)
    return get_format("nvfp4").quantize(x, encode_scale=torch.tensor(S) if isinstance(S, float) else S).to(DEVICE)


class Both:
    """The same steps in a SlotRecorder and in a StreamRecorder."""

    def __init__(self, r: QuantRecipe, chunk_rows: int) -> None:
        self.recipe = r
        self.by_slot = SlotRecorder(r, r.guided_layers, r.bits, SLOTS, WIDTHS, "cpu")
        layout = RowLayout(r, r.guided_layers, r.bits, WIDTHS, ROUTED)
        self.stream = StreamRecorder(layout, SLOTS, chunk_rows, DEVICE)
        self.experts = torch.zeros(SLOTS, *ROUTED, dtype=torch.int64)

    def step(self, slots: list[int], seed: int) -> None:
        at, n = torch.tensor(slots), len(slots)
        rows = self.stream.begin(at) + torch.arange(n, device=DEVICE)
        made = {(s, layer): blocks(self.recipe, s, n, 100 * seed + layer) for s in WIDTHS for layer in range(4)}
        for (site, layer), b in made.items():
            target = self.stream.target(site, layer, rows)
            assert (target is None) == (layer not in (1, 3) or self.recipe.site_format(site) is None)
            if target is not None:
                record(b, target)
        self.by_slot.write(at, {key: b.to("cpu") for key, b in made.items()})
        chosen = torch.randint(0, 300, (n, *ROUTED), generator=torch.Generator().manual_seed(seed))
        self.stream.write_experts(rows, chosen.to(DEVICE))
        self.experts[at] = chosen

    def want(self, slots: list[int]) -> tuple[TrajectoryGuidance, torch.Tensor]:
        at, n = torch.tensor(slots), len(slots)
        ids = torch.arange(n, dtype=torch.int32)
        return self.by_slot.gather(at, ids, ids, torch.ones(n, dtype=torch.bool)), self.experts[at]


def same(got: TrajectoryGuidance, want: TrajectoryGuidance) -> None:
    assert got.checksum() == want.checksum()
    assert set(got.sites) == set(want.sites)


@pytest.mark.parametrize("bits", [4.5, 1.125, 1.0625])
@pytest.mark.parametrize("chunk_rows", [4, 5, 100])
def test_streamed_rows_equal_those_kept_by_slot(bits: float, chunk_rows: int) -> None:
    both = Both(recipe(bits), chunk_rows)
    for seed, slots in enumerate([[13, 2, 7, 19], [0, 5], [13], [23, 22, 21, 20], [2]]):
        both.step(slots, seed)
        both.stream.poll()
    for slots in ([0, 13, 7], [20, 2, 19, 5]):
        got = both.stream.gather(torch.tensor(slots))
        guidance, experts = both.want(slots)
        both.stream.poll(wait=True)
        ids = torch.arange(len(slots), dtype=torch.int32)
        same(got.guidance(ids, ids, torch.ones(len(slots), dtype=torch.bool)), guidance)
        assert torch.equal(got.experts().long(), experts)


def test_a_gather_holds_what_was_there_when_it_was_asked_for() -> None:
    """The slots' next owner writes over them before the host has come to the gather."""
    both = Both(recipe(), 8)
    both.step([3, 4, 5], 1)
    got, (want, experts) = both.stream.gather(torch.tensor([5, 3])), both.want([5, 3])
    for seed in range(2, 6):
        both.step([3, 4, 5], seed)
    assert got.rows is None
    both.stream.poll(wait=True)
    ids = torch.arange(2, dtype=torch.int32)
    same(got.guidance(ids, ids, torch.ones(2, dtype=torch.bool)), want)
    assert torch.equal(got.experts().long(), experts)


def test_what_is_not_recorded_takes_no_bytes() -> None:
    r = recipe(activations=None)
    layout = RowLayout(r, r.guided_layers, 1.125, WIDTHS)
    assert set(layout.sizes) == {"key", "value"}
    assert layout.nbytes == -(-2 * 2 * 5 // 16) * 16
    nothing = RowLayout(r, (), 1.125, WIDTHS)
    assert (nothing.sizes, nothing.nbytes) == ({}, 0)
    only_experts = RowLayout(r, (), 1.125, WIDTHS, (3, 2))
    assert only_experts.nbytes == 16


def test_a_step_larger_than_a_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="a step of 5 rows exceeds the recorder's 4"):
        Both(recipe(), 4).stream.begin(torch.arange(5))
