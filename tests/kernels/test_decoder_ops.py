"""The small operations of a decoder layer against torch. Under the interpreter unless there is a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tracefp4.kernels.decoder_ops import add_norm, choose_experts, norm_rotate, read_rows, rms_norm, write_dense
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.paged_attention import PagedCache
from tracefp4.kernels.quantize_record import write_kv

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*size, generator=g) * scale).bfloat16().to(DEVICE)


def one_ulp(got: Tensor, want: Tensor, share: float = 0.01) -> None:
    """BF16 results of FP32 sums in another order: now and then the last bit, never more."""
    error = (got.float() - want.float()).abs()
    assert (error <= 2.0**-7 * want.float().abs() + 1e-30).all()
    assert (got != want).float().mean() <= share


@pytest.mark.parametrize(("N", "I"), [(5, 128), (3, 200), (1, 2048)])
def test_add_norm(N: int, I: int) -> None:
    x, y, w = normal(N, I), normal(N, I, seed=1), normal(I, seed=2)
    for other in (y, None):
        want = add_norm(x, other, w, 1e-6, backend="torch")
        got = add_norm(x, other, w, 1e-6, backend="triton")
        assert torch.equal(got[0], want[0])
        one_ulp(got[1], want[1])
    assert torch.equal(add_norm(x, None, w, 1e-6, backend="torch")[1], rms_norm(x, w, 1e-6))


@pytest.mark.parametrize(("N", "I", "K"), [(5, 128, 3), (3, 200, 8)])
def test_add_norm_of_weighted_rows(N: int, I: int, K: int) -> None:
    """The sum over the experts, rounded on its own before it is added, as if it had been stored."""
    x, w = normal(N, I), normal(I, seed=2)
    y, gates = normal(N, K, I, seed=1), normal(N, K, seed=3).float().softmax(-1)
    got = add_norm(x, y, w, 1e-6, gates, backend="triton")
    want = add_norm(x, y, w, 1e-6, gates, backend="torch")
    one_ulp(got[0], want[0])
    one_ulp(got[1], want[1], share=0.05)
    total = torch.zeros(N, I, device=DEVICE)
    for k in range(K):
        total += y[:, k].float() * gates[:, k, None]
    assert torch.equal(got[0], x + total.bfloat16())
    with pytest.raises(KernelError, match="gates must be"):
        add_norm(x, y, w, 1e-6, gates.double(), backend="triton")
    with pytest.raises(KernelError, match="y must be"):
        add_norm(x, y, w, 1e-6, backend="triton")


@pytest.mark.parametrize(("H", "G", "D"), [(4, 2, 64), (3, 1, 128)])
def test_norm_rotate(H: int, G: int, D: int) -> None:
    N, P = 5, 40
    angles = torch.arange(P)[:, None] * (1.0 / 1e4 ** (torch.arange(0, D, 2) / D))
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    operands = (normal(N, (H + 2 * G) * D), normal(D, seed=1), normal(D, seed=2), cos, sin)
    positions = torch.tensor([0, 7, 39, -1, 1], device=DEVICE)
    want = norm_rotate(*operands, positions, H, G, 1e-6, backend="torch")
    got = norm_rotate(*operands, positions, H, G, 1e-6, backend="triton")
    for a, b, heads in zip(got, want, (H, G), strict=True):
        assert a.shape == (N, heads, D)
        error = (a.float() - b.float()).abs()
        assert error.max() <= 2.0**-7 * b.float().abs().max()  # a rotation may cancel: of the largest value
        assert (a != b).float().mean() <= 0.01


@pytest.mark.parametrize(("E", "K"), [(8, 2), (13, 4), (128, 8), (3, 3)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_choose_experts(E: int, K: int, renormalize: bool) -> None:
    logits = normal(9, E, seed=E, scale=2.0)
    logits[3] = 1.0  # all alike: the lowest numbers
    logits[4, E // 2 :] = logits[4, 0]
    want_gates, want = choose_experts(logits, K, renormalize, backend="torch")
    gates, chosen = choose_experts(logits, K, renormalize, backend="triton")
    assert torch.equal(chosen, want)
    assert chosen[3].tolist() == list(range(K))
    assert torch.allclose(gates, want_gates, rtol=1e-5, atol=0)
    if renormalize:
        assert torch.allclose(gates.sum(-1), torch.ones(9, device=DEVICE))


def test_a_row_of_nan_still_names_experts() -> None:
    logits = torch.full((1, 8), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    _, chosen = choose_experts(logits, 2, True, backend="triton")
    assert ((chosen >= 0) & (chosen < 8)).all()


@pytest.mark.parametrize("D", [64, 128])
def test_rows_are_read_back_as_they_were_written(D: int) -> None:
    N, G = 11, 2
    k, v = normal(N, G, D, scale=3.0), normal(N, G, D, seed=1, scale=0.3)
    slots = torch.randperm(4 * 16, generator=torch.Generator().manual_seed(0))[:N].to(DEVICE)
    dense = PagedCache.empty(4, 16, G, D, torch.bfloat16, DEVICE)
    write_dense(k, v, dense, slots, backend="triton")
    reference = PagedCache.empty(4, 16, G, D, torch.bfloat16, DEVICE)
    write_dense(k, v, reference, slots, backend="torch")
    assert torch.equal(dense.k, reference.k)
    assert torch.equal(dense.v, reference.v)
    for got, x in zip(read_rows(dense, slots, backend="triton"), (k, v), strict=True):
        assert torch.equal(got, x)
    packed = PagedCache.empty(4, 16, G, D, "nvfp4", DEVICE)
    write_kv(k, v, packed, slots, backend="triton", encode_scales=(2.0, 4.0))
    want = read_rows(packed, slots, backend="torch")
    got = read_rows(packed, slots, backend="triton")
    for a, b, x, S in zip(got, want, (k, v), (2.0, 4.0), strict=True):
        assert torch.equal(a, b)
        assert ((a.float() / S - x.float()).abs() <= 0.26 * x.float().abs().amax(-1, keepdim=True)).all()


def test_operands_that_do_not_fit_are_refused() -> None:
    x = normal(2, 64)
    with pytest.raises(KernelError, match="y must be"):
        add_norm(x, normal(2, 32), normal(64), 1e-6, backend="triton")
    with pytest.raises(KernelError, match="x must be contiguous BF16"):
        add_norm(x.float(), None, normal(64), 1e-6, backend="triton")
    with pytest.raises(KernelError, match="qkv must be"):
        norm_rotate(x, normal(32), normal(32), x, x, x, 2, 1, 1e-6, backend="triton")
    with pytest.raises(KernelError, match=r"logits must be \[N, E\] with E >= 65"):
        choose_experts(x, 65, True, backend="triton")
    with pytest.raises(KernelError, match="takes a dense cache"):
        write_dense(x, x, PagedCache.empty(1, 16, 1, 64, "nvfp4", DEVICE), x, backend="torch")
