"""The record itself: layout, sizes, selection, stored bytes and every way they can be damaged."""

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.formats import get_format, list_formats
from tracefp4.guidance import (
    SUPPORTED_BITS,
    CompactGuidance,
    GuidanceError,
    GuidanceHeader,
    encode,
    plane_layout,
    row_bytes,
)
from tracefp4.guidance.schema import format_family, pack_bits, unpack_bits

PAIRS = [(name, bits) for name in list_formats() for bits in SUPPORTED_BITS[format_family(name)]]


def make(name: str, bits: float, shape: tuple[int, ...], seed: int = 0, static: bool = False) -> CompactGuidance:
    generator = torch.Generator().manual_seed(seed)
    fmt = get_format(name)
    x = torch.randn(shape, generator=generator)
    if fmt.scale_kind == "e8m0":
        blocks = fmt.quantize(x, encode_scale=None)
    else:
        blocks = fmt.quantize(x, encode_scale=torch.tensor(500.0) if static else "row")
    rows = x[..., 0].numel()
    return encode(blocks, bits, "recipe", torch.arange(rows) % 3 != 1)


def same(a: CompactGuidance, b: CompactGuidance) -> bool:
    if (a.encode_scale is None) != (b.encode_scale is None):
        return False
    scales = a.encode_scale is None or torch.equal(a.encode_scale, b.encode_scale)
    tensors = torch.equal(a.payload, b.payload) and torch.equal(a.valid, b.valid)
    return a.header == b.header and tensors and scales


def resealed(data: bytearray) -> bytes:
    """The record with a checksum that fits its (changed) bytes."""
    return bytes(data[:-4]) + struct.pack("<I", zlib.crc32(data[:-4]))


@pytest.mark.parametrize(("name", "bits"), PAIRS)
def test_row_bytes_are_bits_per_value(name: str, bits: float) -> None:
    assert row_bytes(name, bits, 2048) * 8 == bits * 2048
    # 96 values: 6 (3) blocks, whose planes are padded to one byte each
    layout = plane_layout(name, bits)
    assert row_bytes(name, bits, 96) == layout.code_bits * 12 + layout.choice_bits + layout.scale_bits


def test_paper_and_design_sizes() -> None:
    assert row_bytes("nvfp4", 1.5, 2048) * 20 == 7680  # 7.5 KiB per token, 20 layers
    assert row_bytes("nvfp4", 1.125, 2048) * 20 == 5760  # 5.625 KiB
    assert row_bytes("nvfp4", 4.5, 2048) * 40 == 45 * 1024


@pytest.mark.parametrize(
    ("name", "bits", "valid"),
    [
        ("nvfp4", 2.0, "4.5, 1.5, 1.125, 1.0625, 0.5, 0.125"),
        ("nvfp4-exact", 1.25, "4.5, 1.5, 1.125, 1.0625, 0.5, 0.125"),
        ("nvfp4-4over6", 1.0625, "4.5, 1.5, 1.125"),
        ("mxfp4-rceil", 1.125, "4.25, 1.25, 1.03125, 0.25, 0.03125"),
        ("mxfp8-rceil", 4.25 + 8, "8.25, 1.25, 1.03125, 0.25, 0.03125"),
    ],
)
def test_unsupported_width_lists_the_valid_ones(name: str, bits: float, valid: str) -> None:
    with pytest.raises(GuidanceError, match=f"valid widths: {valid}$"):
        row_bytes(name, bits, 64)


def test_ragged_rows_and_unknown_formats_are_refused() -> None:
    with pytest.raises(GuidanceError, match="whole number of blocks of 16"):
        row_bytes("nvfp4", 1.125, 40)
    with pytest.raises(GuidanceError, match="no guidance is defined"):
        row_bytes("int4", 1.125, 64)
    with pytest.raises(GuidanceError, match="unknown format"):
        row_bytes("nvfp4-x", 1.125, 64)


def test_layout_by_hand() -> None:
    """One row of 32 values in nvfp4: 4 bytes of mantissa bits, then one byte per scale plane."""
    fmt = get_format("nvfp4")
    blocks = fmt.quantize(torch.linspace(-6, 6, 32)[None] * torch.tensor([1.0] * 16 + [0.3] * 16), "row")
    codes, scales = blocks.unpacked_codes()[0].tolist(), blocks.scales[0].tolist()
    mantissa = [sum((codes[8 * byte + i] & 1) << i for i in range(8)) for byte in range(4)]
    planes = [sum((scale >> bit & 1) << block for block, scale in enumerate(scales)) for bit in range(8)]
    assert encode(blocks, 1.0625).payload[0].tolist() == mantissa + planes[:1]
    assert encode(blocks, 1.125).payload[0].tolist() == mantissa + planes[:2]
    assert encode(blocks, 1.5).payload[0].tolist() == mantissa + planes
    full = [sum((codes[8 * byte + i] >> bit & 1) << i for i in range(8)) for bit in range(4) for byte in range(4)]
    assert encode(blocks, 4.5).payload[0].tolist() == full + planes


