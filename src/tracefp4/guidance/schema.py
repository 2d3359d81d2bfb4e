"""The guidance record: what the rollout keeps about the slots it picked, its bit layout and its stored bytes.

A record holds, for every row (one token at one site), a few planes of bits. Planes are least significant bit
first and each is padded to a byte; the planes of a row follow one another, so a row is contiguous and rows
can be sliced or appended without touching others:

    code planes    plane 0 is the lowest mantissa bit (code & 1); at full width all bits of the code; none where only
                   scales are recorded
    choice plane   4over6 at 1.125 bits only: 1 where the block's maximum was mapped to 4, and where its scale
                   byte is 0x7E (there both choices resolve alike, see `codec.pack_rows`)
    scale planes   the 1, 2 or 8 lowest bits of each block's scale byte, lowest bit first
"""

import functools
import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import TracefpError
from tracefp4.formats import FormatError, get_format

FORMAT_VERSION = 1
MAGIC = b"TRFP4GD\x00"

# Bits per value each family of formats can be recorded with, widest first.
SUPPORTED_BITS: dict[str, tuple[float, ...]] = {
    "nvfp4-4over6": (4.5, 1.5, 1.125),
    "nvfp4": (4.5, 1.5, 1.125, 1.0625, 0.5, 0.125),
    "mxfp4": (4.25, 1.25, 1.03125, 0.25, 0.03125),
    "mxfp8": (8.25, 1.25, 1.03125, 0.25, 0.03125),
}

# magic, format version, kind of encode scale, header length, total length of the record
_PREFIX = struct.Struct("<8sHHIQ")
_CRC = struct.Struct("<I")
_SCALE_KINDS = ("none", "tensor", "row")


class GuidanceError(TracefpError, ValueError):
    """A guidance record that is damaged, unsupported, or does not belong to what it is used with."""


