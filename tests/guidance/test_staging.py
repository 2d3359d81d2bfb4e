"""Staging memory: copies are complete after wait, and memory is used again only after release.

The CPU runs the same code without stream and event; the last tests need CUDA.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stored import equal
from tiny import tiny_recipe
from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.guidance.disk import ShardStore
from tracefp4.guidance.recorder import SlotRecorder
from tracefp4.guidance.staging import HostStaging
from tracefp4.guidance.store import MemoryStore, TrajectoryGuidance

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
SLOTS, WIDTH = 16, 32


def recorder(device: str, staging: HostStaging | None) -> SlotRecorder:
    """Every slot written with values of its own."""
    recipe = tiny_recipe("trace-all", 2)
    widths = {"expert_input": WIDTH, "key": WIDTH, "value": WIDTH}
    made = SlotRecorder(recipe, (0, 1), recipe.bits, SLOTS, widths, device, staging)
    x = torch.randn(SLOTS, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    blocks: dict[tuple[str, int], QuantizedBlocks] = {}
    for site in widths:
        name = recipe.site_format(site)
        assert name is not None
        for layer in (0, 1):
            blocks[site, layer] = get_format(name).quantize(x + layer, encode_scale=recipe.site_encode_scale(site))
    made.write(torch.arange(SLOTS, device=device), blocks)
    return made


def gather(made: SlotRecorder, device: str, slots: list[int]) -> TrajectoryGuidance:
    n = len(slots)
    ids = torch.arange(n, dtype=torch.int32)
    return made.gather(torch.tensor(slots, device=device), ids, ids * 0, torch.ones(n, dtype=torch.bool))


def plain(slots: list[int]) -> TrajectoryGuidance:
    return gather(recorder("cpu", None), "cpu", slots)


@pytest.mark.parametrize("device", DEVICES)
def test_staged_records_are_those_of_the_moment_they_were_gathered(device: str, tmp_path: Path) -> None:
    staging = HostStaging(device, 1 << 20)
    made = recorder(device, staging)
    with ShardStore(str(tmp_path), commit_seconds=0) as store:
        handles = []
        for k in range(6):
            handles.append(store.put(f"s{k}", gather(made, device, [k, 9, 2])))
        for payload in made._payload.values():
            payload.zero_()  # the slots belong to another sequence now
        for k, handle in enumerate(handles):
            assert handle is not None
            assert equal(store.get(handle), plain([k, 9, 2]))  # from the queue or from the disk
        assert store.flush(10)
        assert staging.taken_bytes == 0
        for k, handle in enumerate(handles):
            assert handle is not None
            assert equal(store.get(handle), plain([k, 9, 2]))


@pytest.mark.parametrize("device", DEVICES)
def test_dropped_and_discarded_records_give_their_memory_back(device: str, tmp_path: Path) -> None:
    staging = HostStaging(device, 1 << 20)
    made = recorder(device, staging)
    with ShardStore(str(tmp_path), queue_bytes=1) as store:
        assert store.put("s", gather(made, device, [1])) is None
        assert staging.taken_bytes == 0
    with ShardStore(str(tmp_path), commit_seconds=60) as store:
        handle = store.put("s", gather(made, device, [1]))
        assert handle is not None
        assert staging.taken_bytes > 0
        store.discard([handle])
        assert staging.taken_bytes == 0
    memory = MemoryStore()
    record = memory.get(memory.put("s", gather(made, device, [1, 2])))
    assert staging.taken_bytes == 0
    assert equal(record, plain([1, 2]))


@pytest.mark.parametrize("device", DEVICES)
def test_without_room_the_copy_is_a_plain_one(device: str) -> None:
    staging = HostStaging(device, 4096)
    made = recorder(device, staging)
    records = [gather(made, device, [k]) for k in range(4)]
    assert [r.staged is None for r in records].count(True) >= 2
    for k, record in enumerate(records):
        assert equal(record.settled(), plain([k]))
    assert staging.taken_bytes == 0


def test_gaps_are_filled_and_memory_in_use_is_not() -> None:
    staging = HostStaging("cpu", 4 * 512)
    tensors: list[Tensor] = [torch.full((512,), k, dtype=torch.uint8) for k in range(4)]
    copies = [staging.copy([t]) for t in tensors]
    assert staging.copy([tensors[0]])[1] is None
    for k in (1, 2):
        held = copies[k][1]
        assert held is not None
        held.retain()
        held.release()
        assert staging.taken_bytes == (4 - k + 1) * 512
        held.release()
    [[both], held] = staging.copy([torch.full((1024,), 9, dtype=torch.uint8)])
    assert held is not None
    assert both.sum() == 9 * 1024
    assert [int(copies[k][0][0][0]) for k in (0, 3)] == [0, 3]


@needs_cuda
def test_the_copy_does_not_wait_for_the_device() -> None:
    staging = HostStaging("cuda", 64 << 20)
    source = torch.arange(8 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(400_000_000)  # some .2 s of work ahead of the copy
    start, end = torch.cuda.Event(), torch.cuda.Event()
    start.record()
    [[host], held] = staging.copy([source])
    end.record()
    assert held is not None
    assert not start.query(), "the host waited for the device"
    held.wait()
    assert torch.equal(host, source.cpu())
