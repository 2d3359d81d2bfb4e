"""Mismatch rates on hand-made slots.

With a static encode scale of 1 a block whose largest magnitude is 6 has scale 1, so values on the grid are slots.
"""

import math

import pytest
import torch
from torch import Tensor

from tracefp4.formats import get_format
from tracefp4.guidance import CompactGuidance, encode
from tracefp4.nn import SiteObserver
from tracefp4.nn.observe import slot_index


def block(*head: float, top: float = 6.0) -> Tensor:
    """16 values: the given ones, zeros, and the block's maximum."""
    return torch.tensor([*head, *[0.0] * (15 - len(head)), top])


def record(x: Tensor, bits: float = 4.5, valid: Tensor | None = None) -> CompactGuidance:
    return encode(get_format("nvfp4").quantize(x, encode_scale=1.0), bits, "", valid)


def metrics(
    train: Tensor, rollout: Tensor, used: CompactGuidance | None = None, valid: Tensor | None = None
) -> dict[str, float]:
    observer = SiteObserver()
    observer.observe("key", 3, train, record(rollout, valid=valid), used, 1.0, "cell")
    return observer.metrics()


def test_slot_index_is_the_signed_position_on_the_grid() -> None:
    assert slot_index(torch.arange(16, dtype=torch.uint8)).tolist() == [
        *range(8), 0, -1, -2, -3, -4, -5, -6, -7,
    ]  # fmt: skip


def test_known_rates() -> None:
    """Of 32 values 4 differ: 3 by one slot, of all 4 three upwards."""
    rollout = torch.stack([block(1.0, -2.0, 0.5, 3.0), block()])
    train = torch.stack([block(1.5, -1.5, 0.0, 6.0), block()])
    m = metrics(train, rollout)
    assert m["code_mismatch/before"] == 4 / 32
    assert m["code_mismatch/one_slot"] == 3 / 4
    assert m["code_mismatch/up"] == 3 / 4
    assert m["scale_mismatch/before"] == 0
    difference2 = 0.5**2 + 0.5**2 + 0.5**2 + 3.0**2
    norm2 = 1 + 4 + 0.25 + 9 + 36 + 36
    assert m["d_act/before"] == pytest.approx(math.sqrt(difference2 / norm2), rel=1e-12)
    for name in ("code_mismatch", "scale_mismatch", "d_act"):
        assert m[f"{name}/after"] == m[f"{name}/before"]
    assert m["code_mismatch/before/key/layer3"] == m["code_mismatch/before"]


def test_the_two_zeros_are_one_slot() -> None:
    rollout, train = block(0.0, -0.0, 1.0)[None], block(-0.0, 0.0, 1.0)[None]
    codes = [get_format("nvfp4").quantize(x, encode_scale=1.0).codes for x in (rollout, train)]
    assert not torch.equal(*codes)
    m = metrics(train, rollout)
    assert m["code_mismatch/before"] == 0
    assert m["d_act/before"] == 0
    assert "code_mismatch/up" not in m


def test_scale_mismatch_counts_blocks_and_leaves_their_slots_out_of_the_steps() -> None:
    """Block 1 at twice the scale: its slots differ, but a step between grids of two scales means nothing."""
    rollout = torch.cat([block(1.0), block(2.0, 2.0)])[None]
    train = torch.cat([block(1.5), block(2.0, 2.0, top=12.0)])[None]
    m = metrics(train, rollout)
    assert m["scale_mismatch/before"] == 1 / 2
    assert m["code_mismatch/before"] == 3 / 32  # 1.5; 2.0 twice as slot 1.0; the maximum is slot 6 in both
    assert m["code_mismatch/one_slot"] == 1
    assert m["d_act/before"] == pytest.approx(math.sqrt((0.5**2 + 6**2) / (1 + 8 + 72)), rel=1e-12)


def test_after_is_measured_at_the_guided_rounding() -> None:
    rollout, train = block(1.0, 2.0, 0.5)[None], block(1.3, 2.4, 1.5)[None]
    m = metrics(train, rollout, used=record(rollout, 1.5))
    # Nearest: 1.5, 2, 1.5. One bit repairs the first; 0.5 against 1.5 has the same bit and stays.
    assert m["code_mismatch/before"] == 2 / 16
    assert m["code_mismatch/after"] == 1 / 16
    assert m["d_act/before"] > m["d_act/after"] > 0
    full = metrics(train, rollout, used=record(rollout))
    assert full["code_mismatch/after"] == full["d_act/after"] == 0


def test_only_valid_rows_count() -> None:
    rollout = torch.stack([block(1.0), block(1.0), block(1.0)])
    train = torch.stack([block(1.5), block(1.0), block(-4.0)])
    m = metrics(train, rollout, valid=torch.tensor([True, True, False]))
    assert m["code_mismatch/before"] == 1 / 32
    assert metrics(train, rollout, valid=torch.zeros(3, dtype=torch.bool)) == {}


def test_a_row_without_usable_guidance_is_rounded_to_nearest() -> None:
    rollout, train = block(1.0).expand(2, 16), block(1.3).expand(2, 16)
    used = record(rollout, 1.5, valid=torch.tensor([True, False]))
    m = metrics(train, rollout, used=used)
    assert m["code_mismatch/before"] == 2 / 32
    assert m["code_mismatch/after"] == 1 / 32


def test_totals_pool_values_of_all_sites_and_layers() -> None:
    observer = SiteObserver()
    rollout = record(block(1.0)[None])
    wide = torch.cat([block(1.0), block()])[None]
    observer.observe("key", 0, block(1.5)[None], rollout, None, 1.0, "cell")
    observer.observe("value", 1, wide, record(wide), None, 1.0, "cell")
    m = observer.metrics()
    rates = {"code_mismatch", "scale_mismatch", "d_act"}
    per_site = {f"{r}/{w}" for r in rates for w in ("before", "after")}
    expected = {f"{name}{where}" for name in per_site for where in ("", "/key/layer0", "/value/layer1")}
    steps = {f"code_mismatch/{name}{where}" for name in ("one_slot", "up") for where in ("", "/key/layer0")}
    assert set(m) == expected | steps
    assert m["code_mismatch/before/key/layer0"] == 1 / 16
    assert m["code_mismatch/before/value/layer1"] == 0
    assert m["code_mismatch/before"] == 1 / 48


def test_nothing_observed_is_nothing_reported() -> None:
    assert SiteObserver().metrics() == {}
