"""What rounding the encode scale S down to a power of two costs: relative error of nvfp4 under both rules.

python benchmarks/encode_scale.py
"""

from __future__ import annotations

import torch

from tracefp4.formats import get_format


def relative_error(x: torch.Tensor, rule: str) -> float:
    fmt = get_format("nvfp4")
    y = fmt.dequantize(fmt.quantize(x, encode_scale=rule))
    return float((y - x.float()).double().norm() / x.double().norm())


def inexact_share(x: torch.Tensor, rule: str) -> float:
    """Share of dequantized values that BF16 cannot hold."""
    fmt = get_format("nvfp4")
    y = fmt.dequantize(fmt.quantize(x, encode_scale=rule))
    return float((y.bfloat16().float() != y).float().mean())


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, width = 2048, 2048
    gauss = torch.randn(rows, width, generator=generator)
    heavy = gauss / torch.randn(rows, width, generator=generator).abs().clamp(min=0.05)
    scaled = gauss * torch.exp(2 * torch.randn(1, width, generator=generator))
    print(f"relative error of nvfp4, {rows} x {width} BF16 values, seed 0; and share of values not exact in BF16")
    print(f"{'values':<28}{'row':>10}{'row-pow2':>10}{'ratio':>8}{'inexact':>10}{'pow2':>8}")
    for name, x in (("Gaussian", gauss), ("heavy tails", heavy), ("channels over e^2 (s.d.)", scaled)):
        x = x.bfloat16()
        a, b = relative_error(x, "row"), relative_error(x, "row-pow2")
        inexact = inexact_share(x, "row"), inexact_share(x, "row-pow2")
        print(f"{name:<28}{a:>10.5f}{b:>10.5f}{b / a:>8.4f}{inexact[0]:>10.3f}{inexact[1]:>8.3f}")


if __name__ == "__main__":
    main()
