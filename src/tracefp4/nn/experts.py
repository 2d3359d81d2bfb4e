"""Quantized routed experts as a registered transformers experts implementation.

Legend: N tokens, K experts per token, M = N * K (token, expert) pairs, E experts, H hidden size, F expert width.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from tracefp4.nn.context import GuidanceContext
from tracefp4.nn.dispatch import Dispatch, grouped_linear
from tracefp4.nn.weights import quantized_parameters

EXPERTS_NAME = "tracefp4"


def quantized_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of an experts module; hidden_states [N, H], index int64 and weights [N, K] -> [N, H].

    The input is rounded once per token, before dispatch, as the rollout does it.
    """
    context: GuidanceContext = self.tracefp4_context  # type: ignore[assignment]
    gate_up_EOI, down_EOI = quantized_parameters(self, context, ("gate_up_proj",), ("down_proj",))
    x_NH = context.round_site("expert_input", self.tracefp4_layer, hidden_states)  # type: ignore[arg-type]
    dispatch = Dispatch.of(top_k_index, self.num_experts)  # type: ignore[arg-type]
    products = context.products
    gate, up = grouped_linear(dispatch.scatter(x_NH), gate_up_EOI, dispatch.offsets_E, products).chunk(2, dim=-1)
    # One rounding for all experts: rows are quantized independently of one another.
    a_MF = context.round_activation(self.act_fn(gate) * up)  # type: ignore[operator]
    y_MH = grouped_linear(a_MF, down_EOI, dispatch.offsets_E, products)
    return dispatch.gather(y_MH, top_k_weights.to(hidden_states.dtype))


ExpertsInterface.register(EXPERTS_NAME, quantized_experts)
