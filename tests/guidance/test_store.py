"""The store returns a record as it was put, or says why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tracefp4.guidance import GuidanceError
from tracefp4.guidance.store import MemoryStore, SiteRows, TrajectoryGuidance
from tracefp4.types import GuidanceHandle

ROWS, LAYERS = 5, (1, 3)


def record(rows: int = ROWS, recipe_hash: str = "abc", mx: bool = False) -> TrajectoryGuidance:
    g = torch.Generator().manual_seed(0)

    def payload(width: int) -> Tensor:
        return torch.randint(0, 256, (len(LAYERS), rows, width), dtype=torch.uint8, generator=g)

    row_scale, static = torch.rand(len(LAYERS), rows, generator=g) + 1, torch.tensor(2.0)
    sites = {
        "expert_input": SiteRows(payload(10), None if mx else row_scale),
        "key": SiteRows(payload(6), None if mx else static),
        "value": SiteRows(payload(6), None if mx else static.clone()),
    }
    tokens, versions = torch.arange(rows, dtype=torch.int32) + 7, torch.full((rows,), 2, dtype=torch.int32)
    return TrajectoryGuidance(recipe_hash, 1.125, LAYERS, sites, tokens, versions, torch.ones(rows, dtype=torch.bool))


def scale(r: TrajectoryGuidance, site: str) -> Tensor:
    s = r.sites[site].encode_scale
    assert s is not None
    return s


PARTS: dict[str, Callable[[TrajectoryGuidance], Tensor]] = {
    "expert_input payload": lambda r: r.sites["expert_input"].payload,
    "key payload": lambda r: r.sites["key"].payload,
    "value payload": lambda r: r.sites["value"].payload,
    "row scales": lambda r: scale(r, "expert_input"),
    "key scale": lambda r: scale(r, "key"),
    "value scale": lambda r: scale(r, "value"),
    "tokens": lambda r: r.token_ids,
    "versions": lambda r: r.versions,
    "valid": lambda r: r.valid,
}


@pytest.mark.parametrize("part", PARTS)
def test_any_flipped_bit_is_found(part: str) -> None:
    store, r = MemoryStore(), record()
    handle = store.put("s", r)
    memory = PARTS[part](r).view(-1).view(torch.uint8)
    for byte in range(len(memory)):
        for bit in range(1 if part == "valid" else 8):  # a bool has one meaningful bit
            memory[byte] ^= 1 << bit
            with pytest.raises(GuidanceError, match=r"^checksum: stored bytes of sample s"):
                store.get(handle)
            memory[byte] ^= 1 << bit
    assert store.get(handle) is r


def test_changes_of_structure_are_found() -> None:
    r = record()
    changed = [
        replace(r, bits=1.5),
        replace(r, layers=(1, 2)),
        replace(r, recipe_hash="abd"),
        replace(r, sites={k: r.sites[k] for k in ("key", "value")}),
        replace(r, sites={**r.sites, "key": r.sites["value"], "value": r.sites["key"]}),
    ]
    sums = {r.checksum(), *(c.checksum() for c in changed)}
    assert len(sums) == 1 + len(changed)


def test_wrong_handles_are_refused_by_reason() -> None:
    store = MemoryStore()
    handle = store.put("s", record())
    assert handle == GuidanceHandle("s", ROWS, "abc", record().payload_nbytes)
    cases = [
        (replace(handle, sample_id="t"), "^missing: no guidance of sample t"),
        (replace(handle, rows=4), "^rows: sample s has 5 rows, its handle says 4"),
        (replace(handle, recipe_hash="x"), "^recipe: sample s was recorded under abc, its handle says x"),
    ]
    for wrong, message in cases:
        with pytest.raises(GuidanceError, match=message):
            store.get(wrong)


def test_a_record_is_written_once_and_discarded() -> None:
    store, r = MemoryStore(), record()
    handle = store.put("s", r)
    with pytest.raises(GuidanceError, match="sample s is already in the store"):
        store.put("s", record(4))
    assert store.get(handle) is r
    assert "s" in store
    assert len(store) == 1
    store.discard([handle, GuidanceHandle("never there", 1, "")])
    assert "s" not in store
    with pytest.raises(GuidanceError, match=r"^missing"):
        store.get(handle)
    store.put("s", r)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("mx", [False, True])
def test_small_records(rows: int, mx: bool) -> None:
    store, r = MemoryStore(), record(rows, mx=mx)
    assert store.get(store.put("s", r)).rows == rows
    assert r.payload_nbytes == rows * 2 * (10 + 6 + 6 + (0 if mx else 4))


def test_ragged_records_are_refused() -> None:
    r = record()
    with pytest.raises(GuidanceError, match=r"key: payload .* does not hold 2 layers x 5 rows"):
        replace(r, sites={"key": SiteRows(r.sites["key"].payload[:, :4], None)})
    with pytest.raises(GuidanceError, match="does not hold 3 layers x 5 rows"):
        replace(r, layers=(0, 1, 3))
    with pytest.raises(GuidanceError, match="5 token ids, 4 versions and 5 valid bits"):
        replace(r, versions=r.versions[:4])
    with pytest.raises(GuidanceError, match="5 token ids, 5 versions and 6 valid bits"):
        replace(r, valid=torch.ones(6, dtype=torch.bool))


def test_old_records_and_all_records_go() -> None:
    """A record goes that ran wholly under versions below; nothing waits in memory, and nothing is counted."""
    store = MemoryStore()
    for name, versions in (("old", [0, 1, 1]), ("across", [1, 2, 2]), ("new", [2, 2, 3])):
        store.put(name, replace(record(3), versions=torch.tensor(versions, dtype=torch.int32)))
    store.put("empty", record(0))
    assert (store.flush(), store.stats()) == (True, {})
    assert store.drop_below(2) == 2
    assert [name in store for name in ("old", "across", "new", "empty")] == [False, True, True, False]
    assert store.drop_below(2) == 0
    assert store.clear() == 2
    assert len(store) == 0
    assert store.close()
