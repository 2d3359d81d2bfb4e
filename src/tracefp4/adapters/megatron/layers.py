"""What the guided forward changes in Megatron's layers: subclasses that a layer spec names in place of their bases.

Legend: s, b, H as Megatron has hidden states, [s, b, H]; M (token, expert) pairs on this rank, E local experts, F their
width; packed sequences have K and V as [s, G, D], others as [s, b, G, D].
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.nn.functional import linear

from tracefp4.adapters.megatron.context import ScheduledContext
from tracefp4.errors import TracefpError
from tracefp4.nn.dispatch import grouped_linear
from tracefp4.nn.rounding import fake_quantized_matrices


class _Guided:
    """tracefp4_context, tracefp4_layer (0-based, over all pipeline stages): set by ``prepare_chunks``."""

    tracefp4_context: ScheduledContext | None = None
    tracefp4_layer: int = -1

    @property
    def _context(self) -> ScheduledContext:
        if self.tracefp4_context is None:
            raise TracefpError("this model was built with guided_layer_spec; call prepare_chunks before its forward")
        return self.tracefp4_context


class GuidedMoELayer(_Guided):
    """Before ``MoELayer``: rounds the routed experts' input once a token, before anything is permuted or sent.

    The router and the shared experts see the hidden states as they are.
    """

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        rounded = self._context.round_site("expert_input", self.tracefp4_layer, rows)
        return super().preprocess(rounded.view(hidden_states.shape), probs, routing_map)  # type: ignore[misc]


class GuidedAttention(_Guided):
    """Before a core attention: K, after RoPE, and V are rounded as the rollout's cache rounds them."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = self._round("key", key), self._round("value", value)
        return super().forward(query, key, value, *args, **kwargs)  # type: ignore[misc]

    def _round(self, site: str, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-2] * x.shape[-1])
        return self._context.round_site(site, self.tracefp4_layer, rows).view(x.shape)


class GuidedExperts(_Guided):
    """Before ``SequentialMLP`` or ``TEGroupedMLP``: their parameters, this package's forward.

    Megatron multiplies the gates into the input of the down projection; here they are applied to its output, since the
    rollout quantizes that input without them.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """x [M, H] grouped by local expert, int [E] rows of each, gates [M] -> [M, H]."""
        context, x_MH = self._context, permuted_local_hidden_states
        self._call_pre_forward_hooks()
        gate_up_EOI, down_EOI = self._weights("linear_fc1"), self._weights("linear_fc2")
        if not len(x_MH):
            # Parameters still get gradients, which Megatron's reduction waits for; rows and gates still have a backward
            # pass, in which other ranks wait for this one.
            empty = linear(linear(x_MH, gate_up_EOI[0]).chunk(2, dim=-1)[0], down_EOI[0])
            return (empty * permuted_probs[:, None]).to(empty.dtype), None
        offsets_E = tokens_per_expert.cumsum(0).to(x_MH.device, torch.int32)
        gate_up = grouped_linear(x_MH, gate_up_EOI, offsets_E, context.products)
        if getattr(self, "activation_recompute", False):
            recomputed = tensor_parallel.CheckpointWithoutOutput()
            a_MF = recomputed.checkpoint(self._activate, gate_up)
            y_MH = grouped_linear(a_MF, down_EOI, offsets_E, context.products)
            recomputed.discard_output_and_register_recompute(y_MH)
        else:
            y_MH = grouped_linear(self._activate(gate_up), down_EOI, offsets_E, context.products)
        return (y_MH * permuted_probs[:, None]).to(y_MH.dtype), None

    def _activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self._context.round_activation(self.config.activation_func(gate) * up)  # type: ignore[attr-defined]

    def _weights(self, name: str) -> Tensor:
        """[E, out, in]: the local experts' weights as the context wants them, gradient straight to the parameters."""
        context, weights = self._context, expert_parameters(self, name)
        kept = self.__dict__.setdefault("_tracefp4_kept", {})
        # Megatron's optimizer writes parameters behind autograd's back: only the epoch tells of it.
        state = (context.weight_epoch, [(w._version, w.data_ptr()) for w in weights])
        held = kept.get(name)
        if held is None or held[0] != state:
            kept.pop(name, None)
            held = (state, _fake_quantized_stack(weights, context))
            if context.keep_weights:
                kept[name] = held
        return _Stack.apply(held[1], *weights)

    def _call_pre_forward_hooks(self) -> None:
        """Those of the linear modules, whose forward is not called: they wait for gathered parameters to arrive."""
        for module in self.modules():  # type: ignore[attr-defined]
            if module is self:
                continue
            for number, hook in module._forward_pre_hooks.items():
                arguments: Any = ((), {}) if number in module._forward_pre_hooks_with_kwargs else ((),)
                if hook(module, *arguments) is not None:
                    raise TracefpError(
                        f"a forward pre-hook of the experts' {type(module).__name__} changes its input, which the "
                        "guided forward does not pass through it"
                    )


def expert_parameters(experts: Any, name: str) -> list[nn.Parameter]:
    """The local experts' weights of a linear module ("linear_fc1" [2F, H], gate before up; "linear_fc2" [H, F])."""
    if isinstance(experts, SequentialMLP):
        return [getattr(expert, name).weight for expert in experts.local_experts]
    linear = getattr(experts, name)
    return [getattr(linear, f"weight{i}") for i in range(experts.num_local_experts)]


@torch.no_grad()
def _fake_quantized_stack(weights: list[nn.Parameter], context: ScheduledContext) -> Tensor:
    stack = torch.stack([w.detach() for w in weights])
    if context.weight_format is None:
        return stack
    return fake_quantized_matrices([stack], context.weight_format, context.recipe.pow2, context.backend)[0]


class _Stack(torch.autograd.Function):
    """y = value [E, out, in]; dy/dw of each of the E matrices = 1."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *weights: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads[0].unbind(0)
