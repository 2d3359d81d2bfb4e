"""Checking a policy update as a whole, and writing it into memory that stays where it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tracefp4.errors import TracefpError

if TYPE_CHECKING:
    from tracefp4.rollout.model import ModelShape

Take = Callable[[str], Tensor]
"""A weight by its transformers name, in the compute dtype and on the engine's device."""


def weight_sizes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of all weights of a model, layer by layer; the head's only where it is no embedding."""
    s = shape
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield "model.embed_tokens.weight", (s.vocab, s.hidden)
    for i in range(s.layers):
        p = f"model.layers.{i}"
        yield f"{p}.input_layernorm.weight", (s.hidden,)
        yield f"{p}.self_attn.q_proj.weight", (q, s.hidden)
        yield f"{p}.self_attn.k_proj.weight", (kv, s.hidden)
        yield f"{p}.self_attn.v_proj.weight", (kv, s.hidden)
        yield f"{p}.self_attn.q_norm.weight", (s.head_dim,)
        yield f"{p}.self_attn.k_norm.weight", (s.head_dim,)
        yield f"{p}.self_attn.o_proj.weight", (s.hidden, q)
        yield f"{p}.post_attention_layernorm.weight", (s.hidden,)
        if s.dense_model or i in s.dense_layers:
            yield f"{p}.mlp.gate_proj.weight", (s.dense_width, s.hidden)
            yield f"{p}.mlp.up_proj.weight", (s.dense_width, s.hidden)
            yield f"{p}.mlp.down_proj.weight", (s.hidden, s.dense_width)
        else:
            yield f"{p}.mlp.gate.weight", (s.experts, s.hidden)
            yield f"{p}.mlp.experts.gate_up_proj", (s.experts, 2 * s.expert_width, s.hidden)
            yield f"{p}.mlp.experts.down_proj", (s.experts, s.hidden, s.expert_width)
    yield "model.norm.weight", (s.hidden,)
    if not s.tied_embeddings:
        yield "lm_head.weight", (s.vocab, s.hidden)


def num_parameters(shape: ModelShape) -> int:
    """Of all weights of a model."""
    return sum(math.prod(size) for _, size in weight_sizes(shape))


def check_weights(given: Mapping[str, Tensor], shape: ModelShape, dtype: torch.dtype) -> None:
    """Raises TracefpError naming the first weight that is missing, misshapen, not finite in dtype, or unknown."""
    expected = dict(weight_sizes(shape))
    for name, size in expected.items():
        if name not in given:
            raise TracefpError(f"weight {name} is missing from the update")
        if tuple(given[name].shape) != size:
            raise TracefpError(f"weight {name} has shape {tuple(given[name].shape)}, the model needs {size}")
    finite = {name: torch.isfinite(given[name].to(dtype)).all() for name in expected}
    # Looked at once: a look at each would have the host wait for a GPU as often.
    for device in {f.device for f in finite.values()}:
        here = {name: f for name, f in finite.items() if f.device == device}
        for name, good in zip(here, torch.stack(list(here.values())).tolist(), strict=True):
            if not good:
                raise TracefpError(f"weight {name} holds NaN or Inf; the update is refused")
    unknown = set(given) - set(expected)
    if shape.tied_embeddings and "lm_head.weight" in unknown:
        unknown.remove("lm_head.weight")
        head, embedding = given["lm_head.weight"], given["model.embed_tokens.weight"]
        if not head.to(dtype).equal(embedding.to(head.device, dtype)):
            raise TracefpError("weight lm_head.weight differs from the embedding it is tied to by the model's config")
    if unknown:
        raise TracefpError(f"weight {min(unknown)} is not part of this model ({len(unknown)} unknown names)")


def put(old: Any, new: Any) -> Any:
    """Copies new into the memory of old, tensor by tensor down dataclasses; into new memory where there is no old."""
    if isinstance(new, Tensor):
        target = torch.empty(new.shape, dtype=new.dtype, device=new.device) if old is None else old
        target.copy_(new)
        return target
    if not is_dataclass(new) or isinstance(new, type):
        return new
    values = {f.name: put(getattr(old, f.name, None), getattr(new, f.name)) for f in fields(new)}
    return type(new)(**values)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from tensors_of(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from tensors_of(getattr(value, f.name))
