"""One-pass quantization and recording against `tracefp4.formats` and `tracefp4.guidance`, bit for bit.

Under the interpreter unless there is a GPU (`python -m pytest tests/kernels` there).
"""

import pytest
import torch
from torch import Tensor

from tracefp4.formats import E2M1_VALUES, FormatError, QuantizedBlocks, decode_e4m3, get_format
from tracefp4.guidance import SUPPORTED_BITS, pack_rows, row_bytes
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.paged_attention import PagedCache
from tracefp4.kernels.quantize_record import RecordTarget, payload_rows, quantize_record, write_kv

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for Inf and NaN under the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("nvfp4", "nvfp4-exact")


def same(a: QuantizedBlocks, b: QuantizedBlocks) -> None:
    assert torch.equal(a.scales.cpu(), b.scales.cpu())
    assert torch.equal(a.codes.cpu(), b.codes.cpu())
    assert a.encode_scale is not None
    assert b.encode_scale is not None
    assert torch.equal(a.encode_scale.cpu(), b.encode_scale.cpu())


def on_both(x: Tensor, format: str, encode_scale: object) -> None:
    expected = get_format(format).quantize(x, encode_scale=encode_scale)  # type: ignore[arg-type]
    same(quantize_record(x.to(DEVICE), format, encode_scale, backend="triton"), expected)  # type: ignore[arg-type]


def awkward_rows(K: int) -> Tensor:
    """BF16 rows over all magnitudes, with zeros of both signs, subnormals, Inf and NaN."""
    g = torch.Generator().manual_seed(K)
    x = torch.randn(10, K, generator=g) * torch.tensor([1, 1e-3, 1e3, 1e-38, 3e38, 1, 1, 1, 1, 1])[:, None]
    x[5] = 0.0
    x[6] = -0.0
    x[7, ::3] = float("nan")
    x[8, 1], x[8, 2] = float("inf"), float("-inf")
    x[9] = torch.randn(K, generator=g).sign() * 2.0 ** torch.randint(-120, 120, (K,), generator=g)
    return x.bfloat16()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("encode_scale", ["row", "row-pow2", 1.0, 37.5])
@pytest.mark.parametrize("K", [16, 48, 2048])
def test_equals_the_format_bit_for_bit(K: int, encode_scale: object, format: str) -> None:
    on_both(awkward_rows(K), format, encode_scale)


@pytest.mark.parametrize("format", FORMATS)
def test_every_tie_at_every_scale(format: str) -> None:
    """A block per E4M3 byte whose values are all cell ends of the grid, their FP32 neighbours and grid values."""
    ends = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    z = torch.cat([ends, ends.nextafter(ends * 0), ends.nextafter(ends * 9), E2M1_VALUES[:8], E2M1_VALUES[8:]])
    z = torch.cat([z, -z[:21], torch.tensor([6.0] * 5)])  # 63 values
    sf = decode_e4m3(torch.arange(1, 127, dtype=torch.uint8))
    blocks = torch.nn.functional.pad(z, (0, 12)).view(5, 15)
    x = torch.cat([torch.full((5, 1), 6.0), blocks], 1)[None] * sf[:, None, None]  # the 6 fixes each block's scale
    on_both(x.reshape(9, 14 * 80), format, 1.0)


@pytest.mark.parametrize("format", FORMATS)
def test_every_scale_boundary(format: str) -> None:
    """Block maxima at, below and above every midpoint of two E4M3 values, and past 448."""
    sf = decode_e4m3(torch.arange(0, 127, dtype=torch.uint8))
    middle = (sf[1:] + sf[:-1]) / 2 * 6
    m = torch.cat(
        [middle, middle.nextafter(middle * 0), middle.nextafter(middle * 9), sf * 6, torch.tensor([2689.0, 1e9])]
    )
    m = torch.nn.functional.pad(m, (0, -m.numel() % 64))
    x = torch.zeros(m.numel(), 16)
    x[:, 3], x[:, 9] = m, -m / 3
    on_both(x.view(-1, 64 * 16), format, 1.0)


