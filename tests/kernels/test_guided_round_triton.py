"""Rounding with and without guidance in Triton against `guidance.decode` and `Format.dequantize`, bit for bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tracefp4.formats import E2M1_VALUES, decode_e4m3, get_format
from tracefp4.guidance import CompactGuidance, encode
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.guided_round import fake_quantize_rows, guided_round_rows
from tracefp4.nn.rounding import fake_quantize, guided_round

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for Inf and NaN under the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("nvfp4", "nvfp4-exact")
CODES = [("cell", 1.125), ("cell", 1.5), ("cell", 4.5), ("cell", 1.0625), ("bracket", 1.125), ("bracket", 4.5)]
CASES = [*CODES, ("cell", 0.5), ("cell", 0.125), ("bracket", 0.125)]  # the last: block scales alone


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    integers = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    a, b = a.cpu(), b.cpu()
    equal = (a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())  # signs of zeros count
    assert equal.all(), f"{int((~equal).sum())} of {a.numel()} values differ"


def pair(K: int, dtype: torch.dtype, noise: float) -> tuple[Tensor, Tensor]:
    """(rollout's x, trainer's x): rows of many sizes, zeros, infinities and NaN; the trainer's are a little off."""
    g = torch.Generator().manual_seed(K)
    x = torch.randn(12, K, generator=g) * torch.tensor([1, 1e-3, 1e3, 1e-38, 1e30, 1, 1, 1, 1, 1, 1, 1])[:, None]
    x[5], x[6] = 0.0, -0.0
    x[7, ::3] = float("nan")
    x[8, 1], x[8, 2] = float("inf"), float("-inf")
    x[9, : K // 2] *= 1e-6
    x[10] = torch.randn(K, generator=g).sign() * 2.0 ** torch.randint(-20, 20, (K,), generator=g)
    y = x * (1 + noise * torch.randn(12, K, generator=g))
    return x.to(dtype), y.to(dtype)


def on_both(y: Tensor, record: CompactGuidance, rule: str, own: Any, band: float | None = None) -> None:
    expected = guided_round(y, record, rule, own_encode_scale=own, band=band)
    assert record.encode_scale is not None
    got = guided_round_rows(
        y.to(DEVICE),
        record.payload.to(DEVICE),
        record.encode_scale.to(DEVICE),
        record.valid.to(DEVICE),
        record.header.format,
        record.header.bits,
        rule,
        own,
        band,
        None if record.stale is None else record.stale.to(DEVICE),
    )
    same(got, expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rule", "bits"), CASES)
@pytest.mark.parametrize(("K", "dtype"), [(48, torch.bfloat16), (512, torch.float32)])
def test_guided_rows_equal_the_codec(K: int, dtype: torch.dtype, rule: str, bits: float, format: str) -> None:
    valid = torch.ones(12, dtype=torch.bool)
    valid[[2, 5, 8, 11]] = False
    for noise, scale, own in ((0.02, "row", "row"), (0.2, 37.5, "row-pow2"), (0.0, "row-pow2", 5.0)):
        x, y = pair(K, dtype, noise)
        record = encode(get_format(format).quantize(x, encode_scale=scale), bits, valid=valid)
        on_both(y, record, rule, own)
        on_both(y, record, rule, own, 0.1)
        for stale in (torch.ones(12, dtype=torch.bool), torch.arange(12) % 3 > 0):
            on_both(y, replace(record, stale=stale), rule, own, 0.1)


@pytest.mark.parametrize("rule", ["cell", "bracket"])
@pytest.mark.parametrize("bits", [1.125, 4.5])
def test_every_threshold_at_many_scales(bits: float, rule: str) -> None:
    """z at cell ends, cell middles and grid values, one float below and above; both recorded bits for each."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 2.125, 4.25, 6.5])
    z = torch.cat([middles, E2M1_VALUES[:8]])
    z = torch.cat([z, z.nextafter(z * 0), z.nextafter(z * 2 + 1)])
    z = torch.cat([z, -z, z, -z])
    z = torch.nn.functional.pad(z, (0, -z.numel() % 15)).view(-1, 15)
    z = torch.cat([torch.full((z.shape[0], 1), 6.0), z], 1)
    sf = decode_e4m3(torch.arange(0x08, 0x7F, 7, dtype=torch.uint8))
    y = (z[None] * sf[:, None, None]).reshape(sf.numel(), -1)
    g = torch.Generator().manual_seed(0)
    blocks = get_format("nvfp4").quantize(y, encode_scale=1.0)
    blocks.codes.random_(0, 256, generator=g)  # any recorded bits
    for band in (None, 0.125, 0.25, 0.5):
        record = encode(blocks, bits)
        on_both(y, replace(record, stale=torch.ones(record.rows, dtype=torch.bool)), rule, "row", band)


def test_every_recorded_scale_at_every_unrounded_scale() -> None:
    """Low scale bits 0..3 against unrounded scales at, between and beside all E4M3 values."""
    ladder = decode_e4m3(torch.arange(0, 127, dtype=torch.uint8))
    middle = (ladder[1:] + ladder[:-1]) / 2
    u = torch.cat([ladder, middle, middle.nextafter(middle * 2), ladder.nextafter(ladder * 0), torch.tensor([500.0])])
    u = torch.nn.functional.pad(u, (0, -u.numel() % 32)).repeat(4)
    y = torch.zeros(u.numel(), 16)
    y[:, 0], y[:, 1] = u * 6, u * 2
    y = y.view(-1, 32 * 16)
    blocks = get_format("nvfp4").quantize(y, encode_scale=1.0)
    blocks.scales[:] = torch.arange(4, dtype=torch.uint8).repeat_interleave(u.numel() // 4).view(blocks.scales.shape)
    for bits in (1.125, 1.0625, 0.5, 0.125):
        on_both(y, encode(blocks, bits), "cell", "row")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale", ["row", "row-pow2", 1.0, 37.5])
def test_to_nearest(scale: Any, format: str) -> None:
    for K, dtype in ((16, torch.float32), (144, torch.bfloat16)):
        x, _ = pair(K, dtype, 0.0)
        same(fake_quantize_rows(x.to(DEVICE), format, scale), fake_quantize(x, format, scale))


def test_bad_operands_are_refused_by_name() -> None:
    x = torch.ones(2, 32, device=DEVICE)
    with pytest.raises(KernelError, match="mxfp4-floor"):
        fake_quantize_rows(x, "mxfp4-floor")
    with pytest.raises(KernelError, match="24 values"):
        fake_quantize_rows(x[:, :24], "nvfp4")
    with pytest.raises(KernelError, match="static scale"):
        fake_quantize_rows(x, "nvfp4", "tensor")
    record = encode(get_format("nvfp4").quantize(x.cpu()), 1.125)
    assert record.encode_scale is not None
    args = (record.payload.to(DEVICE), record.encode_scale.to(DEVICE), record.valid.to(DEVICE), "nvfp4")
    with pytest.raises(KernelError, match="payload"):
        guided_round_rows(x, *args, 1.5)
    with pytest.raises(KernelError, match="sideways"):
        guided_round_rows(x, *args, 1.125, "sideways")
