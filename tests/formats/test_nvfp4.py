"""NVFP4: encode scales, exceptional values worked out by hand, exactness of the operands."""

import math

import pytest
import torch

from tracefp4.formats import FormatError, decode_e4m3, encode_e4m3, get_format

ENGINE, EXACT = get_format("nvfp4"), get_format("nvfp4-exact")
NAMES = ["nvfp4", "nvfp4-exact"]


def block(*head: float, rest: float = 0.0) -> torch.Tensor:
    return torch.tensor([*head, *[rest] * (16 - len(head))])


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# Exceptional blocks. S = 1 unless the row's own S is the point.


@pytest.mark.parametrize("name", NAMES)
def test_plain_block(name: str) -> None:
    # m = 6, SF = 1 (0x38), so z = x.
    x = block(6.0, -6.0, 0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, -0.0)
    blocks = get_format(name).quantize(x, 1.0)
    assert blocks.scales.tolist() == [0x38]
    assert blocks.unpacked_codes().tolist() == [7, 15, 0, 10, 2, 4, 12, 6, 6, 8, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_zero_block_keeps_signs_and_has_scale_zero(name: str) -> None:
    blocks = get_format(name).quantize(block(0.0, -0.0))
    assert blocks.encode_scale is not None
    assert blocks.encode_scale.tolist() == [1.0]
    assert blocks.scales.tolist() == [0]
    assert blocks.unpacked_codes().tolist() == [0, 8] + [0] * 14
    assert torch.equal(get_format(name).dequantize(blocks), torch.zeros(16))


def test_underflowed_scale_is_zero_under_engine_and_six_under_exact() -> None:
    # m/6 = 2^-10 ties to SF = 0; 1.5 times as much rounds to 2^-9.
    x = block(6 * 2.0**-10, -(2.0**-10), -0.0)
    engine, exact = ENGINE.quantize(x, 1.0), EXACT.quantize(x, 1.0)
    assert engine.scales.tolist() == exact.scales.tolist() == [0]
    assert engine.unpacked_codes()[:4].tolist() == [0, 8, 8, 0]
    assert exact.unpacked_codes()[:4].tolist() == [7, 15, 8, 0]
    assert not ENGINE.dequantize(engine).any()
    assert not EXACT.dequantize(exact).any()
    above = ENGINE.quantize(x * 1.5, 1.0)
    # SF = 2^-9: z = 9 * 2^-10 * 2^9 = 4.5 -> 4 and -.75 -> -1.
    assert above.scales.tolist() == [1]
    assert above.unpacked_codes()[:2].tolist() == [6, 10]


def test_subnormal_input_overflows_the_inverse_scale() -> None:
    # amax = 1e-40: S = FLT_MAX, SF = FLT_MAX * 1e-40 / 6 = 2.9 * 2^-9 -> 3 * 2^-9, and 1 / (SF / S) = 6e40 is
    # Inf in FP32. The engine rule multiplies by Inf (0 * Inf is NaN, code 7), the exact rule by FLT_MAX
    # (z = .034).
    x = block(1e-40, -1e-40)
    engine, exact = ENGINE.quantize(x), EXACT.quantize(x)
    for blocks in (engine, exact):
        assert blocks.encode_scale is not None
        assert blocks.encode_scale.item() == torch.finfo(torch.float32).max
        assert blocks.scales.tolist() == [3]
    assert engine.unpacked_codes()[:3].tolist() == [7, 15, 7]
    assert exact.unpacked_codes()[:3].tolist() == [0, 8, 0]
    assert ENGINE.dequantize(engine).abs().max() < 2e-40


@pytest.mark.parametrize("name", NAMES)
def test_infinity_saturates_its_block_only(name: str) -> None:
    # amax = Inf: S = 1. First block SF = 448, z = x / 448; second block m = 6, SF = 1.
    x = torch.cat((block(math.inf, -math.inf, 448.0, 1.0), block(6.0, 3.0)))
    blocks = get_format(name).quantize(x)
    assert blocks.encode_scale is not None
    assert blocks.encode_scale.tolist() == [1.0]
    assert blocks.scales.tolist() == [0x7E, 0x38]
    codes = blocks.unpacked_codes().tolist()
    assert codes[:5] == [7, 15, 2, 0, 0]
    assert codes[16:19] == [7, 5, 0]
    assert get_format(name).dequantize(blocks)[:2].tolist() == [2688.0, -2688.0]


@pytest.mark.parametrize("name", NAMES)
def test_nan_is_ignored_by_scales_and_coded_seven(name: str) -> None:
    x = torch.cat((block(math.nan, 6.0, -math.nan, -3.0), block(rest=math.nan)))
    blocks = get_format(name).quantize(x)
    clean = get_format(name).quantize(x.nan_to_num(nan=0.0))
    assert blocks.encode_scale is not None
    assert blocks.encode_scale.tolist() == [448.0]
    assert torch.equal(blocks.scales, clean.scales)
    assert blocks.scales.tolist() == [0x7E, 0]
    assert blocks.unpacked_codes().tolist() == [7, 7, 7, 13] + [0] * 12 + [7] * 16
    assert not get_format(name).dequantize(blocks)[16:].any()


@pytest.mark.parametrize("name", NAMES)
def test_all_nan_tensor(name: str) -> None:
    blocks = get_format(name).quantize(torch.full((2, 16), math.nan), "tensor")
    assert blocks.encode_scale is not None
    assert blocks.encode_scale.item() == 1.0
    assert blocks.scales.tolist() == [[0], [0]]
    assert (blocks.unpacked_codes() == 7).all()


@pytest.mark.parametrize("name", NAMES)
def test_static_scale_saturates(name: str) -> None:
    # S = 1: the largest value is 448 * 6 = 2688; 5000 saturates, 1400 / 448 = 3.1 -> 3.
    x = block(5000.0, -1e30, 2688.0, 1400.0)
    blocks = get_format(name).quantize(x, 1.0)
    assert blocks.scales.tolist() == [0x7E]
    assert blocks.unpacked_codes()[:5].tolist() == [7, 15, 7, 5, 0]
    assert get_format(name).dequantize(blocks)[:4].tolist() == [2688.0, -2688.0, 2688.0, 1344.0]


def test_nan_scale_byte_gives_code_seven() -> None:
    codes = ENGINE.round_with_scales(block(1.0, -1.0), torch.tensor([0x7F], dtype=torch.uint8), torch.tensor(1.0))
    assert (codes == 7).all()


# Order of FP32 operations.


def test_rules_are_the_written_products() -> None:
    x = sample(64, 64, seed=1).float() * 0.37
    m, s = ENGINE.block_amax(x), ENGINE.resolve_encode_scale(x)
    assert s is not None
    sixth = torch.tensor(1 / 6, dtype=torch.float32)
    engine, exact = ENGINE.unrounded_scale(m, s), EXACT.unrounded_scale(m, s)
    assert torch.equal(engine, s * (m * sixth))
    assert torch.equal(exact, m * (s * sixth))
    assert not torch.equal(engine, exact)
    scales = ENGINE.round_scale(engine)
    assert torch.equal(scales, encode_e4m3(engine))
    one = torch.ones(())
    inverse = one / (decode_e4m3(scales) * (one / s))
    assert torch.equal(ENGINE.multiplier(scales, s), inverse)
    assert torch.equal(EXACT.multiplier(scales, s), inverse)
    z = x * inverse.repeat_interleave(16, -1)
    assert torch.equal(ENGINE.scaled(x, scales, s), z)
    assert torch.equal(ENGINE.effective_scale(scales, s), decode_e4m3(scales) * (one / s))


# Encode scales.


def test_row_scale_does_not_depend_on_the_batch() -> None:
    x = sample(2, 5, 64)
    whole = ENGINE.quantize(x)
    assert whole.encode_scale is not None
    assert whole.encode_scale.shape == (2, 5, 1)
    one = torch.tensor(2688.0)
    assert torch.equal(whole.encode_scale, one / x.float().abs().amax(-1, keepdim=True))
    alone, cut = ENGINE.quantize(x[1, 3]), whole.rows((1, 3))
    assert alone.encode_scale is not None
    assert cut.encode_scale is not None
    assert torch.equal(alone.codes, cut.codes)
    assert torch.equal(alone.scales, cut.scales)
    assert torch.equal(alone.encode_scale, cut.encode_scale)
    assert cut.shape == alone.shape == (64,)


def test_row_pow2_is_the_power_of_two_below() -> None:
    x = sample(300, 16, seed=2) * torch.logspace(-20, 20, 300).unsqueeze(-1)
    row, pow2 = ENGINE.resolve_encode_scale(x, "row"), ENGINE.resolve_encode_scale(x, "row-pow2")
    assert row is not None
    assert pow2 is not None
    assert (torch.frexp(pow2).mantissa == 0.5).all()
    assert ((pow2 <= row) & (row < 2 * pow2)).all()
    # An S that is a power of two already stays: 2688 / 1.3125 = 2048.
    exactly = ENGINE.resolve_encode_scale(block(1.3125), "row-pow2")
    assert exactly is not None
    assert exactly.item() == 2048.0


def test_tensor_static_and_broadcast_scales() -> None:
    x = sample(3, 4, 32)
    tensor = ENGINE.resolve_encode_scale(x, "tensor")
    assert tensor is not None
    assert tensor.shape == ()
    assert tensor == torch.tensor(2688.0) / x.float().abs().max()
    for given in (
        2.0,
        2,
        torch.tensor(2.0),
        torch.full((3, 1, 1), 2.0),
        torch.full((4, 1), 2.0),
        torch.tensor([2.0]),
    ):
        blocks = ENGINE.quantize(x, given)
        assert blocks.encode_scale is not None
        assert blocks.encode_scale.dtype == torch.float32
        assert torch.equal(blocks.codes, ENGINE.quantize(x, torch.tensor(2.0)).codes)
        assert ENGINE.dequantize(blocks).shape == x.shape
        assert blocks.rows(1).shape == (4, 32)


@pytest.mark.parametrize(
    "given",
    [
        "batch",
        "token",
        "",
        None,
        True,
        0.0,
        -1.0,
        math.inf,
        math.nan,
        torch.ones(2),
        torch.ones(4, 2),
        torch.zeros(()),
    ],
)
def test_other_encode_scales_are_refused(given: object) -> None:
    with pytest.raises(FormatError, match="encode scale"):
        ENGINE.quantize(sample(4, 32), given)  # type: ignore[arg-type]


def test_a_batch_scale_is_refused_with_its_reason() -> None:
    with pytest.raises(FormatError, match="batch of tokens is refused because a trainer cannot"):
        ENGINE.quantize(sample(4, 32), "batch")


# Values and operands.


@pytest.mark.parametrize("name", NAMES)
def test_power_of_two_scale_makes_bf16_exact(name: str) -> None:
    fmt = get_format(name)
    blocks = fmt.quantize(sample(64, 128, seed=3), "row-pow2")
    values = fmt.dequantize(blocks)
    assert torch.equal(fmt.dequantize(blocks, torch.bfloat16).float(), values)
    operand, d = fmt.operands(blocks)
    assert d is not None
    assert operand.dtype == torch.bfloat16
    assert torch.equal(operand.float() * d, values)


def test_operands_are_exact_in_bf16_for_every_code_and_scale() -> None:
    from tracefp4.formats import E2M1_VALUES, QuantizedBlocks, pack_codes

    scales = torch.arange(0x7F, dtype=torch.uint8).unsqueeze(-1)
    codes = torch.arange(16, dtype=torch.uint8).expand(0x7F, 16)
    blocks = QuantizedBlocks(pack_codes(codes), scales, torch.tensor(3.0), "nvfp4", (0x7F, 16))
    operand, d = ENGINE.operands(blocks)
    assert torch.equal(operand.double(), E2M1_VALUES.double() * decode_e4m3(scales).double())
    assert d == torch.ones(()) / 3


def test_operands_times_d_is_the_dequantized_value_up_to_rounding() -> None:
    blocks = ENGINE.quantize(sample(64, 128, seed=4))
    operand, d = ENGINE.operands(blocks)
    assert d is not None
    values = ENGINE.dequantize(blocks)
    # E2M1 * (SF * D) rounds twice, (E2M1 * SF) * D once, each by at most 2^-24.
    assert ((operand.float() * d - values).abs() <= 3.01 * 2.0**-24 * values.abs()).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["row", "row-pow2", "tensor"])
