"""The reference against dense attention computed token by token in float64."""

import math

import pytest
import torch
from torch import Tensor

from tracefp4.kernels.paged_attention import paged_attention


def naive(q_BQHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, positions_BQ: Tensor, scaling: float) -> Tensor:
    """One softmax per (sequence, query, head), float64, over exactly the visible context."""
    B, Q, H, D = q_BQHD.shape
    group = H // k_BTGD.shape[2]
    out = torch.zeros(B, Q, H, D, dtype=torch.float64)
    for b in range(B):
        for i in range(Q):
            n = int(positions_BQ[b, i]) + 1
            for h in range(H):
                if n > 0:
                    k, v = k_BTGD[b, :n, h // group].double(), v_BTGD[b, :n, h // group].double()
                    out[b, i, h] = torch.softmax(k @ q_BQHD[b, i, h].double() * scaling, 0) @ v
    return out


def tolerance(dtype: torch.dtype, T: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> float:
    """|out - exact| <= max|v| * (2 |ds| + T u + 2 u_out), from below.

    FP32 dot of D terms errs by at most D u |q||k|, so a score by ds = D u |q||k| scaling; softmax turns that into a
    relative error of at most 2 ds in every probability (they sum to 1); the second product adds T u; in BF16 the
    probabilities and the result are rounded once each, u_out each.
    """
    u, u_out = 2.0**-24, (2.0**-8 if dtype is torch.bfloat16 else 2.0**-24)
    D = q.shape[-1]
    ds = D * u * float(q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max()) * scaling
    return float(v.float().abs().max()) * (2 * ds + T * u + 2 * u_out)


def ragged(positions: list[list[int]], H: int, G: int, D: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v and positions; queries padded with -1, context as long as the longest sequence's."""
    g = torch.Generator().manual_seed(seed)
    B, Q, T = len(positions), max(map(len, positions)), max(map(max, positions)) + 1
    pos = torch.tensor([p + [-1] * (Q - len(p)) for p in positions])
    q, k, v = (torch.randn(B, n, h, D, generator=g).to(dtype) for n, h in ((Q, H), (T, G), (T, G)))
    return q, k, v, pos


CASES = {
    "decode": [[0], [6], [16], [31]],
    "prefill": [list(range(9))],
    "chunks": [list(range(5, 12)), list(range(3)), [20], [7, 8]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "G", "D"), [(4, 4, 16), (4, 2, 32), (6, 1, 8)])
@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention(case: str, H: int, G: int, D: int, dtype: torch.dtype) -> None:
    q, k, v, pos = ragged(CASES[case], H, G, D, dtype)
    scaling = D**-0.5
    out = paged_attention(q, k, v, pos, scaling)
    assert out.dtype == dtype
    error = (out.double() - naive(q, k, v, pos, scaling)).abs().max()
    assert error <= tolerance(dtype, k.shape[1], q, k, v, scaling)


def test_padding_queries_give_zero_and_change_nothing() -> None:
    q, k, v, pos = ragged(CASES["chunks"], 4, 2, 16, torch.float32)
    out = paged_attention(q, k, v, pos, 0.25)
    assert torch.equal(out[pos < 0], torch.zeros_like(out[pos < 0]))
    poisoned = paged_attention(q.masked_fill((pos < 0)[..., None, None], math.nan), k, v, pos, 0.25)
    assert torch.equal(poisoned[pos >= 0], out[pos >= 0])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("case", CASES)
def test_garbage_past_the_context_does_not_leak(case: str, poison: float) -> None:
    """Slots past a sequence's context hold what their last owner left; 0 * NaN is NaN in the second product."""
    q, k, v, pos = ragged(CASES[case], 4, 2, 16, torch.float32)
    k, v = (torch.cat([x, torch.zeros_like(x[:, :3])], 1) for x in (k, v))
    beyond = (torch.arange(k.shape[1]) > pos.amax(1, keepdim=True))[..., None, None]
    clean = paged_attention(q, k.masked_fill(beyond, 0.0), v.masked_fill(beyond, 0.0), pos, 0.25)
    dirty = paged_attention(q, k.masked_fill(beyond, poison), v.masked_fill(beyond, poison), pos, 0.25)
    assert torch.isfinite(clean).all()
    assert torch.equal(dirty, clean)


def test_a_broken_key_is_not_hidden_by_padding() -> None:
    q, k, v, pos = ragged([[3], [4, 5]], 2, 1, 8, torch.float32)
    k[0, 2] = math.nan
    out = paged_attention(q, k, v, pos, 0.25)
    assert torch.isnan(out[0, 0]).all()
    assert torch.isfinite(out[1]).all()


def test_epilogues_scale_scores_and_outputs() -> None:
    q, k, v, pos = ragged(CASES["chunks"], 4, 2, 16, torch.float32)
    plain = paged_attention(q, k, v, pos, 0.25)
    scaled = paged_attention(q, k * 8, v * 4, pos, 0.25, k_epilogue=1 / 8, v_epilogue=1 / 4)
    assert torch.equal(scaled, plain)  # powers of two commute with every rounding


def test_each_head_reads_its_own_group() -> None:
    q, k, v, pos = ragged([[5]], 4, 2, 8, torch.float32)
    changed = v.clone()
    changed[:, :, 1] += 1
    a, b = paged_attention(q, k, v, pos, 0.25), paged_attention(q, k, changed, pos, 0.25)
    assert torch.equal(a[:, :, :2], b[:, :, :2])
    torch.testing.assert_close(b[:, :, 2:], a[:, :, 2:] + 1)
