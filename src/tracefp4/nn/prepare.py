"""Makes a transformers model run the guided forward: through its interfaces, and for dense MLPs by substitution."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from tracefp4.errors import TracefpError
from tracefp4.nn.attention import ATTENTION_NAME
from tracefp4.nn.context import GuidanceContext, TrainerForward
from tracefp4.nn.dense import QuantizedMLP
from tracefp4.nn.experts import EXPERTS_NAME
from tracefp4.nn.rounding import AUTO
from tracefp4.nn.routing import replay_hook
from tracefp4.recipe import QuantRecipe

SUPPORTED_MODEL_TYPES = ("qwen3_moe", "qwen3")


def prepare_model(
    model: PreTrainedModel,
    recipe: QuantRecipe,
    forward: TrainerForward,
    backend: str = AUTO,
    products: str = "auto",
    keep_weights: bool = True,
) -> GuidanceContext:
    """Switches a model to the guided forward; returns its context, which backend, products and keep_weights are of.

    Qwen3-MoE: attention, experts and routers; dense layers among them stay as they are. Dense Qwen3: attention, and
    each layer's ``mlp`` becomes a QuantizedMLP over the same parameters. Raises TracefpError where the model has
    another architecture, another number of layers, or where an interface was not really applied (a silently ignored
    registration would train an unquantized model).
    """
    if model.config.model_type not in SUPPORTED_MODEL_TYPES:
        raise TracefpError(
            f"model type {model.config.model_type!r} is not supported; use one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    layers = model.get_decoder().layers
    if len(layers) != recipe.num_layers:
        raise TracefpError(f"the recipe is for {recipe.num_layers} layers, the model has {len(layers)}")
    context = GuidanceContext(recipe, forward, backend, products, keep_weights)
    model.set_attn_implementation(ATTENTION_NAME)
    dense = model.config.model_type == "qwen3"
    if not dense:
        model.set_experts_implementation(EXPERTS_NAME)
    for i, layer in enumerate(layers):
        _attach(layer.self_attn, context, i)
        if layer.self_attn.config._attn_implementation != ATTENTION_NAME:
            raise TracefpError(f"layer {i}: transformers did not switch its attention to {ATTENTION_NAME!r}")
        if dense:
            layer.mlp = QuantizedMLP(layer.mlp, context, i)
        if not hasattr(layer.mlp, "experts"):
            continue
        _attach(layer.mlp.experts, context, i)
        if layer.mlp.experts.config._experts_implementation != EXPERTS_NAME:
            raise TracefpError(f"layer {i}: transformers did not switch its experts to {EXPERTS_NAME!r}")
        layer.mlp.gate.register_forward_hook(replay_hook(context, i))
    return context


def _attach(module: nn.Module, context: GuidanceContext, layer: int) -> None:
    if hasattr(module, "tracefp4_context"):
        raise TracefpError("this model is already prepared; prepare a fresh one")
    module.tracefp4_context = context  # type: ignore[assignment]
    module.tracefp4_layer = layer  # type: ignore[assignment]
