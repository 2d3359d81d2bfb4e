"""The container: an immutable file of several records, readable slice by slice, every byte under a checksum.

A shard is a valid safetensors file. After its header come, per sample ``s`` of R rows and G layers,

    s/checksums     U64 [n]       XXH3-64 of every chunk: of each plane in order, layer by layer, CHUNK_ROWS rows each
    s/rows          I32 [2, R]    token ids, policy versions
    s/valid         U8 [...]      one bit per row, lowest first, padded with zeros to 8 bytes
    s/<site>        U8 [G, R, W]  the packed rows
    s/<site>.scale  F32 [G, R]    encode scales; U8 where all are powers of two: the exponent byte of the float

Checksums, rows and valid bits of a sample are neighbours, its *meta*, and have one checksum in the header. The
header's own checksum and length are in the file's name. So a read checks downward from the name: header, meta, chunk,
and reads no chunk that it does not need. Metas come first and planes of floats before planes of bytes, so that every
tensor is aligned to its element.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest as checksum

from tracefp4.guidance.files import Files, Range
from tracefp4.guidance.memory import PagePool
from tracefp4.guidance.schema import GuidanceError, pack_bits, unpack_bits
from tracefp4.guidance.store import SiteRows, TrajectoryGuidance, check_rows, layer_index

SHARD_VERSION = 1
CHUNK_ROWS = 256
SUFFIX = ".safetensors"

_ITEM_BYTES = {"U8": 1, "F32": 4}
_MAX_HEADER = 1 << 30
_POOL = PagePool()
_NAME = re.compile(r"(\d{16})-([0-9a-z]+)-([0-9a-f]{6,})-([0-9a-f]{16})" + re.escape(SUFFIX))

if sys.byteorder != "little":
    raise ImportError("guidance shards are written and read on little-endian machines only")


@dataclass(frozen=True)
class Plane:
    """One tensor [G, R, ...] of a sample: its name, the bytes of a row, and the offset in the file."""

    name: str
    dtype: str
    row_bytes: int
    offset: int

    @property
    def site(self) -> str:
        return self.name.removesuffix(".scale")

    @property
    def is_scale(self) -> bool:
        return self.name.endswith(".scale")


@dataclass(frozen=True)
class SampleEntry:
    """What the header says of one sample. meta: offset in the file and bytes; versions: lowest and highest of its rows.

    scales: per site "row" where a plane holds them, else the static scale or None (MX formats).
    """

    sample_id: str
    rows: int
    recipe_hash: str
    bits: float
    layers: tuple[int, ...]
    scales: dict[str, float | str | None]
    versions: tuple[int, int]
    meta: tuple[int, int]
    meta_checksum: int
    planes: tuple[Plane, ...]
    chunk_rows: int

    @property
    def chunks(self) -> int:
        """Chunks of one layer of one plane."""
        return -(-self.rows // self.chunk_rows)

    def payload_bytes(self, site: str) -> int:
        """Packed rows of one site, without scales."""
        return sum(len(self.layers) * self.rows * p.row_bytes for p in self.planes if p.name == site)


@dataclass(frozen=True)
class ShardHeader:
    """A shard as its checked header describes it. max_version: the highest policy version of any row."""

    name: str
    header_bytes: int
    file_bytes: int
    samples: dict[str, SampleEntry]

    @property
    def max_version(self) -> int:
        return max((s.versions[1] for s in self.samples.values()), default=-1)


@dataclass(frozen=True)
class Shard:
    """A shard about to be written: its header's bytes, then the data."""

    header: bytes
    data: list[memoryview]
    header_checksum: int

    @property
    def parts(self) -> list[memoryview]:
        return [memoryview(self.header), *self.data]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(len(part) for part in self.data)


def shard_name(microseconds: int, writer: str, shard: Shard) -> str:
    """Sorts by time; carries the header's length and checksum."""
    return f"{microseconds:016d}-{writer}-{len(shard.header):06x}-{shard.header_checksum:016x}{SUFFIX}"


