"""The MLP of a dense model as one expert: forward and gradient by hand, the weight cache, the engine's bits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tracefp4.nn.rounding as rounding_module
from tiny import make_engine, tiny_dense_config, tiny_model
from tracefp4.formats import get_format
from tracefp4.nn import GuidanceContext, TrainerForward, fake_quantize, prepare_model
from tracefp4.nn.dense import QuantizedMLP
from tracefp4.nn.weights import fake_quantized_weights
from tracefp4.recipe import QuantRecipe, quantize_expert_weights

QAT = TrainerForward(weights=True, activations=True, kv=True)
NAMES = ("gate_proj", "up_proj", "down_proj")
GATE_UP = ("gate_proj.weight", "up_proj.weight")


def prepared(forward: TrainerForward = QAT, **recipe: Any) -> tuple[QuantizedMLP, GuidanceContext]:
    """The MLP of layer 1."""
    model = tiny_model(tiny_dense_config())
    formats = {"weights": "nvfp4", "activations": "nvfp4", "kv": "nvfp4"}
    context = prepare_model(model, QuantRecipe(num_layers=2, **{**formats, **recipe}), forward)
    mlp = model.model.layers[1].mlp
    assert isinstance(mlp, QuantizedMLP)
    return mlp, context


def hidden() -> Tensor:
    return torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(3))


def rounded_weights(mlp: QuantizedMLP, r: QuantRecipe) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up under one scale, down under its own."""
    gate, up, down = (getattr(mlp, name).weight.detach() for name in NAMES)
    if r.weights is None:
        return gate, up, down
    fmt = get_format(r.weights)
    gate_up = fmt.dequantize(quantize_expert_weights(torch.cat([gate, up])[None], r.weights, r.pow2))[0]
    return *gate_up.chunk(2), fmt.dequantize(quantize_expert_weights(down[None], r.weights, r.pow2))[0]


def by_hand(weights: tuple[Tensor, Tensor, Tensor], x: Tensor, act: tuple[str, Any] | None) -> Tensor:
    gate, up, down = weights
    x = x if act is None else fake_quantize(x, *act)
    a = F.silu(x @ gate.T) * (x @ up.T)
    return (a if act is None else fake_quantize(a, *act)) @ down.T


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"encode_scale": "row"},
        {"activations": None},
        {"weights": None},
        {"weights": "mxfp4-rceil", "activations": "mxfp4-rceil"},
    ],
    ids=str,
)
def test_forward_equals_the_formula(recipe: dict[str, Any]) -> None:
    mlp, context = prepared(**recipe)
    r = context.recipe
    act = None if r.activations is None else (r.activations, r.encode_scale)
    want = by_hand(rounded_weights(mlp, r), hidden(), act)
    got = mlp(hidden())
    assert got.shape == (2, 3, 64)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    plain = by_hand(rounded_weights(mlp, QuantRecipe(num_layers=2)), hidden(), None)
    assert (want - plain).abs().max() > 1e-2


def test_the_input_is_a_recorded_site_of_one_row_a_token() -> None:
    mlp, context = prepared()
    calls: list[tuple[str, int, Tensor]] = []
    original = context.round_site

    def spy(site: str, layer: int, x: Tensor) -> Tensor:
        calls.append((site, layer, x))
        return original(site, layer, x)

    context.round_site = spy  # type: ignore[method-assign]
    mlp(hidden())
    assert [(site, layer) for site, layer, _ in calls] == [("expert_input", 1)]
    assert torch.equal(calls[0][2], hidden().view(6, 64))


def test_gradients_pass_straight_through() -> None:
    mlp, context = prepared()
    x = hidden().requires_grad_()
    upstream = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    leaves = tuple(getattr(mlp, name).weight for name in NAMES)
    got = torch.autograd.grad(mlp(x), (*leaves, x), upstream)
    gate, up, down = (w + (q - w).detach() for w, q in zip(leaves, rounded_weights(mlp, context.recipe), strict=True))
    act = ("nvfp4", context.recipe.encode_scale)
    want = torch.autograd.grad(by_hand((gate, up, down), x, act), (*leaves, x), upstream)
    for g, w in zip(got, want, strict=True):
        assert g.abs().max() > 0.1
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_weights_are_quantized_once_per_value(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(weight: Tensor, *args: Any) -> Any:
        calls.append(weight.shape[1])
        return quantize_expert_weights(weight, *args)

    monkeypatch.setattr(rounding_module, "quantize_expert_weights", counted)
    mlp, context = prepared()
    for _ in range(3):
        mlp(hidden()).sum().backward()
    assert calls == [192, 64]  # gate and up together, down
    with torch.no_grad():
        mlp.up_proj.weight.mul_(3)
    gate, up = fake_quantized_weights(mlp, GATE_UP, "nvfp4", True)
    assert calls == [192, 64, 192]
    want = rounded_weights(mlp, context.recipe)
    assert torch.equal(gate, want[0]), "the scale is shared, so gate moves with up"
    assert torch.equal(up, want[1])


@pytest.mark.parametrize("encode_scale", ["row", "row-pow2"])
def test_weight_codes_equal_the_engines_bit_for_bit(encode_scale: str) -> None:
    config, pow2 = tiny_dense_config(), encode_scale == "row-pow2"
    engine = make_engine("qat", "bfloat16", config=config, quant={"encode_scale": encode_scale}, load=False)
    model = tiny_model(config, "bfloat16")
    engine.update_weights(model.named_parameters(), 0)
    prepare_model(model, engine.recipe, QAT)
    for layer, rollout in zip(model.model.layers, engine.model._layers, strict=True):
        for names, matrices in ((GATE_UP, rollout.gate_up), (("down_proj.weight",), rollout.down)):
            assert matrices is not None
            assert matrices.blocks is not None
            used = torch.cat(fake_quantized_weights(layer.mlp, names, "nvfp4", pow2))
            assert torch.equal(used, get_format("nvfp4").dequantize(matrices.blocks, dtype=torch.bfloat16)[0])
