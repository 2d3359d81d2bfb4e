"""The MLP of a dense decoder as one expert that every token visits.

transformers has no interface under which another dense MLP could be registered, as it has for attention and experts,
so here the module itself is replaced. It keeps the Linear children of the one it replaces, names and parameters
included: state_dict, save_pretrained and the optimizer see no difference.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tracefp4.nn.context import GuidanceContext
from tracefp4.nn.weights import quantized_parameters


class QuantizedMLP(nn.Module):
    """silu(gate(x)) * up(x), projected down; weights, x and the product rounded as the context says.

    mlp: a Qwen3MLP, whose children it takes over. layer: 0-based, names the recorded site ("expert_input", layer).
    """

    def __init__(self, mlp: nn.Module, context: GuidanceContext, layer: int) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj", "act_fn"):
            setattr(self, name, mlp.get_submodule(name))
        self.tracefp4_context, self.tracefp4_layer = context, layer

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        context = self.tracefp4_context
        gate_up = ("gate_proj.weight", "up_proj.weight")
        gate, up, down = quantized_parameters(self, context, gate_up, ("down_proj.weight",))
        x = context.round_site("expert_input", self.tracefp4_layer, hidden_states.flatten(0, -2))
        a = context.round_activation(self.act_fn(F.linear(x, gate)) * F.linear(x, up))  # type: ignore[operator]
        return F.linear(a, down).view_as(hidden_states)
