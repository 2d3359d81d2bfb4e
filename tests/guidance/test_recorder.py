"""The recorder keeps, by slot, exactly what the codec makes of the blocks it was given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.guidance import encode
from tracefp4.guidance.recorder import SlotRecorder
from tracefp4.guidance.store import TrajectoryGuidance
from tracefp4.recipe import QuantRecipe

SLOTS, WIDTHS = 20, {"expert_input": 64, "key": 32, "value": 32}


def recipe(name: str | None, kv: str | None, bits: float) -> QuantRecipe:
    return QuantRecipe(
        4, activations=name, kv=kv, encode_scale="row", kv_encode_scale=2.0, guided_layers=(1, 3), bits=bits
    )


def blocks(r: QuantRecipe, site: str, n: int, seed: int) -> QuantizedBlocks:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, WIDTHS[site], generator=g) * torch.rand(n, 1, generator=g) * 5
    S = r.site_encode_scale(site)
    return get_format(str(r.site_format(site))).quantize(x, encode_scale=torch.tensor(S) if isinstance(S, float) else S)


def gather(rec: SlotRecorder, slots: Tensor) -> TrajectoryGuidance:
    n = len(slots)
    zeros = torch.zeros(n, dtype=torch.int32)
    return rec.gather(slots, zeros, zeros, torch.ones(n, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "kv", "bits"),
    [
        ("nvfp4", "nvfp4", 1.125),
        ("nvfp4", "nvfp4", 4.5),
        ("nvfp4", None, 1.5),
        (None, "nvfp4", 1.0625),
        ("nvfp4-4over6", "nvfp4", 1.125),
        ("mxfp4-even", "mxfp4-ceil", 1.25),
    ],
)
def test_rows_come_back_in_the_order_asked(name: str | None, kv: str | None, bits: float) -> None:
    r = recipe(name, kv, bits)
    rec = SlotRecorder(r, r.guided_layers, bits, SLOTS, WIDTHS, "cpu")
    sites = [s for s in WIDTHS if r.site_format(s)]
    slots = torch.tensor([13, 2, 7, 19, 0])
    written = {(s, layer): blocks(r, s, 5, 10 * layer + len(s)) for s in sites for layer in range(4)}
    rec.write(slots, written)
    order = torch.tensor([4, 0, 2])
    got = gather(rec, slots[order])
    assert (got.layers, got.bits, got.recipe_hash, set(got.sites)) == ((1, 3), bits, r.hash, set(sites))
    for s in sites:
        for i, layer in enumerate((1, 3)):
            want = encode(written[s, layer].rows(order), bits=bits)
            assert torch.equal(got.sites[s].payload[i], want.payload)
            S = got.sites[s].encode_scale
            if want.encode_scale is None:
                assert S is None
            else:
                assert S is not None
                assert torch.equal(S[i][:, None] if S.ndim else S, want.encode_scale)
                assert S.ndim == (2 if s == "expert_input" else 0)


def test_only_some_rows_of_a_step() -> None:
    r = recipe("nvfp4", "nvfp4", 4.5)
    rec = SlotRecorder(r, (1,), 4.5, SLOTS, WIDTHS, "cpu")
    step = {(s, 1): blocks(r, s, 6, 3) for s in WIDTHS}
    rows = torch.tensor([1, 4, 5])
    rec.write(torch.tensor([8, 9, 3]), step, rows)
    got = gather(rec, torch.tensor([8, 9, 3, 4]))
    for s in WIDTHS:
        want = encode(step[s, 1].rows(rows), bits=4.5)
        assert torch.equal(got.sites[s].payload[0, :3], want.payload)
        assert not got.sites[s].payload[0, 3].any()  # a slot that nobody wrote
    S = got.sites["expert_input"].encode_scale
    assert S is not None
    assert torch.equal(S[0, :3, None], step["expert_input", 1].rows(rows).encode_scale)


def test_a_gathered_record_is_no_view() -> None:
    """The slots' next owner writes over them while the record waits for the trainer."""
    r = recipe("nvfp4", "nvfp4", 1.125)
    rec = SlotRecorder(r, (1, 3), 1.125, SLOTS, WIDTHS, "cpu")
    slots = torch.arange(4)
    rec.write(slots, {(s, layer): blocks(r, s, 4, 1) for s in WIDTHS for layer in (1, 3)})
    got = gather(rec, slots)
    before = got.checksum()
    rec.write(slots, {(s, layer): blocks(r, s, 4, 2) for s in WIDTHS for layer in (1, 3)})
    assert got.checksum() == before
    assert gather(rec, slots).checksum() != before
