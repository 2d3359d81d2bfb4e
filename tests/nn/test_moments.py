"""Second moments of the experts' inputs against what the modules are given, token by token."""

import pytest
import torch
import torch.nn.functional as F

from tiny import tiny_config, tiny_dense_config, tiny_model
from tracefp4.nn.moments import input_moments


def sequences() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(2, 32, (n,), generator=g) for n in (9, 17)]


def test_mixture() -> None:
    model = tiny_model(tiny_config())
    got = input_moments(model, sequences())
    assert set(got) == {(i, part) for i in range(2) for part in ("gate_up", "down")}
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    experts = model.model.layers[1].mlp.experts
    hook = experts.register_forward_pre_hook(lambda _, args: seen.append((args[0].reshape(-1, 64), args[1])))
    with torch.no_grad():
        for ids in sequences():
            model(input_ids=ids[None])
    hook.remove()
    gate_up, down = torch.zeros(8, 64), torch.zeros(8, 32)
    for x, chosen in seen:
        for row, own in zip(x, chosen, strict=True):
            for e in own.tolist():
                gate, up = F.linear(row, experts.gate_up_proj[e]).detach().chunk(2)
                gate_up[e] += row.detach().square()
                down[e] += (F.silu(gate) * up).square()
    torch.testing.assert_close(got[1, "gate_up"], gate_up)
    torch.testing.assert_close(got[1, "down"], down)


def test_dense_and_layers_that_are_not_quantized() -> None:
    got = input_moments(tiny_model(tiny_dense_config()), sequences())
    assert {where: tuple(m.shape) for where, m in got.items()} == {
        (i, part): (1, width) for i in range(2) for part, width in (("gate_up", 64), ("down", 96))
    }
    assert all(bool((m > 0).all()) for m in got.values())
    mixed = input_moments(tiny_model(tiny_config(mlp_only_layers=[0])), sequences())
    assert {layer for layer, _ in mixed} == {1}


def test_the_model_is_left_as_it_was_even_after_an_error() -> None:
    model = tiny_model(tiny_config())
    with pytest.raises(IndexError):
        input_moments(model, [torch.tensor([99])])
    assert all(not layer.mlp.experts._forward_pre_hooks for layer in model.model.layers)
