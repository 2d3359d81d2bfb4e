"""Grouped products against a loop over tokens, and FP4 operands against the dequantized product in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tracefp4.formats import get_format, list_formats
from tracefp4.kernels.grouped_experts import ExpertMatrices, Routing, grouped_linear
from tracefp4.recipe import quantize_expert_weights


def choose(N: int, K: int, E: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(N)])


@settings(max_examples=60, deadline=None)
@given(N=st.integers(1, 17), K=st.integers(1, 4), E=st.integers(4, 9), seed=st.integers(0, 1000))
def test_routing_sorts_rows_by_expert_stably(N: int, K: int, E: int, seed: int) -> None:
    experts = choose(N, K, E, seed)
    r = Routing.of(experts, E)
    flat = experts.reshape(-1).tolist()
    want = sorted(range(N * K), key=lambda m: flat[m])  # Python's sort is stable
    assert r.order.tolist() == want
    assert r.token.tolist() == [m // K for m in want]
    assert list(r.counts) == [flat.count(e) for e in range(E)]


@pytest.mark.parametrize(("N", "K", "E", "inner", "outer"), [(1, 1, 1, 1, 1), (7, 2, 5, 13, 11), (33, 3, 64, 48, 5)])
def test_dispatch_and_product_equal_a_loop_over_tokens(N: int, K: int, E: int, inner: int, outer: int) -> None:
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(N, inner, generator=g), torch.randn(E, outer, inner, generator=g)
    experts = choose(N, K, E, 2)
    r = Routing.of(experts, E)
    assert N == 1 or 0 in r.counts or E < N  # the wide case leaves experts empty
    dispatched = grouped_linear(x[r.token], None, ExpertMatrices(w), r.counts)
    y = torch.empty_like(dispatched)
    y[r.order] = dispatched
    for n in range(N):
        for j in range(K):
            e = int(experts[n, j])
            exact = w[e].double() @ x[n].double()
            bound = inner * 2.0**-24 * (w[e].abs().double() @ x[n].abs().double())  # FP32 dot of `inner` terms
            assert ((y[n * K + j].double() - exact).abs() <= bound).all()


def test_no_rows_at_all() -> None:
    out = grouped_linear(torch.empty(0, 4), None, ExpertMatrices(torch.ones(3, 5, 4)), (0, 0, 0))
    assert out.shape == (0, 5)


def test_bf16_product_stays_in_bf16() -> None:
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(2, 4, 8).bfloat16()
    out = grouped_linear(x, None, ExpertMatrices(w), (1, 2))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.cat([x[:1] @ w[0].T, x[1:] @ w[1].T]))


def test_operands_of_two_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        grouped_linear(torch.ones(1, 4).bfloat16(), None, ExpertMatrices(torch.ones(1, 2, 4)), (1,))


def test_epilogues_are_applied_once_and_exactly() -> None:
    """One FP32 multiplication by the expert's scale, then one by the row's."""
    x, w = torch.eye(3), torch.arange(1.0, 13).view(2, 2, 3)
    scale_E, scale_M1 = torch.tensor([0.3, 0.7]), torch.tensor([[1.1], [1.3], [1.7]])
    out = grouped_linear(x, scale_M1, ExpertMatrices(w, scale_E), (1, 2))
    for m, e in enumerate((0, 1, 1)):
        assert torch.equal(out[m], w[e, :, m] * scale_E[e] * scale_M1[m])


@pytest.mark.parametrize("encode_scale", ["row", "row-pow2"])
@pytest.mark.parametrize("name", list_formats())
def test_fp4_operands_equal_the_dequantized_product(name: str, encode_scale: str) -> None:
    fmt = get_format(name)
    g = torch.Generator().manual_seed(3)
    E, O, I = 3, 6, 64
    w = (torch.randn(E, O, I, generator=g) * torch.tensor([0.02, 1.0, 30.0])[:, None, None]).bfloat16()
    x = torch.randn(7, I, generator=g).bfloat16() * 3
    blocks = fmt.quantize(x, encode_scale=encode_scale if fmt.scale_kind == "e4m3" else None)
    operand, epilogue = fmt.operands(blocks, dtype=torch.float32)
    weights = ExpertMatrices.quantized(quantize_expert_weights(w, name, pow2=encode_scale == "row-pow2"))
    assert torch.equal(operand, operand.bfloat16().float())
    assert torch.equal(weights.operand_EOI, weights.operand_EOI.bfloat16().float())
    assert weights.blocks is not None
    out = grouped_linear(operand, epilogue, weights, (2, 0, 5)).double()
    dx, dw = fmt.dequantize(blocks).double(), fmt.dequantize(weights.blocks).double()
    for m, e in enumerate([0, 0, 2, 2, 2, 2, 2]):
        exact, size = dw[e] @ dx[m], dw[e].abs() @ dx[m].abs()
        # I terms in FP32; the two epilogues and the two dequantizations round once or twice each.
        assert ((out[m] - exact).abs() <= (I + 8) * 2.0**-24 * size).all()
