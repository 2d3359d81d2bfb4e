"""A shard gives back exactly what it was built from, slice by slice, or says that it is damaged."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from stored import WIDTHS, CountingFiles, equal, make_record
from tracefp4.guidance import GuidanceError, inspection, shards
from tracefp4.guidance.files import Files, open_files
from tracefp4.guidance.shards import ShardHeader, build_shard, read_header, read_sample, shard_name
from tracefp4.guidance.store import TrajectoryGuidance


def write(files: Files, records: dict[str, TrajectoryGuidance]) -> ShardHeader:
    files.create()
    shard = build_shard(list(records.items()))
    name = shard_name(1, "w", shard)
    files.publish(name, shard.parts)
    return read_header(files, name, files.sizes()[name])


@pytest.fixture(params=["folder", "file", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    urls = {"folder": f"{tmp_path}/s", "file": f"file://{tmp_path}/s", "memory": f"memory://{tmp_path}/s"}
    return open_files(urls[request.param])


SIZES = {"a": 5, "b/probe": 1, "none": 0, "chunk": 256, "chunk+1": 257, "long": 700}


def test_records_come_back_bit_for_bit(files: Files) -> None:
    records = {name: make_record(i, rows, pow2=i % 2 == 0) for i, (name, rows) in enumerate(SIZES.items())}
    header = write(files, records)
    assert list(header.samples) == list(SIZES)
    for name, record in records.items():
        assert equal(read_sample(files, header.name, header.samples[name]), record)


def test_slices_are_the_rows_and_layers_asked_for(files: Files) -> None:
    record = make_record(rows=700, layers=(2, 5, 6, 9))
    header = write(files, {"before": make_record(1), "s": record, "after": make_record(2)})
    entry = header.samples["s"]
    for rows in (None, (0, 700), (0, 256), (255, 257), (300, 301), (512, 700), (40, 40), (700, 700)):
        for layers in (None, [5], [9, 2], [2, 5, 6, 9], []):
            got = read_sample(files, header.name, entry, layers, rows)
            assert equal(got, record.select(layers, rows)), (rows, layers)
    with pytest.raises(GuidanceError, match=r"^rows: \[5, 701\) is no range of the record's 700 rows"):
        read_sample(files, header.name, entry, rows=(5, 701))
    with pytest.raises(GuidanceError, match=r"^layers: \[3\] were not recorded"):
        read_sample(files, header.name, entry, layers=[2, 3])


def test_a_slice_reads_its_chunks_and_no_more(files: Files) -> None:
    rows, layers = 1024, (0, 1, 2, 3)
    header = write(files, {f"s{i}": make_record(i, rows, layers) for i in range(3)})
    entry = header.samples["s1"]
    row_bytes = sum(WIDTHS.values()) + 1  # and the exponent byte of expert_input's scale
    meta = 8 * (4 * len(layers) * 4) + 8 * rows + rows // 8
    for picked, span, chunks in (([2], (300, 310), 1), ([0, 3], (0, 512), 2), (None, None, 4)):
        counting = CountingFiles(files)
        read_sample(counting, header.name, entry, picked, span)
        n = len(layers if picked is None else picked)
        assert counting.bytes_read == meta + n * chunks * 256 * row_bytes


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    records = {"x": make_record(1, rows=7), "y": make_record(2, rows=300, pow2=False)}
    header = write(open_files(str(tmp_path)), records)
    with safe_open(tmp_path / header.name, "pt") as f:
        for name, record in records.items():
            for site in WIDTHS:
                assert torch.equal(f.get_tensor(f"{name}/{site}"), record.sites[site].payload)
            assert torch.equal(f.get_tensor(f"{name}/rows"), torch.stack([record.token_ids, record.versions]))
        assert torch.equal(f.get_tensor("y/expert_input.scale"), records["y"].sites["expert_input"].encode_scale)
        exponents = f.get_tensor("x/expert_input.scale").to(torch.int32)
        assert torch.equal(torch.exp2(exponents.float() - 127), records["x"].sites["expert_input"].encode_scale)


def test_scales_that_are_no_powers_of_two_keep_every_bit(files: Files) -> None:
    odd = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]] * 2)
    for values in (odd, odd * 0, -torch.ones(2, 5), torch.full((2, 5), 1e-40), torch.full((2, 5), torch.inf)):
        record = make_record()
        record.sites["expert_input"] = replace(record.sites["expert_input"], encode_scale=values)
        header = write(files, {"s": record})
        assert equal(read_sample(files, header.name, header.samples["s"]), record)
        files.remove(header.name)


@pytest.mark.parametrize("layers", [20, 40])
@pytest.mark.parametrize("rows", [1024, 4096])
def test_overhead_is_at_most_3_percent(tmp_path: Path, layers: int, rows: int) -> None:
    """Hidden 2048 at 1.125 bits; K and V of 2 heads x 256. Without K and V the scales weigh most."""
    for widths in ({"expert_input": 288, "key": 72, "value": 72}, {"expert_input": 288}):
        for pow2 in (True, False):
            record = make_record(rows=rows, layers=tuple(range(layers)), widths=dict.fromkeys(widths, 1), pow2=pow2)
            for site, width in widths.items():
                payload = torch.zeros(layers, rows, width, dtype=torch.uint8)
                record.sites[site] = replace(record.sites[site], payload=payload)
            header = write(open_files(str(tmp_path)), {"s": record})
            size = (tmp_path / header.name).stat().st_size
            packed = layers * rows * sum(widths.values())
            assert 0 < size - packed <= (0.03 if not pow2 else 0.012) * packed
            (tmp_path / header.name).unlink()


# -- damage -------------------------------------------------------------------------------------------------------


def regions(header: ShardHeader) -> list[tuple[int, str, str, int, int]]:
    """(first byte, kind, sample, layer, chunk) of every part of a shard that has a checksum, in order."""
    out = [(0, "header", "", -1, -1)]
    for entry in header.samples.values():
        count = len(entry.planes) * len(entry.layers) * entry.chunks
        at = entry.meta[0]
        starts = {"checksums": at, "token_ids": at + 8 * count, "versions": at + 8 * count + 4 * entry.rows}
        starts["valid"] = at + 8 * count + 8 * entry.rows
        out += [(start, kind, entry.sample_id, -1, -1) for kind, start in starts.items()]
        for plane in entry.planes:
            kind = "scales" if plane.is_scale else "payload"
            for g, layer in enumerate(entry.layers):
                for c in range(entry.chunks):
                    first = plane.offset + (g * entry.rows + c * entry.chunk_rows) * plane.row_bytes
                    out.append((first, kind, entry.sample_id, layer, c))
    return sorted(out)


def reads(files: Files, header: ShardHeader, sample: str, layer: int, chunk: int) -> bool:
    """Whether a slice of one layer and one chunk is read without complaint."""
    entry = header.samples[sample]
    start = chunk * entry.chunk_rows
    try:
        read_sample(files, header.name, entry, [layer], (start, min(start + 1, entry.rows)))
    except GuidanceError as error:
        return not str(error).startswith("checksum: ")
    return True


def test_any_flipped_bit_is_found_by_verify_and_by_a_slice_that_touches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK_ROWS", 2)
    files = open_files(str(tmp_path))
    header = write(files, {"a": make_record(1), "b": make_record(2, pow2=False)})
    path = tmp_path / header.name
    whole = path.read_bytes()
    parts = regions(header)
    rng, hit = random.Random(0), set()
    spots = [rng.choice(parts)[0] for _ in range(500)] + [rng.randrange(len(whole)) for _ in range(2500)]
    for i, byte in enumerate(spots):
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        _, kind, sample, layer, chunk = max(p for p in parts if p[0] <= byte)
        hit.add(kind)
        found = inspection.verify(str(tmp_path))["damaged"]
        assert [d["sample"] for d in found] == [None if kind == "header" else sample], (byte, kind)
        if kind == "header":
            with pytest.raises(GuidanceError, match=r"^checksum: "):
                read_header(files, header.name, len(whole))
        elif layer < 0:
            assert not reads(files, header, sample, 1, 0)
        else:
            assert not reads(files, header, sample, layer, chunk)
            if i % 8 == 0:  # what is not touched is not in doubt
                assert reads(files, header, sample, 1 if layer == 3 else 3, chunk)
                assert reads(files, header, sample, layer, (chunk + 1) % 3)
    assert hit == {"header", "checksums", "token_ids", "versions", "valid", "scales", "payload"}


def test_a_shard_that_is_cut_off_or_too_long_is_damaged(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    header = write(files, {"a": make_record(1)})
    path = tmp_path / header.name
    whole = path.read_bytes()
    for size in (0, 5, header.header_bytes - 1, header.header_bytes, len(whole) - 1, len(whole) + 1):
        path.write_bytes((whole + b"\0")[:size])
        with pytest.raises(GuidanceError, match=r"^checksum: "):
            read_header(files, header.name, size)
        if size < len(whole):  # cut after its header was read
            with pytest.raises(GuidanceError, match=r"^checksum: .* is cut off"):
                read_sample(files, header.name, header.samples["a"])


@pytest.mark.parametrize("bad", ["", "a\nb"])
def test_ids_and_tensors_that_no_shard_can_hold_are_refused(bad: str) -> None:
    with pytest.raises(GuidanceError, match="is no sample id"):
        shards.check_record(bad, make_record())
    record = make_record()
    with pytest.raises(GuidanceError, match=r"expected torch.int32 \[5\], got torch.int64"):
        shards.check_record("s", replace(record, token_ids=record.token_ids.long()))
    record.sites["key"] = replace(record.sites["key"], encode_scale=torch.ones(3))
    with pytest.raises(GuidanceError, match=r"key: encode scales must be float32 \[\] or \[2, 5\]"):
        shards.check_record("s", record)
