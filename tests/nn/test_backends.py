"""The kernels' side of the trainer's ops against torch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import tiny_config, tiny_model
from tracefp4.bench.train_checks import check_products
from tracefp4.formats import get_format
from tracefp4.guidance import GuidanceError, encode
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.guided_round import fake_quantize_groups, group_amax
from tracefp4.nn import MicroBatch, TrainerForward, fake_quantize, guided_round, prepare_model
from tracefp4.nn.dispatch import Dispatch, grouped_linear
from tracefp4.nn.rounding import fake_quantized_matrices, uses_kernel
from tracefp4.nn.weights import drop_kept_weights, fake_quantized_weights
from tracefp4.recipe import QuantRecipe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QAT = TrainerForward(weights=True, activations=True, kv=True)
interpreter = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for Inf and NaN


def rows(N: int = 5, K: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).bfloat16()


def equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach().cpu().view(torch.int16), b.detach().cpu().view(torch.int16))


# -- roundings ----------------------------------------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize(
    ("scale", "bits", "rule"), [("row", 1.125, "cell"), ("row-pow2", 1.5, "bracket"), (2.0, 4.5, "cell")]
)
def test_guided_round_is_the_same_by_kernel(scale: Any, bits: float, rule: str) -> None:
    pytest.importorskip("triton")
    x, y = rows(), rows() * 1.05
    valid = torch.tensor([True, False, True, True, False])
    record = encode(get_format("nvfp4").quantize(x, encode_scale=scale), bits, "hash", valid)
    ours = y.clone().to(DEVICE).view(1, 5, 64).requires_grad_()
    with pytest.raises(GuidanceError, match="shape"):
        guided_round(ours, record, rule, "hash", scale, "triton")
    ours = y.clone().to(DEVICE).requires_grad_()
    with pytest.raises(GuidanceError, match="another"):
        guided_round(ours, record, rule, "another", scale, "triton")
    got = guided_round(ours, record, rule, "hash", scale, "triton")
    assert equal(got, guided_round(y, record, rule, "hash", scale, "torch"))
    upstream = rows(seed=1).to(DEVICE)
    assert torch.equal(torch.autograd.grad(got, ours, upstream)[0], upstream)


@interpreter
def test_fake_quantize_is_the_same_by_kernel_for_any_view() -> None:
    pytest.importorskip("triton")
    x = rows(24, 32).view(2, 3, 4, 32)
    strided = x.transpose(1, 2).reshape(2, 4, 96)[:, :, 32:64]  # rows apart by more than their length
    for scale in ("row", "row-pow2", 3.0):
        for view in (x, strided, rows(32, 16).T):
            assert equal(
                fake_quantize(view.to(DEVICE), "nvfp4", scale, "triton"), fake_quantize(view, "nvfp4", scale, "torch")
            )


def test_what_has_no_kernel_is_computed_by_torch_on_every_backend() -> None:
    x = rows()
    for name, scale in (("mxfp4-rceil", None), ("nvfp4-4over6", "row"), ("nvfp4", "tensor")):
        assert torch.equal(fake_quantize(x, name, scale, "triton"), fake_quantize(x, name, scale, "torch"))
    assert not uses_kernel("auto", "nvfp4", x)
    assert not uses_kernel("triton", "nvfp4", x.double())
    with pytest.raises(KernelError, match="cutlass"):
        fake_quantize(x, "nvfp4", "row", "cutlass")


# -- weights ------------------------------------------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-exact"])
@pytest.mark.parametrize("pow2", [False, True])
def test_stacked_weights_are_the_same_by_kernel(pow2: bool, format: str) -> None:
    pytest.importorskip("triton")
    w = rows(3 * 6, 48).view(3, 6, 48) * torch.tensor([1.0, 1e-3, 0.0]).bfloat16()[:, None, None]
    w[0, 1, 2] = float("nan")
    (want,) = fake_quantized_matrices([w], format, pow2, "torch")
    (got,) = fake_quantized_matrices([w.to(DEVICE)], format, pow2, "triton")
    assert got.shape == w.shape
    assert torch.equal(got.cpu().nan_to_num(9.0), want.nan_to_num(9.0))
    two = [rows(6, 48), rows(4, 48, seed=5) * 7]  # a dense MLP's gate and up: one scale for both
    want_two = fake_quantized_matrices(two, format, pow2, "torch")
    got_two = fake_quantized_matrices([w.to(DEVICE) for w in two], format, pow2, "triton")
    assert all(equal(a, b) for a, b in zip(got_two, want_two, strict=True))
    assert not torch.equal(want_two[0], fake_quantized_matrices(two[:1], format, pow2, "torch")[0]) or pow2


@interpreter
def test_largest_magnitude_of_long_groups() -> None:
    pytest.importorskip("triton")
    w = torch.zeros(2, 40000)
    w[0, 39999], w[1, 33000], w[1, 5] = -3.0, 0.5, float("nan")
    assert group_amax(w.to(DEVICE)).tolist() == [3.0, 0.5]
    with pytest.raises(KernelError, match="contiguous"):
        group_amax(w.T.to(DEVICE))
    with pytest.raises(KernelError, match="encode scales"):
        fake_quantize_groups(w.view(2, 100, 400).to(DEVICE), "nvfp4", torch.ones(3, device=DEVICE))


def test_weights_can_be_made_anew_in_every_forward() -> None:
    model = tiny_model(tiny_config(), torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    kept = [fake_quantized_weights(experts, ("down_proj",), "nvfp4", True)[0] for _ in range(2)]
    anew = [fake_quantized_weights(experts, ("down_proj",), "nvfp4", True, keep=False)[0] for _ in range(2)]
    assert kept[0].data_ptr() == kept[1].data_ptr()
    assert anew[0].data_ptr() != anew[1].data_ptr()
    assert torch.equal(kept[0], anew[0])
    drop_kept_weights(model)
    assert "_tracefp4_weights" not in experts.__dict__


def test_a_write_behind_autograds_back_is_noticed_once_told() -> None:
    model = tiny_model(tiny_config())
    context = prepare_model(model, QuantRecipe(2, "nvfp4", "nvfp4", "nvfp4"), QAT)
    ids = torch.arange(6)[None] + 2

    def logits() -> Tensor:
        with torch.no_grad(), context.armed(MicroBatch(0)) as kwargs:
            return model(input_ids=ids, **kwargs).logits

    before = logits()
    model.model.layers[0].mlp.experts.down_proj.data.mul_(3.0)  # leaves version and address as they are
    assert torch.equal(logits(), before)
    context.weights_changed()
    assert not torch.equal(logits(), before)


# -- experts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("products", ["loop", "grouped_mm"])
def test_products_and_their_gradients(products: str) -> None:
    check_products(torch.device(DEVICE), products)


def test_garbage_in_an_idle_experts_gradient_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's grouped product leaves it on Blackwell: the product here is one that does."""
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)

    def product(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        w.register_hook(lambda g: g + torch.tensor([0.0, float("nan"), 0.0])[:, None, None])
        return torch.cat([x[:2] @ w[0], x[2:] @ w[2]])

    monkeypatch.setattr("tracefp4.nn.dispatch._idle_gradients_are_garbage", lambda device: True)
    monkeypatch.setattr("torch.nn.functional.grouped_mm", product)
    x, w = torch.randn(5, 4), torch.randn(3, 2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(grouped_linear(x, w, offsets, "grouped_mm").sum(), w)
    assert gradient[1].abs().max() == 0
    torch.testing.assert_close(gradient[0], x[:2].sum(0).expand(2, 4))


def test_dispatch_orders_pairs_by_expert_and_back() -> None:
    chosen = torch.tensor([[3, 0], [0, 1], [3, 1]])
    d = Dispatch.of(chosen, 5)
    assert d.order_M.tolist() == [1, 2, 3, 5, 0, 4]
    assert d.offsets_E.tolist() == [2, 4, 4, 6, 6]
    assert d.offsets_E.dtype == torch.int32
    assert d.order_M[d.place_M].tolist() == list(range(6))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(d.scatter(x), x[[0, 1, 1, 2, 0, 2]])
    assert torch.autograd.gradcheck(lambda x, g: d.gather(d.scatter(x), g), (x, gates))
    with pytest.raises(KernelError, match="batched"):
        grouped_linear(d.scatter(x), torch.randn(5, 2, 4), d.offsets_E, "batched")


def test_a_layer_asks_the_host_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would have to wait for: numbers read on the host, and sizes that depend on data."""
    from torch.utils._python_dispatch import TorchDispatchMode

    asked: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in (
                "_local_scalar_dense",
                "nonzero",
                "item",
                "bincount",
                "unique",
                "masked_select",
            ):
                asked.append(str(func))
            return func(*args, **(kwargs or {}))

    model = tiny_model(tiny_config(), torch.bfloat16)
    recipe = QuantRecipe(2, "nvfp4", "nvfp4", "nvfp4", guided_layers=(0, 1))
    context = prepare_model(model, recipe, TrainerForward(True, True, True, guided=True), products="grouped_mm")
    # The kernels themselves run outside torch's dispatch; the reference stands in, which is not watched.
    quiet = lambda x, *_, **__: x.clone()  # noqa: E731
    for name in ("fake_quantize", "guided_round"):
        monkeypatch.setattr(f"tracefp4.nn.context.{name}", quiet)
    monkeypatch.setattr(
        "tracefp4.nn.weights.fake_quantized_matrices", lambda weights, *_: [w.detach() for w in weights]
    )
    ids = torch.arange(8)[None] + 2
    experts = {
        i: (torch.zeros(8, 2, dtype=torch.int64) + torch.arange(2), torch.ones(8, dtype=torch.bool)) for i in range(2)
    }
    with context.armed(MicroBatch(0, experts=experts)) as kwargs, Watch():
        model(input_ids=ids, use_cache=False, **kwargs).logits.float().pow(2).sum().backward()
    # transformers looks for packed sequences once a forward; the layers add nothing to that.
    assert len(asked) <= 1