def test_dequantized_values_quantize_to_themselves(name: str, kind: str) -> None:
    fmt = get_format(name)
    x = sample(256, 64, seed=5) * torch.logspace(-2, 2, 4).repeat_interleave(16)
    blocks = fmt.quantize(x, kind)
    again = fmt.quantize(fmt.dequantize(blocks), blocks.encode_scale)
    normal = decode_e4m3(blocks.scales) >= 2.0**-6
    assert normal.float().mean() > 0.7
    assert torch.equal(blocks.scales[normal], again.scales[normal])
    per_block = [b.codes.unflatten(-1, (-1, 8))[normal] for b in (blocks, again)]
    assert torch.equal(*per_block)


def test_error_is_at_most_half_a_gap() -> None:
    # Largest half gap of E2M1 is 1 (between 4 and 6), SF * D <= (1 + 1/16) * m / 6 for a normal SF.
    x = sample(128, 64, seed=6).float()
    blocks = ENGINE.quantize(x)
    error = (ENGINE.dequantize(blocks) - x).abs().unflatten(-1, (-1, 16)).amax(-1)
    assert (error <= ENGINE.block_amax(x) / 6 * (1 + 1 / 16) * 1.001).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_input_dtype_does_not_matter(dtype: torch.dtype) -> None:
    x = (sample(8, 32, seed=7).float() * 8).round() / 8
    a, b = ENGINE.quantize(x.bfloat16()), ENGINE.quantize(x.to(dtype))
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)


def test_gradient_flows_through_scaled_only() -> None:
    x = sample(2, 32).float().requires_grad_()
    blocks = ENGINE.quantize(x)
    assert blocks.encode_scale is not None
    assert not blocks.encode_scale.requires_grad
    ENGINE.scaled(x, blocks.scales, blocks.encode_scale).sum().backward()
    assert x.grad is not None
    factor = ENGINE.multiplier(blocks.scales, blocks.encode_scale).repeat_interleave(16, -1)
    assert torch.equal(x.grad, factor)