def is_shard(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def shard_time(name: str) -> float:
    """Seconds since the epoch at which a shard was written, by its writer's clock."""
    found = _NAME.fullmatch(name)
    return int(found[1]) / 1e6 if found else math.nan


def oldest_beyond(sizes: dict[str, int], keep_bytes: int) -> list[str]:
    """Of files and their bytes, the oldest shards beyond keep_bytes; never the newest one."""
    names = sorted(name for name in sizes if is_shard(name))
    total, gone = sum(sizes[name] for name in names), []
    for name in names[:-1]:
        if total <= keep_bytes:
            break
        total -= sizes[name]
        gone.append(name)
    return gone


# --- writing -------------------------------------------------------------


def check_record(sample_id: str, record: TrajectoryGuidance) -> None:
    """Raises GuidanceError for what no shard can hold, before it is queued."""
    if not sample_id or "\n" in sample_id:
        raise GuidanceError(f"{sample_id!r} is no sample id")
    G, R = len(record.layers), record.rows
    for tensor, dtype in ((record.token_ids, torch.int32), (record.versions, torch.int32), (record.valid, torch.bool)):
        if tensor.dtype != dtype or tensor.shape != (R,):
            raise GuidanceError(f"sample {sample_id}: expected {dtype} [{R}], got {tensor.dtype} {list(tensor.shape)}")
    for site, data in record.sites.items():
        if "/" in site or "." in site or site in ("checksums", "rows", "valid"):
            raise GuidanceError(f"{site!r} cannot be the name of a site")
        scale = data.encode_scale
        if data.payload.dtype != torch.uint8 or data.payload.ndim != 3:
            raise GuidanceError(f"sample {sample_id}, {site}: the payload must be uint8 [layers, rows, bytes]")
        if scale is not None and (scale.dtype != torch.float32 or scale.shape not in ((), (G, R))):
            raise GuidanceError(f"sample {sample_id}, {site}: encode scales must be float32 [] or [{G}, {R}]")


def build_shard(records: Sequence[tuple[str, TrajectoryGuidance]]) -> Shard:
    """Checksums and lays out records of different ids; their tensors are not copied."""
    sources = [_Source(sample_id, record) for sample_id, record in records]
    tensors: dict[str, dict[str, Any]] = {}
    data: list[memoryview] = []
    at = 0

    def place(name: str, dtype: str, array: npt.NDArray[Any]) -> None:
        nonlocal at
        tensors[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        data.append(_bytes(array))
        at += array.nbytes

    for source in sources:
        for name, dtype, array in source.meta:
            place(f"{source.id}/{name}", dtype, array)
    for wanted in ("F32", "U8"):
        for source in sources:
            for name, dtype, array in source.planes:
                if dtype == wanted:
                    place(f"{source.id}/{name}", dtype, array)
    about = {"shard_version": SHARD_VERSION, "chunk_rows": CHUNK_ROWS, "samples": [s.about for s in sources]}
    metadata = {"tracefp4.guidance": json.dumps(about, separators=(",", ":"))}
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Shard(header, data, checksum(header))


class _Source:
    """One record as arrays: planes with float ones first, and the meta that checks them."""

    def __init__(self, sample_id: str, record: TrajectoryGuidance) -> None:
        self.id = sample_id
        planes: list[tuple[str, str, npt.NDArray[Any]]] = []
        scales: dict[str, float | str | None] = {}
        for site, data in record.sites.items():
            planes.append((site, "U8", data.payload.contiguous().numpy()))
            scale = data.encode_scale
            scales[site] = None if scale is None else "row" if scale.ndim else float(scale)
            if scale is not None and scale.ndim:
                planes.append((f"{site}.scale", *_scale_plane(scale)))
        self.planes = sorted(planes, key=lambda plane: plane[1] != "F32")
        sums = [_chunk_checksums(array, CHUNK_ROWS) for _, _, array in self.planes]
        valid = torch.nn.functional.pad(record.valid.to(torch.uint8), (0, -record.rows % 64))
        self.meta: list[tuple[str, str, npt.NDArray[Any]]] = [
            ("checksums", "U64", np.array([s for plane in sums for s in plane], dtype=np.uint64)),
            ("rows", "I32", torch.stack([record.token_ids, record.versions]).numpy()),
            ("valid", "U8", pack_bits(valid[None])[0].numpy()),
        ]
        versions = (int(record.versions.min()), int(record.versions.max())) if record.rows else (-1, -1)
        self.about = {
            "id": sample_id,
            "rows": record.rows,
            "recipe_hash": record.recipe_hash,
            "bits": record.bits,
            "layers": list(record.layers),
            "scales": scales,
            "versions": versions,
            "planes": [name for name, _, _ in self.planes],
            "meta": f"{checksum(b''.join(_bytes(array) for _, _, array in self.meta)):016x}",
        }


def _scale_plane(scale: Tensor) -> tuple[str, npt.NDArray[Any]]:
    """F32 [G, R], or U8 [G, R] where every scale is a normal power of two: bits 23..30 of the float."""
    bits = scale.contiguous().numpy().view(np.uint32)
    exponent = bits >> 23
    if not (bits & 0x7FFFFF).any() and ((exponent > 0) & (exponent < 255)).all():
        return "U8", exponent.astype(np.uint8)
    return "F32", bits.view(np.float32)


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _chunk_checksums(array: npt.NDArray[Any], chunk_rows: int) -> list[int]:
    """Of [G, R, ...]: checksums of chunk_rows rows each, layer by layer."""
    G, R = array.shape[:2]
    data = _bytes(array)
    layer = array.nbytes // G if G else 0
    step = chunk_rows * (layer // R if R else 0)
    return [
        checksum(data[at : min(at + step, end)])
        for end in range(layer, G * layer + 1, layer or 1)
        for at in range(end - layer, end, step or 1)
    ]


# --- reading -------------------------------------------------------------


def read_header(files: Files, name: str, file_bytes: int) -> ShardHeader:
    """The header of a shard of `file_bytes` bytes, checked against the shard's name.

    Raises GuidanceError ("checksum" first in its text) where it is damaged, OSError where it cannot be read.
    """
    found = _NAME.fullmatch(name)
    length = int(found[3], 16) if found else 0
    if length < 8 or length > min(file_bytes, _MAX_HEADER):
        raise GuidanceError(f"checksum: shard {name} is cut off within its header")
    buffer = bytearray(length)
    _fill_all(files, name, [(0, memoryview(buffer))])
    return parse_header(name, buffer, file_bytes)


def parse_header(name: str, header: bytes | bytearray, file_bytes: int) -> ShardHeader:
    """A header's bytes, checked against the shard's name. Raises GuidanceError ("checksum" first in its text)."""
    found = _NAME.fullmatch(name)
    if found is None or checksum(header) != int(found[4], 16):
        raise GuidanceError(f"checksum: the header of shard {name} is damaged")
    try:
        return _parse_header(name, bytes(header[8:]), len(header), file_bytes)
    except (ValueError, KeyError, TypeError) as error:
        raise GuidanceError(f"checksum: the header of shard {name} describes no guidance: {error}") from error


def _parse_header(name: str, text: bytes, length: int, file_bytes: int) -> ShardHeader:
    tensors = json.loads(text)
    about = json.loads(tensors.pop("__metadata__")["tracefp4.guidance"])
    if about["shard_version"] != SHARD_VERSION:
        raise ValueError(f"its version is {about['shard_version']}, this reads {SHARD_VERSION}")
    end = length + max((t["data_offsets"][1] for t in tensors.values()), default=0)
    if end != file_bytes:
        raise ValueError(f"the shard has {file_bytes} bytes, not {end}")
    samples = {}
    for s in about["samples"]:
        where = {p: tensors[f"{s['id']}/{p}"] for p in (*s["planes"], "checksums", "valid")}
        planes = []
        for plane in s["planes"]:
            dtype, shape = where[plane]["dtype"], where[plane]["shape"]
            row_bytes = math.prod(shape[2:]) * _ITEM_BYTES[dtype]
            planes.append(Plane(plane, dtype, row_bytes, length + where[plane]["data_offsets"][0]))
        meta_start, meta_stop = where["checksums"]["data_offsets"][0], where["valid"]["data_offsets"][1]
        samples[s["id"]] = SampleEntry(
            sample_id=s["id"],
            rows=s["rows"],
            recipe_hash=s["recipe_hash"],
            bits=s["bits"],
            layers=tuple(s["layers"]),
            scales=s["scales"],
            versions=(s["versions"][0], s["versions"][1]),
            meta=(length + meta_start, meta_stop - meta_start),
            meta_checksum=int(s["meta"], 16),
            planes=tuple(planes),
            chunk_rows=about["chunk_rows"],
        )
    return ShardHeader(name, length, file_bytes, samples)


def _fill_all(files: Files, name: str, ranges: Sequence[Range]) -> None:
    for _ in _fill(files, name, ranges):
        pass


def _fill(files: Files, name: str, ranges: Sequence[Range]) -> Iterator[int]:
    try:
        yield from files.fill(name, ranges)
    except EOFError:
        raise GuidanceError(f"checksum: shard {name} is cut off") from None


def read_sample(
    files: Files,
    name: str,
    entry: SampleEntry,
    layers: Sequence[int] | None = None,
    rows: tuple[int, int] | None = None,
) -> TrajectoryGuidance:
    """Layers (by number) and rows [start, stop) of a sample; whole chunks are read, and each is checked.

    Raises GuidanceError ("checksum", "rows" or "layers" first in its text), OSError where it cannot be read.
    """
    start, stop = check_rows(rows, entry.rows)
    index = layer_index(layers, entry.layers)
    sums, token_ids, versions, valid = _read_meta(files, name, entry)
    C = entry.chunk_rows
    first, last = start // C, -(-stop // C)
    begin, end = first * C, min(last * C, entry.rows)
    wanted = _Wanted(entry, index, begin, end)
    # In the order of the file, whatever the order of `layers`.
    order = sorted(range(len(wanted.ranges)), key=lambda i: wanted.ranges[i][0])
    for done in _fill(files, name, [wanted.ranges[i] for i in order]):
        plane, layer = divmod(order[done], max(len(index), 1))
        memory = wanted.ranges[order[done]][1]
        step = C * entry.planes[plane].row_bytes
        at = (plane * len(entry.layers) + index[layer]) * entry.chunks + first
        for k in range(last - first):
            if checksum(memory[k * step : (k + 1) * step]) != sums[at + k]:
                raise GuidanceError(
                    f"checksum: sample {entry.sample_id}, {entry.planes[plane].name} of layer "
                    f"{entry.layers[index[layer]]}, chunk {first + k} of shard {name} is damaged"
                )
    cut = slice(start - begin, stop - begin)
    return TrajectoryGuidance(
        recipe_hash=entry.recipe_hash,
        bits=entry.bits,
        layers=tuple(entry.layers[i] for i in index),
        sites={site: wanted.site(site, cut) for site in entry.scales},
        token_ids=token_ids[start:stop],
        versions=versions[start:stop],
        valid=valid[start:stop],
    )


def _read_meta(files: Files, name: str, entry: SampleEntry) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Checksums of the chunks, token ids int32 [R], versions int32 [R], valid bool [R]."""
    offset, nbytes = entry.meta
    buffer = bytearray(nbytes)
    _fill_all(files, name, [(offset, memoryview(buffer))])
    if checksum(buffer) != entry.meta_checksum:
        raise GuidanceError(f"checksum: token ids or checksums of sample {entry.sample_id} in shard {name} are damaged")
    count, R = len(entry.planes) * len(entry.layers) * entry.chunks, entry.rows
    sums = np.frombuffer(buffer, np.uint64, count).tolist()
    by_row = torch.from_numpy(np.frombuffer(buffer, np.int32, 2 * R, 8 * count).reshape(2, R))
    packed = torch.from_numpy(np.frombuffer(buffer, np.uint8, -1, 8 * count + 8 * R))
    return sums, by_row[0], by_row[1], unpack_bits(packed[None], R)[0].bool()


class _Wanted:
    """Memory for rows [begin, end) of some layers of every plane, and the ranges of the file that fill it."""

    def __init__(self, entry: SampleEntry, index: Sequence[int], begin: int, end: int) -> None:
        self._entry = entry
        self._parts: dict[str, tuple[Plane, npt.NDArray[np.uint8]]] = {}
        self.ranges: list[Range] = []
        rows = end - begin
        sizes = [len(index) * rows * plane.row_bytes for plane in entry.planes]
        memory = _POOL.allocate(sum(-(-size // 64) * 64 for size in sizes))
        at = 0
        for plane, size in zip(entry.planes, sizes, strict=True):
            array = memory[at : at + size].reshape(len(index), rows, plane.row_bytes)
            at += -(-size // 64) * 64
            self._parts[plane.name] = plane, array
            view = _bytes(array)
            width = rows * plane.row_bytes
            for k, i in enumerate(index):
                offset = plane.offset + (i * entry.rows + begin) * plane.row_bytes
                self.ranges.append((offset, view[k * width : (k + 1) * width]))

    def site(self, site: str, cut: slice) -> SiteRows:
        payload = torch.from_numpy(self._parts[site][1])[:, cut]
        kind = self._entry.scales[site]
        if not isinstance(kind, str):
            return SiteRows(payload, None if kind is None else torch.tensor(kind, dtype=torch.float32))
        plane, raw = self._parts[f"{site}.scale"]
        if plane.dtype == "F32":
            return SiteRows(payload, torch.from_numpy(raw.view(np.float32)[..., 0])[:, cut])
        bits = raw[..., 0].astype(np.uint32) << 23
        return SiteRows(payload, torch.from_numpy(bits.view(np.float32))[:, cut])
