"""Straight-through rounding: exact values forward, the identity backward."""

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from tracefp4.formats import FormatError, get_format
from tracefp4.guidance import GuidanceError, decode, encode
from tracefp4.nn import fake_quantize, guided_round

NAMES = ["nvfp4", "nvfp4-exact", "nvfp4-4over6", "mxfp4-rceil"]
DTYPES = [torch.float32, torch.bfloat16]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def record_and_x(name: str, dtype: torch.dtype, rows: int = 6) -> tuple:
    x = gaussian(rows, 96)
    guidance = encode(get_format(name).quantize(x), 1.125 if name.startswith("nv") else 1.03125, "hash")
    return guidance, (x * (1 + 0.05 * gaussian(rows, 96, seed=1))).to(dtype)


def check_identity_gradient(y: Tensor, x: Tensor) -> None:
    upstream = gaussian(*y.shape, seed=2).to(y.dtype)
    (gradient,) = torch.autograd.grad(y, x, upstream)
    assert gradient.dtype == x.dtype
    assert torch.equal(gradient, upstream)


@pytest.mark.parametrize("rule", ["cell", "bracket"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_guided_round(name: str, dtype: torch.dtype, rule: str) -> None:
    guidance, x = record_and_x(name, dtype)
    x.requires_grad_()
    y = guided_round(x, guidance, rule, recipe_hash="hash")
    expected = get_format(name).dequantize(decode(guidance, x.detach(), rule)[0], dtype=dtype)
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    check_identity_gradient(y, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_fake_quantize(name: str, dtype: torch.dtype) -> None:
    x = (3 * gaussian(2, 3, 64)).to(dtype).requires_grad_()
    fmt = get_format(name)
    y = fake_quantize(x, name)
    assert y.dtype == dtype
    assert torch.equal(y, fmt.dequantize(fmt.quantize(x.detach()), dtype=dtype))
    check_identity_gradient(y, x)


def test_static_and_power_of_two_scales() -> None:
    x, fmt = gaussian(4, 64), get_format("nvfp4")
    for scale in ("row-pow2", "tensor", 100.0, torch.tensor(100.0), torch.full((4, 1), 50.0)):
        assert torch.equal(fake_quantize(x, "nvfp4", scale), fmt.dequantize(fmt.quantize(x, encode_scale=scale)))
    with pytest.raises(FormatError):
        fake_quantize(x, "nvfp4", "batch")


def test_the_value_is_not_x_plus_a_difference() -> None:
    """x + (v - x) rounds away from v where v is the farther neighbour; the op must return v itself."""
    fmt, x = get_format("nvfp4"), gaussian(64, 256)
    guidance = encode(fmt.quantize(x), 1.5)
    guidance.payload[:, : 256 // 8] ^= 255  # every mantissa bit the other way
    v = fmt.dequantize(decode(guidance, x)[0])
    assert not torch.equal(x + (v - x), v)
    assert torch.equal(guided_round(x.requires_grad_(), guidance), v)


def test_rows_without_a_record_are_rounded_to_nearest_and_keep_the_gradient() -> None:
    x = gaussian(4, 64)
    valid = torch.tensor([True, False, True, False])
    guidance = encode(get_format("nvfp4").quantize(x), valid=valid)
    train = (x * (1 + 0.2 * gaussian(4, 64, seed=1))).requires_grad_()
    y = guided_round(train, guidance, own_encode_scale="row-pow2")
    assert torch.equal(y[~valid], fake_quantize(train, "nvfp4", "row-pow2")[~valid])
    check_identity_gradient(y, train)


def test_non_contiguous_and_empty_inputs() -> None:
    guidance, x = record_and_x("nvfp4", torch.float32)
    strided = x.t().contiguous().t().requires_grad_()
    y = guided_round(strided, guidance)
    assert torch.equal(y, guided_round(x, guidance))
    check_identity_gradient(y, strided)
    check_identity_gradient(fake_quantize(strided, "nvfp4"), strided)
    none = torch.empty(0, 96, requires_grad=True)
    for y in (guided_round(none, guidance.select([])), fake_quantize(none, "nvfp4")):
        assert y.shape == (0, 96)
        check_identity_gradient(y, none)


def test_nothing_is_saved_for_backward_and_no_graph_without_a_gradient() -> None:
    guidance, x = record_and_x("nvfp4", torch.bfloat16)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = guided_round(x.requires_grad_(), guidance)
        z = fake_quantize(x, "nvfp4")
    assert not packed
    assert not y.grad_fn.saved_tensors
    assert not z.grad_fn.saved_tensors
    assert fake_quantize(x.detach(), "nvfp4").grad_fn is None


def test_gradient_flows_through_a_layer_and_under_checkpointing() -> None:
    """d/dx of sum((round(x) W)^2) is 2 (round(x) W) W^T, with the rounded value in the forward."""
    guidance, x = record_and_x("nvfp4", torch.float32)
    w = gaussian(96, 8, seed=3)

    def loss(values: Tensor) -> Tensor:
        return (guided_round(values, guidance) @ w).square().sum()

    x.requires_grad_()
    (plain,) = torch.autograd.grad(loss(x), x)
    (recomputed,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, x, use_reentrant=False), x)
    y = guided_round(x.detach(), guidance)
    assert torch.equal(plain, 2 * (y @ w) @ w.T)
    assert torch.equal(recomputed, plain)


def test_errors_of_decode_pass_through() -> None:
    guidance, x = record_and_x("nvfp4", torch.float32)
    with pytest.raises(GuidanceError, match=r"'hash'.*'other'"):
        guided_round(x, guidance, recipe_hash="other")
    with pytest.raises(GuidanceError, match="activations are"):
        guided_round(x[:3], guidance)


# -- clipped straight-through ---------------------------------------------------------------------------------------


def test_clipped_gradient_ends_where_the_format_does() -> None:
    """At a static encode scale of 1 the largest value is 6 * 448; beyond it the forward saturates."""
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([2688.0, 2689.0, -2689.0, 1e6, -2688.0, 3.0])
    x.requires_grad_()
    gradients = []
    for clipped in (False, True):
        y = fake_quantize(x, "nvfp4", 1.0, clipped=clipped)
        assert y[0, :6].tolist() == [2688.0, 2688.0, -2688.0, 2688.0, -2688.0, 0.0]
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
    assert (gradients[0] == 1).all()
    assert (gradients[1][0] == 0).nonzero()[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*NAMES, "mxfp8-floor"])
def test_clipped_guided_gradient_is_by_the_rollouts_scale(name: str, dtype: torch.dtype) -> None:
    """Where the trainer's value exceeds what the rollout's block scale represents, nothing flows."""
    fmt = get_format(name)
    blocks = fmt.quantize(gaussian(4, 96))
    guidance = encode(blocks, {"nv": 1.5, "mx": 1.25}[name[:2]], "hash")
    x = (3 * gaussian(4, 96, seed=1)).to(dtype).requires_grad_()
    y = guided_round(x, guidance, recipe_hash="hash", clipped=True)
    assert torch.equal(y, guided_round(x, guidance, recipe_hash="hash"))
    upstream = gaussian(4, 96, seed=2).to(dtype)
    (gradient,) = torch.autograd.grad(y, x, upstream)
    largest = fmt.element_max * fmt.effective_scale(blocks.scales, blocks.encode_scale)
    inside = x.detach().float().abs() <= largest.repeat_interleave(fmt.block_size, -1)
    assert 0.05 < (~inside).float().mean() < 0.9
    assert torch.equal(gradient, upstream * inside)
