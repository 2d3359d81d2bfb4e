"""Routing replay: the rollout's experts, gates and gradients from the trainer's own router."""

import pytest
import torch
from torch import Tensor, nn

from tiny import tiny_config, tiny_model
from tracefp4.nn import GuidanceContext, MicroBatch, SiteObserver, TrainerForward, prepare_model
from tracefp4.recipe import QuantRecipe

HIDDEN = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
VALID = torch.tensor([True, False, True, True, False])


def prepared(norm: bool, forward: TrainerForward | None = None) -> tuple[nn.Module, GuidanceContext]:
    """The router and experts of layer 0."""
    model = tiny_model(tiny_config(norm_topk_prob=norm))
    context = prepare_model(model, QuantRecipe(num_layers=2), forward or TrainerForward())
    return model.model.layers[0].mlp, context


def own_choice(mlp: nn.Module) -> tuple[Tensor, Tensor]:
    """(gates, experts) of the router alone."""
    _, gates, experts = mlp.gate(HIDDEN)
    return gates, experts


def replayed(mlp: nn.Module) -> Tensor:
    """Experts that no row would choose itself: the two of lowest probability."""
    return torch.softmax(HIDDEN @ mlp.gate.weight.T, -1).topk(2, largest=False).indices


@pytest.mark.parametrize("norm", [True, False])
def test_experts_are_replaced_on_valid_rows_and_gates_recomputed(norm: bool) -> None:
    mlp, context = prepared(norm)
    own_gates, own = own_choice(mlp)
    experts = replayed(mlp)
    with context.armed(MicroBatch(1, experts={0: (experts, VALID)})):
        logits, gates, chosen = mlp.gate(HIDDEN)
    assert torch.equal(chosen[VALID], experts[VALID])
    assert torch.equal(chosen[~VALID], own[~VALID])
    assert not (own[VALID] == experts[VALID]).any()
    torch.testing.assert_close(gates[~VALID], own_gates[~VALID], rtol=1e-6, atol=0)
    # R3: g_i = I_i e^{s_i} / sum_j I_j e^{s_j}; without norm_topk_prob the sum runs over all experts.
    e = logits.double().exp()
    chosen_e = e.gather(-1, chosen)
    want = chosen_e / (chosen_e if norm else e).sum(-1, keepdim=True)
    torch.testing.assert_close(gates, want.float(), rtol=1e-5, atol=1e-7)


def test_gradient_reaches_the_router() -> None:
    """d gate_i / d logits by the quotient rule, on the replayed experts."""
    mlp, context = prepared(True)
    experts = replayed(mlp)
    with context.armed(MicroBatch(1, experts={0: (experts, torch.ones(5, dtype=torch.bool))})):
        _, gates, _ = mlp.gate(HIDDEN)
        (got,) = torch.autograd.grad(gates[:, 0].sum(), mlp.gate.weight)
    g = gates[:, 0].detach()
    d_logits = torch.zeros(5, 8).scatter(1, experts, torch.stack([g * (1 - g), -g * (1 - g)], 1))
    torch.testing.assert_close(got, d_logits.T @ HIDDEN, rtol=1e-4, atol=1e-6)
    assert got.abs().max() > 1e-2


def test_order_of_the_experts_does_not_matter() -> None:
    mlp, context = prepared(True)
    experts, hidden = replayed(mlp), HIDDEN[None]
    everywhere = torch.ones(5, dtype=torch.bool)
    outputs = []
    for i, order in enumerate((experts, experts.flip(-1))):
        with context.armed(MicroBatch(i, experts={0: (order, everywhere)})):
            outputs.append(mlp(hidden))
    assert torch.equal(*outputs)
    assert (outputs[0] - mlp(hidden)).abs().max() > 1e-3


def test_without_replay_or_record_the_router_keeps_its_choice() -> None:
    experts = torch.zeros(5, 2, dtype=torch.int64)
    for forward, layers in ((TrainerForward(replay=False), {0}), (TrainerForward(), {1}), (TrainerForward(), set())):
        mlp, context = prepared(True, forward)
        _, own = own_choice(mlp)
        with context.armed(MicroBatch(1, experts=dict.fromkeys(layers, (experts, VALID)))):
            assert torch.equal(mlp.gate(HIDDEN)[2], own)


@pytest.mark.parametrize("replay", [True, False])
def test_disagreement_is_counted_on_valid_rows_as_sets(replay: bool) -> None:
    mlp, context = prepared(True, TrainerForward(replay=replay))
    _, own = own_choice(mlp)
    experts = own.flip(-1).clone()
    experts[1:3] = replayed(mlp)[1:3]  # row 1 is invalid: only row 2 counts
    observer = SiteObserver()
    with context.armed(MicroBatch(1, experts={0: (experts, VALID)}), observer):
        mlp.gate(HIDDEN)
    assert observer.metrics() == {"router/topk_disagreement": 1 / 3}
