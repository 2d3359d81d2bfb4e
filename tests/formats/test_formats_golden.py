"""Golden vectors: scales, codes and values of public libraries, bit for bit.

The vectors mark codes that may change when a reciprocal is off by one ulp. Reciprocals here are correctly
rounded, so equality is asserted inside those masks too.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tracefp4.formats import get_format, unpack_codes

GOLDEN = load_file(Path(__file__).parents[1] / "data" / "golden_public.safetensors")
CASES = sorted(name[:-2] for name in GOLDEN if name.endswith(".x"))
RULES = {
    "engine": "nvfp4",
    "exact": "nvfp4-exact",
    "4o6_256_mse": "nvfp4-4over6",
    "4o6_256_mae": "nvfp4-4over6-mae",
    "4o6_448_mse": "nvfp4-4over6-448-mse",
    "4o6_448_mae": "nvfp4-4over6-448-mae",
    **{f"mx_{mode}": f"mxfp4-{mode}" for mode in ("floor", "even", "rceil", "ceil")},
}
PRESENT = [(case, rule) for case in CASES for rule in RULES if f"{case}.{rule}.sf" in GOLDEN]
OWN_S = [c for c in CASES if not c.startswith(("static_", "kv_"))]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def test_the_file_is_complete() -> None:
    assert len(CASES) == 16
    assert len(PRESENT) == 16 * 6 + 6 * 4


@pytest.mark.parametrize(("case", "rule"), PRESENT)
def test_golden(case: str, rule: str) -> None:
    fmt, x = get_format(RULES[rule]), GOLDEN[f"{case}.x"]
    if rule.startswith("mx_"):
        blocks = fmt.quantize(x)
    elif rule.startswith("4o6"):
        blocks = fmt.quantize(x, "tensor")
    else:
        blocks = fmt.quantize(x, GOLDEN[f"{case}.global_encode_scale"].reshape(()))
    assert torch.equal(blocks.scales, GOLDEN[f"{case}.{rule}.sf"])
    packed = GOLDEN[f"{case}.{rule}.packed"]
    assert torch.equal(blocks.codes, packed)
    assert torch.equal(fmt.round_with_scales(x, blocks.scales, blocks.encode_scale), unpack_codes(packed))
    values = GOLDEN.get(f"{case}.{rule}.dq")
    if values is not None:
        assert same_bits(fmt.dequantize(blocks, values.dtype), values)


@pytest.mark.parametrize("case", OWN_S)
def test_golden_encode_scale(case: str) -> None:
    expected = GOLDEN[f"{case}.global_encode_scale"].reshape(())
    for name in ("nvfp4", "nvfp4-exact"):
        resolved = get_format(name).resolve_encode_scale(GOLDEN[f"{case}.x"], "tensor")
        assert resolved is not None
        assert same_bits(resolved, expected)
