"""Quantized experts against a loop over tokens, the weight cache, and the engine's weights bit for bit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracefp4.nn.rounding as rounding_module
from tiny import make_engine, tiny_config, tiny_model
from tracefp4.formats import get_format
from tracefp4.nn import GuidanceContext, TrainerForward, fake_quantize, prepare_model
from tracefp4.nn.weights import fake_quantized_weight
from tracefp4.recipe import QuantRecipe, quantize_expert_weights
from tracefp4.train.optimizer import MasterOptimizer

QAT = TrainerForward(weights=True, activations=True, kv=True)
TOKENS, HIDDEN = 5, 64


def prepared(forward: TrainerForward = QAT, **recipe: Any) -> tuple[nn.Module, GuidanceContext]:
    """The experts of layer 0."""
    model = tiny_model(tiny_config())
    formats = {"weights": "nvfp4", "activations": "nvfp4", "kv": "nvfp4"}
    context = prepare_model(model, QuantRecipe(num_layers=2, **{**formats, **recipe}), forward)
    return model.model.layers[0].mlp.experts, context


def dispatch() -> tuple[Tensor, Tensor, Tensor]:
    """hidden [N, H], experts [N, 2] of which several stay empty, gates [N, 2]."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g)
    chosen = torch.tensor([[0, 5], [5, 1], [7, 0], [1, 5], [5, 7]])
    return hidden, chosen, torch.rand(TOKENS, 2, generator=g)


def dequantized(weight: Tensor, name: str, pow2: bool) -> Tensor:
    return get_format(name).dequantize(quantize_expert_weights(weight.detach(), name, pow2))


def by_hand(
    gate_up: Tensor, down: Tensor, hidden: Tensor, chosen: Tensor, gates: Tensor, act: tuple[str, Any] | None
) -> Tensor:
    """One token and one expert at a time; act: (format, encode scale) of the activations, None unrounded."""
    out = torch.zeros(TOKENS, HIDDEN)
    for t in range(TOKENS):
        x = hidden[t : t + 1]
        x = x if act is None else fake_quantize(x, *act)
        for e, g in zip(chosen[t].tolist(), gates[t], strict=True):
            gate, up = (x @ gate_up[e].T).chunk(2, -1)
            a = F.silu(gate) * up
            a = a if act is None else fake_quantize(a, *act)
            out[t] = out[t] + g * (a @ down[e].T)[0]
    return out


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"encode_scale": "row"},
        {"activations": None},
        {"weights": None},
        {"weights": "nvfp4-4over6", "activations": "nvfp4-4over6"},
        {"weights": "mxfp4-rceil", "activations": "mxfp4-rceil"},
    ],
    ids=str,
)
def test_forward_equals_a_loop_over_tokens(recipe: dict[str, Any]) -> None:
    experts, context = prepared(**recipe)
    r = context.recipe
    weights = (experts.gate_up_proj, experts.down_proj)
    if r.weights is not None:
        weights = tuple(dequantized(w, r.weights, r.pow2) for w in weights)
    act = None if r.activations is None else (r.activations, r.encode_scale)
    want = by_hand(*weights, *dispatch(), act)
    torch.testing.assert_close(experts(*dispatch()), want, rtol=1e-5, atol=1e-6)
    unrounded = by_hand(experts.gate_up_proj, experts.down_proj, *dispatch(), None)
    assert (want - unrounded).abs().max() > 1e-2


def test_forward_mirrors_only_what_the_method_asks_for() -> None:
    experts, _ = prepared(TrainerForward())
    want = by_hand(experts.gate_up_proj, experts.down_proj, *dispatch(), None)
    torch.testing.assert_close(experts(*dispatch()), want, rtol=1e-5, atol=1e-6)


def test_input_is_rounded_once_per_token_before_dispatch() -> None:
    experts, context = prepared()
    calls: list[tuple[str, int, Tensor]] = []
    original = context.round_site

    def spy(site: str, layer: int, x: Tensor) -> Tensor:
        calls.append((site, layer, x))
        return original(site, layer, x)

    context.round_site = spy  # type: ignore[method-assign]
    hidden, chosen, gates = dispatch()
    experts(hidden, chosen, gates)
    assert [(site, layer) for site, layer, _ in calls] == [("expert_input", 0)]
    assert torch.equal(calls[0][2], hidden)


