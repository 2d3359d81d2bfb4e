"""What must hold before a training step is timed: roundings bit for bit, experts within a derived bound."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.bench.train_model import GUIDED, QAT, TrainShape, TrainStep
from tracefp4.formats import get_format
from tracefp4.guidance import encode
from tracefp4.nn import fake_quantize, guided_round
from tracefp4.nn.dispatch import Dispatch, grouped_linear
from tracefp4.nn.rounding import fake_quantized_matrices

SMALL = TrainShape(layers=2, hidden=64, experts=8, top=4, width=32, heads=4, kv_heads=2, head_dim=32, vocab=64,
                   tokens=96, length=24)  # fmt: skip


def _same(got: Tensor, want: Tensor, what: str) -> None:
    different = int((got.detach().cpu().view(torch.int16) != want.detach().cpu().view(torch.int16)).sum())
    assert different == 0, f"{what}: {different} of {want.numel()} values differ"


def check_roundings(device: torch.device, backend: str) -> str:
    """guided_round and fake_quantize on the device against the reference on the CPU, values and gradients; weights."""
    g = torch.Generator().manual_seed(0)
    for K in (64, 768):
        x = torch.randn(37, K, generator=g)
        noisy = (x * (1 + 0.05 * torch.randn(37, K, generator=g))).bfloat16()
        valid = torch.arange(37) % 5 != 3
        for bits, rule, scale in ((1.125, "cell", "row"), (1.5, "bracket", "row-pow2"), (4.5, "cell", 2.0)):
            record = encode(get_format("nvfp4").quantize(x.bfloat16(), encode_scale=scale), bits, valid=valid)
            ours = noisy.clone().to(device).requires_grad_()
            y = guided_round(ours, record.to(device), rule, None, scale, backend)
            _same(y, guided_round(noisy, record, rule, None, scale, "torch"), f"guided_round, {bits} bits, {rule}")
            upstream = torch.randn(37, K, generator=g).bfloat16().to(device)
            (gradient,) = torch.autograd.grad(y, ours, upstream)
            _same(gradient, upstream, "gradient of guided_round")
        for scale in ("row", "row-pow2", 3.0):
            want = fake_quantize(noisy, "nvfp4", scale, "torch")
            _same(fake_quantize(noisy.to(device), "nvfp4", scale, backend), want, f"fake_quantize, {scale}")
    w = torch.randn(5, 48, 64, generator=g).bfloat16() * torch.tensor([1, 1e-3, 1e3, 1, 0])[:, None, None].bfloat16()
    for pow2 in (False, True):
        (want,) = fake_quantized_matrices([w], "nvfp4", pow2, "torch")
        (got,) = fake_quantized_matrices([w.to(device)], "nvfp4", pow2, backend)
        _same(got, want, "fake-quantized weights")
    return "roundings: equal bits"


def check_products(device: torch.device, products: str) -> str:
    """Grouped experts on the device against a loop in FP64: forward and both gradients, one expert without tokens.

    Exact products of BF16 numbers, summed in FP32 and rounded once: off by half a BF16 step (2^-9 of the result), and
    by n 2^-24 of the sum of the n products' sizes. Twice that is allowed.
    """
    g = torch.Generator().manual_seed(0)
    E, O, I, N, K = 6, 48, 64, 80, 3
    chosen = torch.stack([torch.randperm(E - 1, generator=g)[:K] for _ in range(N)])  # the last expert stays idle
    x = torch.randn(N, I, generator=g).bfloat16()
    w = torch.randn(E, O, I, generator=g).bfloat16()
    up = torch.randn(N * K, O, generator=g).bfloat16()
    ours, weight = x.clone().to(device).requires_grad_(), w.clone().to(device).requires_grad_()
    dispatch = Dispatch.of(chosen.to(device), E)
    rows = dispatch.scatter(ours).detach().requires_grad_()
    y = grouped_linear(rows, weight, dispatch.offsets_E, products)
    dx, dw = torch.autograd.grad(y, (rows, weight), up.to(device))
    expert = chosen.reshape(-1)[dispatch.order_M.cpu()]
    r, m, u = rows.detach().cpu().double(), w.double()[expert], up.double()
    hot = F.one_hot(expert, E).double()
    exact = {
        "result": (y, torch.einsum("mi,moi->mo", r, m), torch.einsum("mi,moi->mo", r.abs(), m.abs()), I),
        "gradient of x": (dx, torch.einsum("mo,moi->mi", u, m), torch.einsum("mo,moi->mi", u.abs(), m.abs()), O),
        "gradient of w": (
            dw,
            torch.einsum("me,mo,mi->eoi", hot, u, r),
            torch.einsum("me,mo,mi->eoi", hot, u.abs(), r.abs()),
            N * K,
        ),
    }
    for what, (got, want, size, terms) in exact.items():
        want, size = want.detach(), size.detach()
        excess = (got.detach().cpu().double() - want).abs() - 2 * (2.0**-9 * want.abs() + terms * 2.0**-24 * size)
        assert float(excess.max()) <= 0, f"{what} of the experts is off by {float(excess.max()):.2g} more than allowed"
    gates = torch.rand(N, K, generator=g).bfloat16()
    back = dispatch.gather(dispatch.scatter(x.to(device)), gates.to(device)).cpu()
    want_rows = (x[:, None] * gates[..., None]).float().sum(1).bfloat16()
    error = (back.float() - want_rows.float()).abs() - 2.0**-8 * want_rows.float().abs()  # a BF16 step
    assert float(error.max()) <= 0, f"scatter and gather are off by {float(error.max()):.2g} more than a BF16 step"
    return "experts: within twice the bound of BF16 results and FP32 sums"


def check_model(device: torch.device, backend: str, products: str) -> str:
    """A small model: kernels against torch on the same device, and guidance that says what the trainer would do."""
    step = TrainStep(SMALL, device, backend, products)
    plain = step.logits(QAT)
    assert bool(torch.isfinite(plain).all()), "the rounded forward is not finite"
    exact = step.records(noise=0.0, valid_every=4)
    _same(step.logits(GUIDED, exact), plain, "guided by its own slots")
    noisy = step.records(noise=0.1)
    guided = step.logits(GUIDED, noisy)
    assert not torch.equal(guided, plain), "guidance changed nothing"
    step.context.backend = "torch"
    step.context.weights_changed()
    _same(step.logits(GUIDED, noisy), guided, "guided forward, kernels against torch")
    _same(step.logits(QAT), plain, "rounded forward, kernels against torch")
    return "model: kernels and torch agree bit for bit; guided by its own slots it equals rounding to nearest"


def check_all(device: torch.device, backend: str = "auto", products: str = "auto") -> list[str]:
    """One phrase a check. Raises AssertionError."""
    return [
        check_roundings(device, backend),
        check_products(device, products),
        check_model(device, backend, products),
    ]
