"""FP32 masters beside a BF16 model."""

import math

import pytest
import torch
from torch import Tensor, nn

from tracefp4.train.optimizer import MasterOptimizer

LR, BETAS, EPS = 3e-3, (0.9, 0.95), 1e-8


class Small(nn.Module):
    """A matrix, a vector, and a matrix that does not train."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        # Values that BF16 holds exactly: both dtypes start from the same weights.
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=g).bfloat16().to(dtype))
        self.vector = nn.Parameter(torch.randn(3, generator=g).bfloat16().to(dtype))
        self.frozen = nn.Parameter(torch.ones(2, 2, dtype=dtype), requires_grad=False)

    def loss(self, seed: int) -> Tensor:
        """Linear in the weights, so that gradients do not depend on their rounding."""
        g = torch.Generator().manual_seed(seed)
        a = torch.randn(4, 3, generator=g).bfloat16().to(self.matrix.dtype)
        b = torch.randn(3, generator=g).bfloat16().to(self.matrix.dtype)
        return (a * self.matrix).sum().float() + (b * self.vector).sum().float()


def masters_of(optimizer: MasterOptimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = optimizer.state_tensors(model)
    return {name.removeprefix("master."): t for name, t in tensors.items() if name.startswith("master.")}


def test_state_goes_on_where_it_was() -> None:
    models = [nn.Linear(4, 3).bfloat16() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [MasterOptimizer(m, 1e-2, (0.9, 0.95), 1e-8, 0.0, 1.0) for m in models]

    def update(i: int, x: torch.Tensor) -> None:
        models[i](x).float().pow(2).sum().backward()
        optimizers[i].accumulate()
        optimizers[i].step(1e-2)

    xs = [torch.randn(5, 4, generator=torch.Generator().manual_seed(s)).bfloat16() for s in range(4)]
    for x in xs[:2]:
        update(0, x)
    optimizers[1].load_state_tensors(models[1], optimizers[0].state_tensors(models[0]))
    for i in (0, 1):
        for x in xs[2:]:
            update(i, x)
    a, b = (o.state_tensors(m) for o, m in zip(optimizers, models, strict=True))
    assert a.keys() == b.keys()
    assert {name.split(".")[0] for name in a} == {"master", "exp_avg", "exp_avg_sq", "steps"}
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(models[0].weight, models[1].weight)


def optimizer_of(model: nn.Module, weight_decay: float = 0.0, grad_clip: float = 1e9) -> MasterOptimizer:
    return MasterOptimizer(model, LR, BETAS, EPS, weight_decay, grad_clip)


def backward(model: Small, optimizer: MasterOptimizer, seed: int) -> None:
    model.loss(seed).backward()
    optimizer.accumulate()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_follow_torch_adamw_on_fp32(dtype: torch.dtype) -> None:
    """Over steps of two backwards each: gradients add up in FP32, weights are the masters rounded once."""
    reference, model = Small(torch.float32), Small(dtype)
    adamw = torch.optim.AdamW(
        [
            {"params": [reference.matrix], "weight_decay": 0.1},
            {"params": [reference.vector], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    optimizer = optimizer_of(model, weight_decay=0.1)
    for step in range(5):
        for seed in (2 * step, 2 * step + 1):
            reference.loss(seed).backward()
            backward(model, optimizer, seed)
        want = math.sqrt(float(sum(p.grad.square().sum() for p in (reference.matrix, reference.vector))))
        assert optimizer.step(LR) == pytest.approx(want, rel=1e-6)
        adamw.step()
        adamw.zero_grad()
        masters = masters_of(optimizer, model)
        assert masters.keys() == {"matrix", "vector"}
        for name, master in masters.items():
            torch.testing.assert_close(master, getattr(reference, name).detach(), rtol=1e-6, atol=1e-7)
            assert torch.equal(getattr(model, name), master.to(dtype))
    assert torch.equal(model.frozen, torch.ones(2, 2, dtype=dtype))


def test_gradient_is_clipped_by_its_norm_and_the_norm_before_is_returned() -> None:
    """AdamW's first step is the same for any clipped gradient, so its second moment is looked at."""
    model, second = Small(torch.bfloat16), []
    for clip in (1e9, 0.01):
        model = Small(torch.bfloat16)
        optimizer = optimizer_of(model, grad_clip=clip)
        backward(model, optimizer, 0)
        norm = optimizer.step(LR)
        second.append(sum(float(s["exp_avg_sq"].sum()) for s in optimizer.adamw.state.values()))
    assert norm > 1
    assert math.sqrt(second[1] / second[0]) == pytest.approx(0.01 / norm, rel=1e-4)


def test_tiny_updates_are_not_swallowed() -> None:
    """At weight 1 BF16 has steps of 2^-7; 400 updates of 1e-4 move the master by .04, the weight with it."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
        assert (model.weight - 1e-4).item() == 1.0
    optimizer = MasterOptimizer(model, 1e-4, BETAS, EPS, 0.0, 1e9)
    for _ in range(400):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.accumulate()
        optimizer.step(1e-4)
    assert optimizer.masters[0].item() == pytest.approx(0.96, abs=1e-4)
    assert model.weight.item() == pytest.approx(0.96, abs=2**-8)


def test_small_gradients_are_summed_in_fp32() -> None:
    """256 + 1 + 1 is 256 in BF16."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = optimizer_of(model)
    for value in (256.0, 1.0, 1.0):
        model.weight.grad = torch.full_like(model.weight, value)
        optimizer.accumulate()
        assert model.weight.grad is None
    assert optimizer.step(LR) == 258


def test_gradients_do_not_leak_into_the_next_step() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = Small(dtype)
        optimizer = optimizer_of(model)
        norms = []
        for _ in range(2):
            backward(model, optimizer, 0)
            norms.append(optimizer.step(LR))
        assert norms[0] == norms[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    model, twin = Small(dtype), Small(dtype)
    optimizer, other = optimizer_of(model, 0.1), optimizer_of(twin, 0.1)
    for o, m in ((optimizer, model), (other, twin)):
        backward(m, o, 0)
        o.step(LR)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (model.loss(1) * bad).backward()
    optimizer.accumulate()
    with pytest.raises(FloatingPointError, match=r"norm is (nan|inf); the update was not applied"):
        optimizer.step(LR)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    # Nor is the bad gradient, or a moment of it, left behind.
    for o, m in ((optimizer, model), (other, twin)):
        backward(m, o, 2)
        o.step(LR)
    for name, master in masters_of(optimizer, model).items():
        assert torch.equal(master, masters_of(other, twin)[name])


def test_weight_decay_is_on_matrices_only() -> None:
    model, start = Small(torch.float32), Small(torch.float32)
    optimizer = optimizer_of(model, weight_decay=0.5)
    for p in (model.matrix, model.vector):
        p.grad = torch.zeros_like(p)
    optimizer.step(LR)
    assert torch.equal(model.vector, start.vector)
    torch.testing.assert_close(model.matrix, start.matrix * (1 - 0.5 * LR))


def test_learning_rate_is_the_steps() -> None:
    """The first AdamW step moves every weight by lr, whatever its gradient."""
    model, start = Small(torch.float32), Small(torch.float32)
    optimizer = optimizer_of(model)
    backward(model, optimizer, 0)
    optimizer.step(0.25 * LR)
    torch.testing.assert_close((model.matrix - start.matrix).abs(), torch.full((4, 3), 0.25 * LR), rtol=1e-3, atol=0)