@given(rows=st.integers(0, 5), n=st.integers(1, 40), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_pack_bits_round_trip(rows: int, n: int, seed: int) -> None:
    bits = torch.randint(0, 2, (rows, n), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack_bits(bits)
    assert packed.shape == (rows, -(-n // 8))
    assert torch.equal(unpack_bits(packed, n), bits)


@given(
    pair=st.sampled_from(PAIRS),
    lead=st.lists(st.integers(0, 5), max_size=2),
    blocks=st.integers(1, 7),
    seed=st.integers(0, 2**16),
    static=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_bytes_round_trip(pair: tuple[str, float], lead: list[int], blocks: int, seed: int, static: bool) -> None:
    name, bits = pair
    record = make(name, bits, (*lead, blocks * get_format(name).block_size), seed, static)
    data = record.to_bytes()
    assert len(data) == record.nbytes
    assert same(CompactGuidance.from_bytes(data), record)
    assert CompactGuidance.from_bytes(bytearray(data)).to_bytes() == data


def test_overhead_of_a_trajectory_stays_below_3_percent() -> None:
    """Header, encode scales, valid bits and checksum of 512 rows of one site, against the payload."""
    record = make("nvfp4", 1.125, (512, 2048))
    assert record.nbytes <= 1.03 * record.payload.numel()


def test_every_flipped_bit_is_detected() -> None:
    data = make("nvfp4", 1.125, (3, 32)).to_bytes()
    for position in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(GuidanceError):
            CompactGuidance.from_bytes(damaged)


def test_every_truncation_and_any_tail_is_detected() -> None:
    data = make("mxfp4-even", 1.03125, (3, 64)).to_bytes()
    for length in range(len(data)):
        with pytest.raises(GuidanceError, match="truncated"):
            CompactGuidance.from_bytes(data[:length])
    with pytest.raises(GuidanceError, match="too long"):
        CompactGuidance.from_bytes(data + b"\x00")


def test_errors_name_the_fault() -> None:
    data = make("nvfp4", 1.5, (2, 16)).to_bytes()
    with pytest.raises(GuidanceError, match="not a guidance record"):
        CompactGuidance.from_bytes(b"PARQUET1" + data[8:])
    with pytest.raises(GuidanceError, match="version 9 is unknown"):
        CompactGuidance.from_bytes(data[:8] + struct.pack("<H", 9) + data[10:])
    with pytest.raises(GuidanceError, match="damaged: CRC32"):
        CompactGuidance.from_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])


def test_consistent_nonsense_is_refused_too() -> None:
    """Bytes whose checksum is right but whose header lies, as a faulty writer would leave them."""
    data = make("nvfp4", 1.5, (2, 16)).to_bytes()
    for old, new, message in [
        (b'"bits":1.5', b'"bits":1.7', "valid widths"),
        (b'"shape":[2,16]', b'"shape":[9,16]', "header describes"),
        (b'"nvfp4"', b'"nvfpX"', "no guidance is defined"),
        (b'"nvfp4"', b"1234567", "header cannot be read"),
        (b'"block_size":16', b'"block_size":32', "block size 32"),
        (b'"format_version":1', b'"format_version":2', "version 2 is unknown"),
        (b'"recipe_hash"', b'"recipe_hasH"', "header cannot be read"),
        (b'{"bits"', b'["bits"', "header cannot be read"),
    ]:
        assert data.count(old) == 1
        with pytest.raises(GuidanceError, match=message):
            CompactGuidance.from_bytes(resealed(bytearray(data.replace(old, new))))
    bad_kind = bytearray(data)
    bad_kind[10] = 7
    with pytest.raises(GuidanceError, match="scale kind 7"):
        CompactGuidance.from_bytes(resealed(bad_kind))


def test_select_by_slice_list_tensor_and_mask() -> None:
    record = make("nvfp4", 1.125, (2, 3, 48))
    for index in (slice(1, 4), [4, 0], torch.tensor([5, 5, 2]), torch.arange(6) % 2 == 0, []):
        chosen = record.select(index)
        rows = torch.arange(6)[torch.tensor(index, dtype=torch.long) if isinstance(index, list) else index]
        assert chosen.header.shape == (len(rows), 48)
        assert torch.equal(chosen.payload, record.payload[rows])
        assert torch.equal(chosen.valid, record.valid[rows])
        assert torch.equal(chosen.encode_scale, record.encode_scale[rows])
        assert same(CompactGuidance.from_bytes(chosen.to_bytes()), chosen)
    static = make("nvfp4", 1.125, (4, 48), static=True).select(slice(0, 2))
    assert static.encode_scale.ndim == 0
    with pytest.raises(IndexError):
        record.select([6])


def test_fields_must_fit_the_header() -> None:
    record = make("nvfp4", 1.125, (3, 32))
    header, payload, scale, valid = record.header, record.payload, record.encode_scale, record.valid
    for fields, message in [
        ((header, payload[:, :-1], scale, valid), "payload must be"),
        ((header, payload.to(torch.int32), scale, valid), "payload must be"),
        ((header, payload, scale, valid[:2]), "valid must be"),
        ((header, payload, scale.double(), valid), "encode scale must be"),
        ((header, payload, scale[:2], valid), "encode scale must be"),
        ((header, payload, None, valid), "needs an encode scale"),
    ]:
        with pytest.raises(GuidanceError, match=message):
            CompactGuidance(*fields)
    with pytest.raises(GuidanceError, match="no shape"):
        GuidanceHeader("", "nvfp4", 1.125, (), 16)
    mx = make("mxfp4-ceil", 1.25, (3, 32))
    with pytest.raises(GuidanceError, match="takes no encode scale"):
        CompactGuidance(mx.header, mx.payload, scale, mx.valid)
