"""Attention over rounded K and V: which values, in which rows, with which gradient.

Legend: B sequences, T tokens, G KV heads, Q query heads, D head_dim.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from tiny import tiny_config, tiny_model
from tracefp4.nn import GuidanceContext, TrainerForward, fake_quantize, prepare_model
from tracefp4.recipe import QuantRecipe

QAT = TrainerForward(weights=True, activations=True, kv=True)
RECIPE = QuantRecipe(num_layers=2, weights="nvfp4", activations="nvfp4", kv="nvfp4")
IDS = torch.tensor([[3, 9, 4, 17, 30, 8, 5], [6, 2, 28, 7, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)


def prepared(recipe: QuantRecipe, forward: TrainerForward) -> tuple[Qwen3MoeForCausalLM, GuidanceContext]:
    model = tiny_model(tiny_config())
    return model, prepare_model(model, recipe, forward)


def forward(model: Qwen3MoeForCausalLM, ids: Tensor = IDS, mask: Tensor | None = MASK) -> Tensor:
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


@torch.no_grad()
def test_padding_has_no_influence() -> None:
    """Bit for bit: other tokens in the padding leave every product of the real rows what it was."""
    model, _ = prepared(RECIPE, QAT)
    other = torch.where(MASK, IDS, 13)
    assert torch.equal(forward(model)[MASK], forward(model, other)[MASK])


@torch.no_grad()
@pytest.mark.parametrize("rounded", [False, True])
def test_padded_rows_equal_an_unpadded_forward(rounded: bool) -> None:
    """FP32 products in another order, so up to ulps; no value of this model lies that near to a rounding tie."""
    model, _ = prepared(RECIPE, TrainerForward(kv=True) if rounded else TrainerForward())
    padded = forward(model)
    for b, n in enumerate(MASK.sum(-1).tolist()):
        alone = forward(model, IDS[b : b + 1, :n], None)
        torch.testing.assert_close(padded[b, :n], alone[0], rtol=1e-5, atol=1e-5)


class Probe:
    """Outputs of layer 0's attention parts in one forward, K and V as the layer computed them."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self.model, self.seen = model, {}
        attention = model.model.layers[0].self_attn
        for name in ("q_norm", "k_norm", "v_proj", "o_proj"):
            getattr(attention, name).register_forward_hook(self._keep(name))
        attention.o_proj.register_forward_pre_hook(lambda m, args: self.seen.update(context=args[0]))

    def _keep(self, name: str) -> Callable[..., None]:
        return lambda module, args, output: self.seen.update({name: output})

    def qkv(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [B, Q, T, D], k before RoPE, k after RoPE and v [B, G, T, D]."""
        q, k = self.seen["q_norm"].transpose(1, 2), self.seen["k_norm"].transpose(1, 2)
        v = self.seen["v_proj"].unflatten(-1, (2, 32)).transpose(1, 2)
        position = torch.arange(IDS.shape[1])[None]
        cos, sin = self.model.model.rotary_emb(v, position)
        q, rotated = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k, rotated, v


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention written out; query head h reads KV head h // 2."""
    out = torch.zeros_like(q)
    T = q.shape[2]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    for h in range(q.shape[1]):
        scores = (q[:, h] @ k[:, h // 2].transpose(1, 2)) / 32**0.5
        out[:, h] = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v[:, h // 2]
    return out.transpose(1, 2).flatten(2)


def rounded(x: Tensor) -> Tensor:
    """[B, G, T, D] rounded in rows of one token, static encode scale 1."""
    B, G, T, D = x.shape
    rows = fake_quantize(x.transpose(1, 2).reshape(B * T, G * D), "nvfp4", 1.0)
    return rows.view(B, T, G, D).transpose(1, 2)


@torch.no_grad()
def test_k_is_rounded_after_rope_and_v_as_projected() -> None:
    model, _ = prepared(RECIPE, TrainerForward(kv=True))
    probe = Probe(model)
    forward(model)
    q, k_before, k, v = probe.qkv()
    got = probe.seen["context"][MASK]
    torch.testing.assert_close(got, attend(q, rounded(k), rounded(v))[MASK], rtol=1e-5, atol=1e-6)
    # What the comparison must be able to tell apart.
    position = torch.arange(IDS.shape[1])[None]
    _, too_early = apply_rotary_pos_emb(q, rounded(k_before), *model.model.rotary_emb(v, position))
    for wrong_k, wrong_v in ((k, v), (too_early, rounded(v)), (rounded(k), v)):
        assert (got - attend(q, wrong_k, wrong_v)[MASK]).abs().max() > 1e-3


@torch.no_grad()
def test_a_row_is_one_token_over_all_heads() -> None:
    model, context = prepared(RECIPE, TrainerForward(kv=True))
    rows: dict[tuple[str, int], Tensor] = {}
    original = context.round_site

    def spy(site: str, layer: int, x: Tensor) -> Tensor:
        rows.setdefault((site, layer), x.clone())
        return original(site, layer, x)

    context.round_site = spy  # type: ignore[method-assign]
    probe = Probe(model)
    forward(model)
    _, _, k, v = probe.qkv()
    assert set(rows) == {(site, layer) for site in ("key", "value", "expert_input") for layer in (0, 1)}
    for site, x in (("key", k), ("value", v)):
        assert rows[site, 0].shape == (2 * 7, 2 * 32)
        for b in range(2):
            for t in range(7):
                assert torch.equal(rows[site, 0][b * 7 + t], torch.cat([x[b, 0, t], x[b, 1, t]]))


def test_gradients_pass_straight_through_to_the_projections() -> None:
    """The gradient of k_proj and v_proj is the unrounded graph's, taken at the rounded values."""
    model, _ = prepared(RECIPE, TrainerForward(kv=True))
    attention = model.model.layers[0].self_attn
    probe = Probe(model)
    forward(model)
    q, _, k, v = probe.qkv()
    weights = [attention.k_proj.weight, attention.v_proj.weight, attention.k_norm.weight]
    upstream = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0)) * MASK[..., None]
    got = torch.autograd.grad(probe.seen["o_proj"], weights, upstream, retain_graph=True)
    k_hat, v_hat = (x + (rounded(x) - x).detach() for x in (k, v))
    out = attend(q, k_hat, v_hat) @ attention.o_proj.weight.T
    want = torch.autograd.grad(out, weights, upstream, retain_graph=True)
    at_unrounded = torch.autograd.grad(attend(q, k, v) @ attention.o_proj.weight.T, weights, upstream)
    for g, w, u in zip(got, want, at_unrounded, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
        assert (g - u).abs().max() > 1e-3