@pytest.mark.parametrize("bits", SUPPORTED_BITS["nvfp4"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("K", [16, 144, 512])
def test_the_record_is_the_codec_s(K: int, backend: str, bits: float) -> None:
    x = awkward_rows(K).to(DEVICE)
    slots = torch.tensor([3, 1, -1, 7, 0, 11, 5, -1, 9, 2], device=DEVICE)
    payload = torch.full((12, row_bytes("nvfp4", bits, K)), 0xFF, dtype=torch.uint8, device=DEVICE)
    scale = torch.full((12,), float("nan"), device=DEVICE)
    blocks = quantize_record(x, "nvfp4", "row", backend=backend, record=RecordTarget(payload, slots, bits, scale))
    expected = pack_rows(blocks, bits)
    assert torch.equal(payload_rows(blocks, bits), expected)
    kept = slots >= 0
    assert torch.equal(payload[slots[kept]], expected[kept])
    assert blocks.encode_scale is not None
    assert torch.equal(scale[slots[kept]], blocks.encode_scale.flatten()[kept])
    untouched = torch.ones(12, dtype=torch.bool, device=DEVICE).index_fill(0, slots[kept], False)
    assert (payload[untouched] == 0xFF).all()
    assert scale[untouched].isnan().all()


@pytest.mark.parametrize(("G", "D", "page"), [(1, 32, 16), (2, 64, 48), (3, 128, 16)])
@pytest.mark.parametrize("format", FORMATS)
def test_kv_lands_in_its_slots(format: str, G: int, D: int, page: int) -> None:
    g = torch.Generator().manual_seed(D)
    qkv = (torch.randn(5, 4 * G, D, generator=g) * 300).bfloat16().to(DEVICE)  # |x| above 2688 / S saturates
    k, v = qkv[:, 2 * G : 3 * G], qkv[:, 3 * G :]  # rows of a fused product are not contiguous
    slots = torch.tensor([0, page - 1, -1, 2 * page + 3, page], device=DEVICE)
    caches, payloads = [], []
    for backend in ("torch", "triton"):
        cache = PagedCache.empty(3, page, G, D, "nvfp4", DEVICE)
        for t in cache.tensors:
            t.fill_(-1 if t.dtype == torch.int32 else 0xFF)
        targets = [
            RecordTarget(
                torch.full((4, row_bytes(format, 1.125, G * D)), 0xEE, dtype=torch.uint8, device=DEVICE), at, 1.125
            )
            for at in (torch.tensor([2, 0, 3, -1, 1], device=DEVICE), torch.tensor([1, 2, -1, 3, 0], device=DEVICE))
        ]
        write_kv(
            k,
            v,
            cache,
            slots,
            backend=backend,
            format=format,
            encode_scales=(4.0, 9.5),
            records=(targets[0], targets[1]),
        )
        caches.append(cache)
        payloads.append([t.payload for t in targets])
    for a, b in zip(caches[0].tensors + payloads[0], caches[1].tensors + payloads[1], strict=True):
        assert torch.equal(a, b)
    rows, scales = caches[1].to_slots()
    expected = get_format(format).quantize(v.flatten(1).cpu(), encode_scale=9.5)
    assert torch.equal(rows[1, 2 * page + 3].cpu(), expected.codes[3])
    assert scales is not None
    assert torch.equal(scales[1, 2 * page + 3].cpu(), expected.scales[3])
    assert (scales[:, 1 : page - 1] == 0xFF).all()


def test_other_formats_are_the_reference() -> None:
    x = awkward_rows(64)[:3].to(DEVICE)
    a = quantize_record(x, "mxfp4-floor", None, backend="triton")
    assert torch.equal(a.codes, get_format("mxfp4-floor").quantize(x).codes)
    target = RecordTarget(torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), 1.25)
    with pytest.raises(KernelError, match="pack_rows"):
        quantize_record(x, "mxfp4-floor", None, backend="triton", record=target)


def test_bad_operands_are_refused_by_name() -> None:
    with pytest.raises(FormatError, match="multiple of the block size"):
        quantize_record(torch.ones(2, 24, device=DEVICE), "nvfp4", "row", backend="triton")
    with pytest.raises(KernelError, match="row-pow2"):
        quantize_record(torch.ones(2, 32, device=DEVICE), "nvfp4", "tensor", backend="triton")
    with pytest.raises(KernelError, match="contiguous rows"):
        quantize_record(torch.ones(32, 2, device=DEVICE).T, "nvfp4", "row", backend="triton")
    small = RecordTarget(torch.zeros(4, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), 1.125)
    with pytest.raises(KernelError, match=r"\[slots, 6\]"):
        quantize_record(torch.ones(2, 32, device=DEVICE), "nvfp4", "row", backend="triton", record=small)
    empty = quantize_record(torch.ones(0, 32, device=DEVICE), "nvfp4", "row", backend="triton")
    assert empty.codes.shape == (0, 16)