@dataclass(frozen=True)
class PlaneLayout:
    """How many bits of each kind a record keeps: per value, per block, and per block's scale byte. Without code bits
    the trainer rounds to nearest at the rollout's scales (an ablation: what the scales alone are worth)."""

    code_bits: int
    choice_bits: int
    scale_bits: int

    def plane_bytes(self, k: int, block_size: int) -> tuple[int, int]:
        """Bytes of one code plane and of one block plane for a row of `k` values."""
        return -(-k // 8), -(-(k // block_size) // 8)

    def row_bytes(self, k: int, block_size: int) -> int:
        """Bytes of one row of `k` values."""
        code_plane, block_plane = self.plane_bytes(k, block_size)
        return self.code_bits * code_plane + (self.choice_bits + self.scale_bits) * block_plane


def format_family(format: str) -> str:
    """Key of `SUPPORTED_BITS` for a format name. Raises GuidanceError for a name of no known family."""
    for family in SUPPORTED_BITS:  # the longer name comes first
        if format == family or format.startswith(family + "-"):
            return family
    raise GuidanceError(f"no guidance is defined for format {format!r}; families: {sorted(SUPPORTED_BITS)}")


def full_bits(format: str) -> float:
    """Bits per value of a record that keeps the codes and scale bytes whole."""
    return SUPPORTED_BITS[format_family(format)][0]


def site_bits(format: str, bits: float) -> float:
    """Bits per value at a site of a record of this width: a record of whole codes keeps those of each site's format."""
    return full_bits(format) if bits > 4 else bits


def plane_layout(format: str, bits: float) -> PlaneLayout:
    """Planes of a (format, bits) pair. Raises GuidanceError that lists the valid widths otherwise.

    `bits` = code bits + (choice bits + scale bits) / block size.
    """
    family = format_family(format)
    if bits not in SUPPORTED_BITS[family]:
        valid = ", ".join(f"{width:g}" for width in SUPPORTED_BITS[family])
        raise GuidanceError(f"{bits!r} bits per value is no width of {format!r}; valid widths: {valid}")
    whole = 8 if family == "mxfp8" else 4
    code_bits = whole if bits > 4 else int(bits >= 1)
    block_size = 32 if family.startswith("mx") else 16
    block_bits = round((bits - code_bits) * block_size)
    choice_bits = 1 if family == "nvfp4-4over6" and block_bits < 8 else 0
    return PlaneLayout(code_bits, choice_bits, block_bits - choice_bits)


def row_bytes(format: str, bits: float, k: int) -> int:
    """Payload bytes of a row of `k` values. Raises GuidanceError for an unsupported pair or a ragged row."""
    layout = plane_layout(format, bits)
    block_size = _block_size(format)
    if k <= 0 or k % block_size:
        raise GuidanceError(f"a row of {k} values is not a whole number of blocks of {block_size} ({format})")
    return layout.row_bytes(k, block_size)


def _block_size(format: str) -> int:
    try:
        return get_format(format).block_size
    except FormatError as error:
        raise GuidanceError(str(error)) from error


@dataclass(frozen=True)
class GuidanceHeader:
    """What a record is about; equal headers mean interchangeable rows.

    recipe_hash  hash of the QuantRecipe both paths must hold; "" when none is used
    format       name of the format, e.g. "nvfp4"
    bits         guidance bits per value, one of SUPPORTED_BITS
    shape        shape of the quantized tensor, blocks along the last axis
    block_size   values per scale: 16 (NVFP4) or 32 (MX)
    """

    recipe_hash: str
    format: str
    bits: float
    shape: tuple[int, ...]
    block_size: int
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise GuidanceError(f"guidance version {self.format_version} is unknown, not {FORMAT_VERSION}")
        if not self.shape or any(size < 0 for size in self.shape):
            raise GuidanceError(f"shape {self.shape} is no shape of a quantized tensor")
        row_bytes(self.format, self.bits, self.k)
        if self.block_size != _block_size(self.format):
            raise GuidanceError(f"block size {self.block_size} is not that of {self.format!r}")

    @property
    def k(self) -> int:
        """Values per row."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Number of rows: the product of all axes but the last."""
        return math.prod(self.shape[:-1])

    @property
    def layout(self) -> PlaneLayout:
        return plane_layout(self.format, self.bits)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "GuidanceHeader":
        """Inverse of `to_json`. Raises GuidanceError for anything that is not a complete header."""
        try:
            fields: dict[str, Any] = json.loads(data)
            fields["shape"] = tuple(int(size) for size in fields["shape"])
            return cls(**fields)
        except GuidanceError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise GuidanceError(f"guidance header cannot be read: {error}") from error


@dataclass(frozen=True, eq=False)
class CompactGuidance:
    """One record: the packed bits of `rows` rows of one site.

    header        GuidanceHeader
    payload       uint8 [rows, row_bytes], the planes described at the top of this file
    encode_scale  f32 [] (static), f32 [rows, 1] (per row) or None (MX formats): the rollout's S
    valid         bool [rows]; False where the rollout has no usable row (the trainer rounds that row itself)
    stale         bool [rows], or None for nowhere: rows recorded under an older policy version than the trainer's (all
                  updates of a step have one), which follow their record within a `band` only. Set by the trainer; it
                  is not part of the stored bytes

    Example: 3 tokens of hidden 2048 in nvfp4 at 1.125 bits: payload uint8 [3, 288], per row 256 bytes of
    mantissa bits, 16 bytes of scale bit 0 and 16 bytes of scale bit 1.
    """

    header: GuidanceHeader
    payload: Tensor
    encode_scale: Tensor | None
    valid: Tensor
    stale: Tensor | None = None

    def __post_init__(self) -> None:
        rows, width = self.header.rows, self.row_bytes
        _check_tensor("payload", self.payload, torch.uint8, [(rows, width)])
        _check_tensor("valid", self.valid, torch.bool, [(rows,)])
        if self.stale is not None:
            _check_tensor("stale", self.stale, torch.bool, [(rows,)])
        scale, mx = self.encode_scale, format_family(self.header.format).startswith("mx")
        if (scale is None) != mx:
            raise GuidanceError(f"{self.header.format!r} {'takes no' if mx else 'needs an'} encode scale")
        if scale is not None:
            _check_tensor("encode scale", scale, torch.float32, [(), (rows, 1)])

    @property
    def rows(self) -> int:
        return self.header.rows

    @property
    def row_bytes(self) -> int:
        """Payload bytes of one row."""
        return self.header.layout.row_bytes(self.header.k, self.header.block_size)

    @property
    def nbytes(self) -> int:
        """Stored bytes, `len(self.to_bytes())`: with header, encode scales, valid bits and checksum."""
        scale_bytes = 0 if self.encode_scale is None else 4 * self.encode_scale.numel()
        body = self.rows * self.row_bytes + scale_bytes + -(-self.rows // 8)
        return _PREFIX.size + len(self.header.to_json()) + body + _CRC.size

    def select(self, rows_index: Tensor | slice | Sequence[int]) -> "CompactGuidance":
        """The record of some rows, in the given order; its shape is [selected rows, K].

        `rows_index`: a slice, integer tensor, boolean tensor [rows], or a list of row numbers. Raises
        IndexError for a row that does not exist.
        """
        if not isinstance(rows_index, slice | Tensor):
            rows_index = torch.tensor(list(rows_index), dtype=torch.long)
        if isinstance(rows_index, Tensor):
            rows_index = rows_index.to(self.payload.device)
        payload = self.payload[rows_index]
        scale = self.encode_scale
        return CompactGuidance(
            header=replace(self.header, shape=(payload.shape[0], self.header.k)),
            payload=payload,
            encode_scale=scale if scale is None or scale.ndim == 0 else scale[rows_index],
            valid=self.valid[rows_index],
            stale=None if self.stale is None else self.stale[rows_index],
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "CompactGuidance":
        """The same record with its tensors on another device."""
        scale = self.encode_scale
        return replace(
            self,
            payload=self.payload.to(device, non_blocking=non_blocking),
            encode_scale=None if scale is None else scale.to(device, non_blocking=non_blocking),
            valid=self.valid.to(device, non_blocking=non_blocking),
            stale=None if self.stale is None else self.stale.to(device, non_blocking=non_blocking),
        )

    def to_bytes(self) -> bytes:
        """Little endian: prefix, JSON header, encode scales, payload, valid bits, CRC32 of all before it."""
        scale = self.encode_scale
        kind = 0 if scale is None else 1 if scale.ndim == 0 else 2
        header = self.header.to_json()
        parts = [
            _PREFIX.pack(MAGIC, self.header.format_version, kind, len(header), self.nbytes),
            header,
            b"" if scale is None else _raw(scale),
            _raw(self.payload),
            _raw(pack_bits(self.valid.to(torch.uint8)[None])),
        ]
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        return b"".join([*parts, _CRC.pack(crc)])

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "CompactGuidance":
        """Inverse of `to_bytes`, on the CPU.

        Raises GuidanceError naming the fault for bytes that are no record, are cut off or too long, have an
        unknown version, or do not match their checksum; no damaged record is ever returned.
        """
        view = memoryview(data).cast("B")
        kind, header_bytes = _check_envelope(view)
        start = _PREFIX.size + header_bytes
        header = GuidanceHeader.from_json(bytes(view[_PREFIX.size : start]))
        rows, width = header.rows, header.layout.row_bytes(header.k, header.block_size)
        scale_bytes = 4 * (0, 1, rows)[kind]
        ends = [start + scale_bytes]
        ends.append(ends[-1] + rows * width)
        ends.append(ends[-1] + -(-rows // 8))
        if ends[-1] + _CRC.size != len(view):
            raise GuidanceError(f"header describes {ends[-1] + _CRC.size} bytes, the record has {len(view)}")
        scale = None if kind == 0 else _tensor(view[start : ends[0]], torch.float32)
        valid = unpack_bits(_tensor(view[ends[1] : ends[2]], torch.uint8)[None], rows)[0]
        return cls(
            header=header,
            payload=_tensor(view[ends[0] : ends[1]], torch.uint8).reshape(rows, width),
            encode_scale=None if scale is None else scale.reshape(() if kind == 1 else (rows, 1)),
            valid=valid.to(torch.bool),
        )


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise GuidanceError(f"{name} must be {dtype} {wanted}, got {tensor.dtype} {list(tensor.shape)}")


def _check_envelope(view: memoryview) -> tuple[int, int]:
    """Check magic, version, length and checksum; return (kind of encode scale, header length)."""
    if len(view) < _PREFIX.size + _CRC.size:
        raise GuidanceError(f"guidance record is truncated: {len(view)} bytes hold no header")
    magic, version, kind, header_bytes, total = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise GuidanceError(f"not a guidance record: it starts with {magic!r}, not {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise GuidanceError(f"guidance version {version} is unknown; this is {FORMAT_VERSION}")
    if len(view) != total:
        state = "truncated" if len(view) < total else "too long"
        raise GuidanceError(f"guidance record is {state}: {len(view)} bytes, its prefix says {total}")
    (stored,) = _CRC.unpack_from(view, total - _CRC.size)
    computed = zlib.crc32(view[: total - _CRC.size])
    if stored != computed:
        raise GuidanceError(f"guidance record is damaged: CRC32 {computed:#010x}, stored {stored:#010x}")
    if kind >= len(_SCALE_KINDS) or _PREFIX.size + header_bytes + _CRC.size > total:
        raise GuidanceError(f"guidance prefix is invalid: scale kind {kind}, header of {header_bytes} bytes")
    return kind, header_bytes


def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor of its own memory; torch.frombuffer refuses an empty buffer."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


@functools.cache
def _bit_numbers(device: torch.device) -> Tensor:
    """uint8 [8]: 0..7. Kept per device: a copy from the host at every call would stall a CUDA stream."""
    with torch.inference_mode(False):
        return torch.arange(8, dtype=torch.uint8, device=device)


def pack_bits(bits: Tensor) -> Tensor:
    """uint8 [rows, n] of 0 and 1 -> uint8 [rows, ceil(n / 8)], lowest bit first, padded with zeros."""
    rows, n = bits.shape
    pad = -n % 8
    if pad:
        bits = torch.nn.functional.pad(bits, (0, pad))
    shifted = bits.reshape(rows, (n + pad) // 8, 8) << _bit_numbers(bits.device)
    return shifted.sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """Inverse of `pack_bits`: uint8 [rows, ceil(n / 8)] -> uint8 [rows, n] of 0 and 1."""
    bits = (packed[..., None] >> _bit_numbers(packed.device)) & 1
    return bits.reshape(packed.shape[0], packed.shape[1] * 8)[:, :n]
