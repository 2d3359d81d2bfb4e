"""Makes a Megatron model that was built from a guided spec run the guided forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.package_info import __version__
from torch import nn

from tracefp4.adapters.megatron.context import ScheduledContext
from tracefp4.adapters.megatron.layers import GuidedAttention, GuidedExperts, GuidedMoELayer
from tracefp4.adapters.megatron.refusals import refuse_config
from tracefp4.adapters.megatron.routing import ContextReplay
from tracefp4.adapters.megatron.versions import check_megatron_version
from tracefp4.errors import TracefpError
from tracefp4.nn import TrainerForward
from tracefp4.nn.rounding import AUTO
from tracefp4.recipe import QuantRecipe


def prepare_chunks(
    chunks: Sequence[nn.Module],
    recipe: QuantRecipe,
    forward: TrainerForward,
    backend: str = AUTO,
    products: str = "auto",
    keep_weights: bool = False,
) -> ScheduledContext:
    """Gives the layers of this rank's model chunks their context, which is returned, and their routers the replay.

    chunks: GPTModel, bare or wrapped, one of each virtual pipeline stage. backend, products and keep_weights: see
    ``GuidanceContext``; with keep_weights, call ``context.weights_changed()`` after every optimizer step, which
    Megatron hides from autograd. Raises TracefpError for another version of Megatron-core, a setting that cannot work,
    another number of layers, or a layer that is not guided.
    """
    check_megatron_version(__version__)
    context = ScheduledContext(recipe, forward, backend, products, keep_weights)
    for model in map(unwrapped, chunks):
        refuse_config(model.config, recipe, forward)
        if model.config.num_layers != recipe.num_layers:
            raise TracefpError(f"the recipe is for {recipe.num_layers} layers, the model has {model.config.num_layers}")
        for module, layer in _guided_modules(model):
            if module.tracefp4_context is not None:
                raise TracefpError("this model is already prepared; prepare a fresh one")
            module.tracefp4_context, module.tracefp4_layer = context, layer
            if isinstance(module, GuidedMoELayer):
                module.router.router_replay = ContextReplay(context, layer)  # type: ignore[attr-defined]
        context.follow(model.decoder)
        if model.pre_process:
            context.check_tokens_of(model)
    check_chunks(chunks, context)
    return context


def check_chunks(chunks: Sequence[nn.Module], context: ScheduledContext) -> None:
    """Raises TracefpError naming the first layer that is not guided, or that lost its context or its replay."""
    for model in map(unwrapped, chunks):
        for layer in model.decoder.layers:
            number = layer.layer_number - 1
            guided: list[tuple[str, Any, Any]] = [("attention", layer.self_attention.core_attention, GuidedAttention)]
            if layer.is_moe_layer:
                guided += [("MoE layer", layer.mlp, GuidedMoELayer), ("experts", layer.mlp.experts, GuidedExperts)]
            for what, module, mixin in guided:
                if not isinstance(module, mixin):
                    raise TracefpError(
                        f"layer {number}: the {what} is a plain {type(module).__name__}: build the model from "
                        "guided_layer_spec, and leave its attention_backend to Transformer Engine"
                    )
                if module.tracefp4_context is not context:
                    raise TracefpError(f"layer {number}: the {what} lost the guidance context")
            if layer.is_moe_layer and not isinstance(layer.mlp.router.router_replay, ContextReplay):
                raise TracefpError(f"layer {number}: the router lost its replay")


def moe_layers(config: Any) -> tuple[int, ...]:
    """0-based numbers, over all pipeline stages, of the layers with routed experts."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(i for i in range(config.num_layers) if i % frequency == 0)
    return tuple(i for i, routed in enumerate(frequency) if routed)


def local_layers(chunks: Sequence[nn.Module]) -> tuple[int, ...]:
    """0-based numbers of the layers that this rank holds."""
    return tuple(layer.layer_number - 1 for model in map(unwrapped, chunks) for layer in model.decoder.layers)


def unwrapped(model: Any) -> Any:
    """The GPTModel within data-parallel and mixed-precision wrappers."""
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    return model


def _guided_modules(model: Any) -> Iterator[tuple[Any, int]]:
    for layer in model.decoder.layers:
        for module in layer.modules():
            if isinstance(module, GuidedAttention | GuidedMoELayer | GuidedExperts):
                yield module, layer.layer_number - 1
