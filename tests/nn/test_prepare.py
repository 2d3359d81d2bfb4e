"""The prepared model is the stock one until something is quantized, and preparation refuses what it cannot do."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

from tiny import tiny_config, tiny_dense_config, tiny_model
from tracefp4.errors import TracefpError
from tracefp4.nn import TrainerForward, prepare_model
from tracefp4.recipe import QuantRecipe

IDS = torch.tensor([[3, 9, 4, 17, 30, 8, 5], [6, 2, 28, 7, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)


def logits_and_gradients(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=IDS, attention_mask=MASK, use_cache=False).logits[MASK]
    torch.log_softmax(logits, -1)[torch.arange(11), IDS[MASK]].sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("overrides", [{}, {"norm_topk_prob": False}, {"mlp_only_layers": [0]}], ids=str)
def test_unquantized_equals_the_stock_model(attention: str, overrides: dict[str, Any]) -> None:
    """FP32: both sum the same products in another order, so a few ulps of values of order 1."""
    stock, ours = (tiny_model(tiny_config(**overrides)) for _ in range(2))
    stock.set_attn_implementation(attention)
    stock.set_experts_implementation("eager")
    prepare_model(ours, QuantRecipe(num_layers=2), TrainerForward())
    (want, want_gradients), (got, gradients) = logits_and_gradients(stock), logits_and_gradients(ours)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in gradients.items():
        assert want_gradients[name].abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, want_gradients[name], rtol=1e-5, atol=5e-6, msg=name)


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": False}], ids=str)
def test_an_unquantized_dense_model_equals_the_stock_one(overrides: dict[str, Any]) -> None:
    stock, ours = (tiny_model(tiny_dense_config(**overrides)) for _ in range(2))
    prepare_model(ours, QuantRecipe(num_layers=2), TrainerForward())
    assert ours.state_dict().keys() == stock.state_dict().keys()
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in stock.named_parameters()]
    (want, want_gradients), (got, gradients) = logits_and_gradients(stock), logits_and_gradients(ours)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    for name, gradient in gradients.items():
        assert want_gradients[name].abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, want_gradients[name], rtol=1e-5, atol=5e-6, msg=name)


def test_dense_layers_of_a_mixture_are_left_alone() -> None:
    """mlp_only_layers and decoder_sparse_step: neither path quantizes those MLPs."""
    model = tiny_model(tiny_config(num_hidden_layers=3, decoder_sparse_step=2, mlp_only_layers=[1]))
    stock = [type(layer.mlp) for layer in model.model.layers]
    prepare_model(model, QuantRecipe(num_layers=3, weights="nvfp4"), TrainerForward(weights=True))
    assert [type(layer.mlp) for layer in model.model.layers] == stock == [Qwen3MoeMLP] * 3


@torch.no_grad()
def test_the_mask_hides_tokens_wherever_they_stand() -> None:
    """Right padding is hidden by causality alone; a hole in the middle is not, unless the mask really arrives."""
    mask = torch.ones_like(MASK)
    mask[:, 2:4] = False
    stock, ours = (tiny_model(tiny_config()) for _ in range(2))
    stock.set_attn_implementation("eager")
    prepare_model(ours, QuantRecipe(num_layers=2), TrainerForward())
    want, got = (m(input_ids=IDS, attention_mask=mask, use_cache=False).logits[mask] for m in (stock, ours))
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    assert (want - stock(input_ids=IDS, use_cache=False).logits[mask]).abs().max() > 0.01


def test_other_architecture_is_refused() -> None:
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config)
    before = model.config._attn_implementation
    with pytest.raises(TracefpError, match="'qwen2' is not supported; use one of qwen3_moe, qwen3"):
        prepare_model(model, QuantRecipe(num_layers=2), TrainerForward())
    assert model.config._attn_implementation == before


def test_double_preparation_is_refused() -> None:
    model, recipe = tiny_model(tiny_config()), QuantRecipe(num_layers=2)
    prepare_model(model, recipe, TrainerForward())
    with pytest.raises(TracefpError, match="already prepared"):
        prepare_model(model, recipe, TrainerForward())


def test_wrong_number_of_layers_is_refused() -> None:
    with pytest.raises(TracefpError, match="for 3 layers, the model has 2"):
        prepare_model(tiny_model(tiny_config()), QuantRecipe(num_layers=3), TrainerForward())


@pytest.mark.parametrize("part", ["attn", "experts"])
def test_an_interface_that_did_not_take_is_an_error(part: str) -> None:
    model = tiny_model(tiny_config())
    setattr(model, f"set_{part}_implementation", lambda name: None)
    with pytest.raises(TracefpError, match="did not switch its " + ("attention" if part == "attn" else "experts")):
        prepare_model(model, QuantRecipe(num_layers=2), TrainerForward())