def test_weight_gradient_passes_straight_through() -> None:
    experts, context = prepared()
    hidden, chosen, gates = dispatch()
    hidden.requires_grad_()
    upstream = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    leaves = (experts.gate_up_proj, experts.down_proj, hidden)
    got = torch.autograd.grad(experts(hidden, chosen, gates), leaves, upstream)
    weights = [w + (dequantized(w, "nvfp4", True) - w).detach() for w in leaves[:2]]
    act = ("nvfp4", context.recipe.encode_scale)
    want = torch.autograd.grad(by_hand(*weights, hidden, chosen, gates, act), leaves, upstream)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    assert got[0][2].abs().max() == 0, "an expert without tokens has a gradient"


# -- the cache --------------------------------------------------------------------------------------------------


@pytest.fixture
def quantizations(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Grows by one weight with each quantization."""
    calls: list[Tensor] = []

    def counted(weight: Tensor, *args: Any) -> Any:
        calls.append(weight)
        return quantize_expert_weights(weight, *args)

    monkeypatch.setattr(rounding_module, "quantize_expert_weights", counted)
    return calls


def value(experts: nn.Module) -> Tensor:
    return fake_quantized_weight(experts, "gate_up_proj", "nvfp4", True).detach()


def test_weights_are_quantized_once_per_value(quantizations: list[Tensor]) -> None:
    experts, _ = prepared()
    for _ in range(3):
        experts(*dispatch()).sum().backward()
    assert len(quantizations) == 2  # gate and up, down


def in_place(experts: nn.Module) -> None:
    with torch.no_grad():
        experts.gate_up_proj.mul_(1.5)


def optimizer_step(experts: nn.Module) -> None:
    optimizer = MasterOptimizer(experts, 0.1, (0.9, 0.95), 1e-8, 0.0, 1.0)
    experts(*dispatch()).square().sum().backward()
    optimizer.accumulate()
    optimizer.step(0.1)


def loaded(experts: nn.Module) -> None:
    experts.load_state_dict({k: 1.5 * v for k, v in experts.state_dict().items()})


def assigned(experts: nn.Module) -> None:
    experts.load_state_dict({k: 1.5 * v for k, v in experts.state_dict().items()}, assign=True)


def new_data(experts: nn.Module) -> None:
    experts.gate_up_proj.data = 1.5 * experts.gate_up_proj.data


def cast(experts: nn.Module) -> None:
    experts.to(torch.bfloat16)


@pytest.mark.parametrize("change", [in_place, optimizer_step, loaded, assigned, new_data, cast])
def test_cache_follows_the_weight(change: Any) -> None:
    experts, _ = prepared()
    before = value(experts)
    change(experts)
    after, weight = value(experts), experts.gate_up_proj
    assert after.dtype == weight.dtype
    assert torch.equal(after, dequantized(weight, "nvfp4", True).to(weight.dtype))
    assert not torch.equal(after.float(), before)


# -- against the rollout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encode_scale", ["row", "row-pow2"])
def test_weight_codes_equal_the_engines_bit_for_bit(encode_scale: str) -> None:
    config, pow2 = tiny_config(), encode_scale == "row-pow2"
    engine = make_engine("qat", "bfloat16", config=config, quant={"encode_scale": encode_scale}, load=False)
    model = tiny_model(config, "bfloat16")
    engine.update_weights(model.named_parameters(), 0)
    prepare_model(model, engine.recipe, QAT)
    for layer, rollout in zip(model.model.layers, engine.model._layers, strict=True):
        for name, matrices in (("gate_up_proj", rollout.gate_up), ("down_proj", rollout.down)):
            mine = quantize_expert_weights(getattr(layer.mlp.experts, name), "nvfp4", pow2)
            assert torch.equal(mine.codes, matrices.blocks.codes)
            assert torch.equal(mine.scales, matrices.blocks.scales)
            assert torch.equal(mine.encode_scale, matrices.blocks.encode_scale)
            used = fake_quantized_weight(layer.mlp.experts, name, "nvfp4", pow2)
            assert torch.equal(used, get_format("nvfp4").dequantize(matrices.blocks, dtype=torch.bfloat16))
            if pow2:  # then BF16 holds the rollout's operand times its epilogue exactly
                product = matrices.operand_EOI * matrices.epilogue_E[:, None, None]
                assert torch.equal(used.float(), product)
