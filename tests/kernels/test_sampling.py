"""Drawing tokens: the kernel against torch, over chunks. Under the interpreter unless there is a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.sampling import draw_tokens

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for Inf and NaN under the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(logits: Tensor, temperature: float, uniform: Tensor, backend: str, greedy: bool = False) -> list[Tensor]:
    B = len(uniform)
    flags = torch.full((B,), greedy, device=DEVICE)
    t = torch.full((B,), temperature, device=DEVICE)
    return [
        x.cpu()
        for x in draw_tokens(
            logits.bfloat16().expand(B, -1).contiguous().to(DEVICE), t, flags, uniform.to(DEVICE), backend=backend
        )
    ]


@pytest.mark.parametrize("V", [5, 64, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_the_same_tokens_and_logprobs_as_torch(V: int, temperature: float) -> None:
    g = torch.Generator().manual_seed(V)
    logits = torch.randn(V, generator=g) * 3
    logits[V // 2 : V // 2 + 2] = -math.inf
    u = torch.cat([torch.rand(60, generator=g, dtype=torch.float64), torch.tensor([0.0, 1 - 2.0**-53])])
    ids, logprobs, finite = draw(logits, temperature, u, "triton")
    want, want_logprobs, _ = draw(logits, temperature, u, "torch")
    assert finite.all()
    assert (ids == want).float().mean() > 0.98  # a number at the very end of an interval
    # Hardly any probability between the two, which at the end of the distribution may be many tokens.
    cdf = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    assert (cdf[ids] - cdf[want]).abs().max() < 1e-4
    same = ids == want
    assert torch.allclose(logprobs[same], want_logprobs[same], rtol=1e-5, atol=1e-5)
    assert not ((ids >= V // 2) & (ids < V // 2 + 2)).any()


def test_greedy_takes_the_first_of_equal_ones_in_any_chunk() -> None:
    logits = torch.zeros(9000)
    logits[[4100, 4200, 8999]] = 2.0
    ids, logprobs, _ = draw(logits, 1.0, torch.rand(3, dtype=torch.float64), "triton", greedy=True)
    assert ids.tolist() == [4100] * 3
    assert logprobs.tolist() == pytest.approx([float(torch.log_softmax(logits, -1)[4100])] * 3, rel=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1.2e-38])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.full((5000,), 7.75)
    logits[4500] = 8.0
    logits[3] = -math.inf
    ids, logprobs, _ = draw(logits, temperature, torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64), "triton")
    assert ids.tolist() == [4500] * 3
    assert logprobs.tolist() == [0.0] * 3


def test_only_tokens_with_mass_are_drawn() -> None:
    logits = torch.full((9000,), -math.inf)
    logits[[17, 5000]] = torch.tensor([-70.0, -70.0])
    u = torch.linspace(0, 1 - 2.0**-53, 40, dtype=torch.float64)
    ids, logprobs, _ = draw(logits, 1.0, u, "triton")
    assert set(ids.tolist()) == {17, 5000}
    assert torch.equal(ids == 17, u < 0.5)
    assert torch.allclose(logprobs, torch.full((40,), math.log(0.5)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
def test_rows_that_are_not_finite_are_named(bad: float | str) -> None:
    logits = torch.zeros(3, 5000)
    if isinstance(bad, str):
        logits[1] = -math.inf
    else:
        logits[1, 4999] = bad
    rows = (torch.ones(3), torch.zeros(3, dtype=torch.bool), torch.full((3,), 0.5, dtype=torch.float64))
    for backend in ("torch", "triton"):
        ids, _, finite = draw_tokens(logits.bfloat16().to(DEVICE), *(t.to(DEVICE) for t in rows), backend=backend)
        assert finite.tolist() == [True, False, True]
        assert ((ids >= 0) & (ids < 5000)).all()


def test_operands_that_do_not_fit_are_refused() -> None:
    rows = (torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(KernelError, match="contiguous BF16 logits"):
        draw_tokens(torch.zeros(2, 8, device=DEVICE), *(t.to(DEVICE) for t in rows), backend="triton")
    with pytest.raises(KernelError, match=r"temperature must be torch.float32 \[3\]"):
        draw_tokens(torch.zeros(3, 8), *rows, backend="torch")
