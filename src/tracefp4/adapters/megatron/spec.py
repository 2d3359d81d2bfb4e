"""Layer specs whose modules round: the official way to put other classes into a Megatron model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tracefp4.adapters.megatron.layers import GuidedAttention, GuidedExperts, GuidedMoELayer
from tracefp4.errors import TracefpError


def guided_layer_spec(spec: Any) -> Any:
    """A spec of transformer layers with core attention, MoE layer and experts replaced by their guided subclasses.

    spec: a ModuleSpec of a transformer layer, or TransformerBlockSubmodules with one of each layer; it is left as it
    is. Layers without routed experts keep their MLP. Raises TracefpError for layers without a core attention, and for
    experts that are not Megatron's own.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        return replace(spec, layer_specs=[guided_layer_spec(layer) for layer in spec.layer_specs or ()])
    layer = spec.submodules
    attention: Any = getattr(layer, "self_attention", None)
    if not hasattr(getattr(attention, "submodules", None), "core_attention"):
        raise TracefpError(f"layers of {getattr(spec.module, '__name__', spec.module)} have no core attention to guide")
    core = _with_class(attention.submodules.core_attention, lambda base: _guided(GuidedAttention, base))
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    return replace(spec, submodules=replace(layer, self_attention=attention, mlp=_guided_mlp(layer.mlp)))


def _guided_mlp(mlp: Any) -> Any:
    base = _class_of(mlp)
    if not (isinstance(base, type) and issubclass(base, MoELayer)):
        return mlp
    submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    experts = _with_class(submodules.experts, _guided_experts)
    built = _with_class(mlp, lambda cls: _guided(GuidedMoELayer, cls))
    submodules = replace(submodules, experts=experts)
    if isinstance(built, functools.partial):
        return functools.partial(built.func, *built.args, **{**built.keywords, "submodules": submodules})
    return replace(built, submodules=submodules)


def _guided_experts(base: type) -> type:
    if not issubclass(base, SequentialMLP | TEGroupedMLP):
        raise TracefpError(f"experts of class {base.__name__} are not supported; use SequentialMLP or TEGroupedMLP")
    return _guided(GuidedExperts, base)


def _class_of(spec: Any) -> Any:
    if isinstance(spec, functools.partial):
        return spec.func
    return spec.module if isinstance(spec, ModuleSpec) else spec


def _with_class(spec: Any, make: Callable[[type], type]) -> Any:
    """A spec (a class, a ModuleSpec of one, or a partial of one) with another class in its place."""
    if isinstance(spec, functools.partial):
        return functools.partial(make(_class_of(spec)), *spec.args, **spec.keywords)
    if isinstance(spec, ModuleSpec):
        return replace(spec, module=make(spec.module))
    return make(spec)


@functools.cache
def _guided(mixin: type, base: type) -> type:
    """The subclass keeps its base's name, by which weight converters tell how a module is sharded."""
    return type(base.__name__, (mixin, base), {"__module__": mixin.__module__})
