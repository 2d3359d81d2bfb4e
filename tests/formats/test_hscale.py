"""H-Scale: the best scale of its neighbourhood by brute force, and never worse than the own one."""

import pytest
import torch

from tracefp4.formats import FormatError, QuantizedBlocks, decode_e2m1, decode_e4m3, encode_e2m1, get_format
from tracefp4.formats.hscale import DOWN, UP, quantize_hscale


def weights(rows: int = 12, width: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(w, h): channels of very different importance."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=g), (3 * torch.randn(width, generator=g)).exp()


def error(w: torch.Tensor, h: torch.Tensor, blocks: QuantizedBlocks) -> torch.Tensor:
    return ((w - get_format(blocks.format).dequantize(blocks)).square() * h).unflatten(-1, (-1, 16)).sum(-1)


@pytest.mark.parametrize("scale", ["row", "row-pow2", "tensor"])
def test_the_best_scale_by_brute_force(scale: str) -> None:
    w, h = weights()
    got = quantize_hscale(w, h, encode_scale=scale)
    own = get_format("nvfp4").quantize(w, encode_scale=scale)
    assert own.encode_scale is not None
    assert torch.equal(got.encode_scale, own.encode_scale)
    S = own.encode_scale.expand(len(w), 1)
    for n in range(len(w)):
        for b in range(4):
            at = slice(16 * b, 16 * b + 16)
            errors = {}
            for byte in range(max(0, int(own.scales[n, b]) - DOWN), min(0x7E, int(own.scales[n, b]) + UP) + 1):
                step = decode_e4m3(torch.tensor(byte, dtype=torch.uint8)) / S[n]
                value = decode_e2m1(encode_e2m1(w[n, at] / step)) * step
                errors[byte] = float(((w[n, at] - value).square() * h[at]).sum())
            best = min(errors.values())
            assert float(error(w, h, got)[n, b]) == pytest.approx(best, rel=1e-4, abs=1e-12)
    assert (got.scales != own.scales).float().mean() > 0.3


def test_never_worse_than_the_own_scale_and_better_by_a_margin() -> None:
    w, h = weights(64, 256)
    ours, plain = (error(w, h, b) for b in (quantize_hscale(w, h), get_format("nvfp4").quantize(w)))
    assert (ours <= plain).all()
    assert ours.sum() < 0.75 * plain.sum()


def test_without_importance_blocks_are_rounded_as_usual() -> None:
    w, h = weights()
    h[:16] = 0
    got, own = quantize_hscale(w, h), get_format("nvfp4").quantize(w)
    assert torch.equal(got.scales[:, 0], own.scales[:, 0])
    assert torch.equal(got.codes[:, :8], own.codes[:, :8])
    zero = quantize_hscale(torch.zeros(2, 32), torch.ones(32))
    assert torch.equal(zero.codes, get_format("nvfp4").quantize(torch.zeros(2, 32)).codes)


def test_importance_matters() -> None:
    w, h = weights()
    assert not torch.equal(quantize_hscale(w, h).scales, quantize_hscale(w, torch.ones(64)).scales)


@pytest.mark.parametrize("name", ["nvfp4-4over6", "mxfp4-rceil"])
def test_other_formats_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="plain NVFP4"):
        quantize_hscale(torch.ones(1, 32), torch.ones(32), name)
