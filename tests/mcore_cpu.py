"""Megatron-core's GPTModel on the CPU: one or several gloo processes, local layer specs, tiny Qwen3-MoE weights.

In a test: ``pytest.importorskip("megatron.core")`` first, then ``import mcore_cpu``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.overrides import TorchFunctionMode

from tiny import make_engine, tiny_config, tiny_requests, tiny_weights
from tracefp4.adapters.megatron.context import LocalMicroBatch, ScheduledContext
from tracefp4.adapters.megatron.layers import expert_parameters
from tracefp4.adapters.megatron.layout import localize, rank_layout, row_numbers
from tracefp4.adapters.megatron.prepare import local_layers, prepare_chunks, unwrapped
from tracefp4.adapters.megatron.spec import guided_layer_spec
from tracefp4.guidance.store import MemoryStore
from tracefp4.methods import get_method
from tracefp4.nn import MicroBatch, TrainerForward
from tracefp4.recipe import QuantRecipe
from tracefp4.train.slices import MicroBatchBuilder, RowCounts
from tracefp4.types import TrainBatch


class _Stream:
    """A CUDA stream's methods, of which there is nothing to do where all is done at once."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class _CudaIsCpu(TorchFunctionMode):
    """New tensors on "cuda" are made on the CPU, whose tensors call themselves CUDA's (the optimizer looks)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


@contextmanager
def _without_cuda() -> Iterator[None]:
    """Megatron asks for the current CUDA device, its streams and its random states on every path."""
    stream = _Stream()
    cuda = {
        "current_device": lambda: "cpu",
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "synchronize": lambda *args, **kwargs: None,
        "Stream": lambda *args, **kwargs: stream,
        "current_stream": lambda *args, **kwargs: stream,
        "stream": nullcontext,
    }
    recomputing = {
        "_get_cuda_rng_state": cuda["get_rng_state"],
        "_set_cuda_rng_state": cuda["synchronize"],
        "_get_share_storage": lambda: _share_storage,  # Megatron's is compiled at first use
        # Transformer Engine's, which Megatron asks for without looking whether it is there.
        "FP8GlobalStateManager": Mock(is_fp8_enabled=lambda: False),
        "activation_recompute_forward": lambda **kwargs: nullcontext(),
        "fp8_autocast": lambda **kwargs: nullcontext(),
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        stack.enter_context(patch.multiple(random, create=True, **recomputing))
        stack.enter_context(patch.object(torch.distributed, "all_to_all_single", _all_to_all))
        stack.enter_context(_CudaIsCpu())
        yield


_stock_all_to_all = torch.distributed.all_to_all_single


def _all_to_all(output: Tensor, input: Tensor, *sizes: Any, **kwargs: Any) -> Any:
    """Megatron makes lists of the split sizes where they come from a GPU."""
    listed = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return _stock_all_to_all(output, input, *sizes, **listed)


def _share_storage(target: Tensor, source: Tensor) -> None:
    """Fills the storage that a discarded tensor and its views share."""
    storage = target.untyped_storage()
    storage.resize_(source.untyped_storage().nbytes())
    storage.copy_(source.untyped_storage())


@contextmanager
def megatron(rendezvous: Path, rank: int = 0, world_size: int = 1, **parallel: Any) -> Iterator[None]:
    """Process group and model-parallel state of one process.

    rendezvous: a file that does not exist yet, the same for all ranks; parallel: what initialize_model_parallel takes.
    """
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world_size)
    with ExitStack() as stack:
        stack.callback(torch.distributed.destroy_process_group)
        stack.enter_context(patch.dict(os.environ))  # Megatron notes its attention backend there, and checks it
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            os.environ.pop(name, None)
        stack.enter_context(_without_cuda())
        parallel_state.initialize_model_parallel(**{"expert_tensor_parallel_size": 1, **parallel})
        stack.callback(parallel_state.destroy_model_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        yield


class PackedAttention(nn.Module):
    """A core attention for packed sequences and context parallelism, which Megatron leaves to Transformer Engine."""

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.config, self.cp_group = config, pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if packed_seq_params is None:  # [s, b, heads, d], padding on the right: causal attention never sees it
            return self._attend(query, key, value).flatten(2)
        ends = [end // self.cp_group.size() for end in packed_seq_params.cu_seqlens_q.tolist()]
        parts = [self._attend(*(x[start:end, None] for x in (query, key, value))) for start, end in pairwise(ends)]
        return torch.cat(parts)[:, 0]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[s, b, heads, d] of this rank -> the same; keys and values of all ranks."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        chunks = zigzag(torch.arange(len(query) * size), size)
        if size > 1:
            key, value = (self._gather(x) for x in (key, value))
        seen = chunks[rank][:, None] >= torch.cat(chunks)[None]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.permute(2, 0, 1, 3)

    def _gather(self, x: Tensor) -> Tensor:
        parts = all_gather(x.contiguous(), self.cp_group)
        for part in parts:
            if part.requires_grad:  # gloo sends gradients as they lie in memory
                part.register_hook(Tensor.contiguous)
        return torch.cat(parts)


def zigzag(rows: Tensor, size: int) -> list[Tensor]:
    """A sequence's rows as context parallelism deals them: each rank has a chunk from either end."""
    parts = rows.chunk(2 * size) if size > 1 else (rows, rows[:0])
    return [torch.cat([parts[rank], parts[-1 - rank]]) for rank in range(size)]


def mcore_fields(hf: Any, **overrides: Any) -> dict[str, Any]:
    """Of a Qwen3MoeConfig: arguments of a TransformerConfig, in FP32 unless overridden."""
    fields = dict(  # noqa: C408
        num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads, kv_channels=hf.head_dim, ffn_hidden_size=hf.intermediate_size,
        moe_ffn_hidden_size=hf.moe_intermediate_size, num_moe_experts=hf.num_experts,
        moe_router_topk=hf.num_experts_per_tok, moe_router_pre_softmax=False, moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0, moe_token_dispatcher_type="alltoall", normalization="RMSNorm", qk_layernorm=True,
        layernorm_epsilon=hf.rms_norm_eps, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, bias_activation_fusion=False,
        bias_dropout_fusion=False, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        expert_tensor_parallel_size=1, persist_layer_norm=False, apply_rope_fusion=False,
    )  # fmt: skip
    return {**fields, **overrides}


def mcore_config(hf: Any, **overrides: Any) -> TransformerConfig:
    return TransformerConfig(**mcore_fields(hf, **overrides))


def layer_spec(config: TransformerConfig, packed: bool = True) -> Any:
    """Megatron's local layer spec; packed: with a core attention that takes packed sequences too."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    if packed:
        attention = spec.submodules.self_attention
        attention = replace(attention, submodules=replace(attention.submodules, core_attention=PackedAttention))
        spec = replace(spec, submodules=replace(spec.submodules, self_attention=attention))
    return spec


class RowNorm(nn.RMSNorm):
    """Megatron's wrapper of torch's norm refuses sequence parallelism, which a row does not notice."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """``layer_spec`` of all layers, one by one, with norms that take sequence parallelism."""
    spec = layer_spec(config)
    attention = spec.submodules.self_attention
    attention = replace(attention, submodules=replace(attention.submodules, q_layernorm=RowNorm, k_layernorm=RowNorm))
    layer = replace(
        spec.submodules, self_attention=attention, input_layernorm=RowNorm, pre_mlp_layernorm=RowNorm
    )  # fmt: skip
    return TransformerBlockSubmodules([replace(spec, submodules=layer)] * config.num_layers, RowNorm)


def gpt_model(hf: Any, config: TransformerConfig, spec: Any, **kwargs: Any) -> GPTModel:
    return GPTModel(
        config, spec, hf.vocab_size, hf.max_position_embeddings, position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"], share_embeddings_and_output_weights=hf.tie_word_embeddings,
        **kwargs,
    )  # fmt: skip


# -- weights between Hugging Face's names and Megatron's modules ------------------------------------------------------


def _pairs(model: Any, hf: Any) -> Iterator[tuple[nn.Parameter, list[tuple[str, Any]]]]:
    """(parameter, [(Hugging Face name, its values, or (values, index into the named tensor))])."""
    G, D, heads = hf.num_key_value_heads, hf.head_dim, hf.num_attention_heads
    if model.pre_process:
        w = model.embedding.word_embeddings.weight
        yield w, [("model.embed_tokens.weight", w.data)]
    for layer in model.decoder.layers:
        base = f"model.layers.{layer.layer_number - 1}."
        attention, mlp = layer.self_attention, layer.mlp
        w = attention.linear_qkv.weight
        tp = G // attention.num_query_groups_per_partition
        grouped = w.data.view(G // tp, heads // G + 2, D, -1)
        q, k, v = grouped.split([heads // G, 1, 1], dim=1)
        rank = parallel_state.get_tensor_model_parallel_rank()
        yield (
            w,
            [
                (f"{base}self_attn.{name}_proj.weight", (view, slice(rank * h * D // tp, (rank + 1) * h * D // tp)))
                for name, view, h in (("q", q, heads), ("k", k, G), ("v", v, G))
            ],
        )
        w = attention.linear_proj.weight
        own = slice(rank * w.shape[1], (rank + 1) * w.shape[1])
        yield w, [(f"{base}self_attn.o_proj.weight", (w.data, (slice(None), own)))]
        for name, module in (
            ("self_attn.q_norm", attention.q_layernorm), ("self_attn.k_norm", attention.k_layernorm),
            ("input_layernorm", layer.input_layernorm), ("post_attention_layernorm", layer.pre_mlp_layernorm),
            ("mlp.gate", mlp.router),
        ):  # fmt: skip
            yield module.weight, [(f"{base}{name}.weight", module.weight.data)]
        for e, fc1, fc2 in zip(
            mlp.local_expert_indices, *(expert_parameters(mlp.experts, f"linear_fc{i}") for i in (1, 2)), strict=True
        ):
            yield fc1, [(f"{base}mlp.experts.gate_up_proj", (fc1.data, e))]
            yield fc2, [(f"{base}mlp.experts.down_proj", (fc2.data, e))]
    if model.post_process:
        yield model.decoder.final_layernorm.weight, [("model.norm.weight", model.decoder.final_layernorm.weight.data)]
        if not model.pre_process or not hf.tie_word_embeddings:
            w = model.output_layer.weight
            yield w, [("lm_head.weight", w.data)]


@torch.no_grad()
def load_weights(model: Any, hf: Any, weights: dict[str, Tensor]) -> None:
    """Copies this rank's part of a state dict under Hugging Face's names (experts stacked) into a model."""
    for _, pairs in _pairs(unwrapped(model), hf):
        for name, target in pairs:
            view, index = target if isinstance(target, tuple) else (target, slice(None))
            weight = weights[name]
            if target is view and view.shape != weight.shape:  # vocabulary parallel
                weight = weight.chunk(len(weight) // len(view))[parallel_state.get_tensor_model_parallel_rank()]
            view.copy_(weight[index].reshape(view.shape))


def export_weights(model: Any, hf: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model that is whole on this rank, one tensor an expert and projection."""
    for _, pairs in _pairs(unwrapped(model), hf):
        for name, target in pairs:
            view, index = target if isinstance(target, tuple) else (target, None)
            if "mlp.experts" not in name:
                yield name, view.reshape(-1, view.shape[-1]) if view.ndim > 2 else view
                continue
            base = name.rpartition(".")[0] + f".{index}"
            if name.endswith("gate_up_proj"):
                gate, up = view.chunk(2)
                yield f"{base}.gate_proj.weight", gate
                yield f"{base}.up_proj.weight", up
            else:
                yield f"{base}.down_proj.weight", view


def gradients(model: Any, hf: Any) -> dict[str, Tensor]:
    """Of the parameters of this rank's whole sequence of experts, stacked under Hugging Face's names."""
    out: dict[str, list[Tensor]] = {}
    for p, pairs in _pairs(unwrapped(model), hf):
        if "mlp.experts" in pairs[0][0]:
            out.setdefault(pairs[0][0], []).append(p.grad)
        elif len(pairs) == 1:
            out[pairs[0][0]] = [p.grad]
    return {name: torch.stack(grads) if len(grads) > 1 else grads[0] for name, grads in out.items()}


class GroupedLinear(nn.Module):
    """Parameters of Transformer Engine's grouped linear, by its names; its forward is never called."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **kwargs: Any) -> None:
        super().__init__()
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(out_features, in_features)))

    def forward(self, *args: Any) -> Any:
        raise AssertionError("the guided experts multiply by themselves")


def grouped_experts(spec: Any) -> Any:
    """A layer spec with TEGroupedMLP in place of SequentialMLP, over a stand-in for its linear modules."""
    experts = partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(GroupedLinear, GroupedLinear))
    mlp = spec.submodules.mlp
    mlp = partial(mlp.func, submodules=replace(mlp.keywords["submodules"], experts=experts))
    return replace(spec, submodules=replace(spec.submodules, mlp=mlp))


# -- a micro-batch, as a rollout left it ----------------------------------------------------------------------------


@dataclass
class Case:
    """Trajectories of a rollout, and the guidance of their padded batch."""

    hf: Any
    weights: dict[str, Tensor]
    recipe: QuantRecipe
    forward: TrainerForward
    batch: TrainBatch
    micro_batch: MicroBatch

    @property
    def lengths(self) -> list[int]:
        return [len(t.token_ids) for t in self.batch.trajectories]

    def inputs(self, packed: bool, align: int = 1) -> tuple[Tensor, dict[str, Any]]:
        """(row numbers int64 [b, s], arguments of the model) of this context-parallel rank.

        align: what the length of each sequence (of the whole batch, where not packed) is a multiple of.
        """
        cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        rows, T = row_numbers(self.lengths), self.batch.input_ids.shape[1]
        padded = [F.pad(r, (0, -len(r) % align if packed else -(-T // align) * align - len(r))) for r in rows]
        parts = [zigzag(r, cp)[rank] for r in padded]
        positions = params = None
        if packed:
            numbers = torch.cat(parts)[None]
            ends = torch.tensor([0, *(len(r) for r in padded)]).cumsum(0).int()
            longest = max(len(r) for r in padded)
            params = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends,
                cu_seqlens_kv_padded=ends, max_seqlen_q=longest, max_seqlen_kv=longest,
            )  # fmt: skip
        else:
            numbers = torch.stack(parts)
            positions = zigzag(torch.arange(len(padded[0])), cp)[rank].expand_as(numbers)
        ids = self.batch.input_ids.reshape(-1)
        tokens = torch.where(numbers > 0, ids[(numbers - 1).clamp(min=0)], 0)
        arguments = {"input_ids": tokens, "position_ids": positions, "attention_mask": None}
        return numbers, arguments | {"packed_seq_params": params}

    def local(self, model: Any, numbers: Tensor, key: int = 1) -> LocalMicroBatch:
        """What this rank needs of the guidance."""
        tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        layout = rank_layout(numbers, unwrapped(model).config, *tp)
        micro = replace(self.micro_batch, key=key)
        return localize(micro, layout, local_layers([model]), self.batch.input_ids.reshape(-1))

    def rows(self, logits_bsV: Tensor, numbers: Tensor) -> Tensor:
        """[tokens, V]: logits of the real tokens, sequence by sequence."""
        flat, order = logits_bsV.flatten(0, 1), numbers.flatten()
        return flat[order > 0][order[order > 0].argsort()]

    def ranks_tokens(self, numbers: Tensor) -> Tensor:
        """Of all real tokens, sequence by sequence, those that a rank has: what ``rows`` gives on it."""
        order = torch.cat(row_numbers(self.lengths))
        return torch.isin(order, numbers).nonzero()[:, 0]


def rolled_out(method: str, n: int = 4, dtype: str = "float32", **changes: Any) -> Case:
    """n short responses of the tiny model in an FP4 rollout, replayed and guided as the method says."""
    hf = tiny_config(**changes)
    engine = make_engine(method, dtype, config=hf, store=MemoryStore())
    done = engine.generate(tiny_requests(n, max_new_tokens=8))
    forward = get_method(method).forward
    kv = hf.num_key_value_heads * hf.head_dim
    widths = {"expert_input": hf.hidden_size, "key": kv, "value": kv}
    layers = tuple(range(hf.num_hidden_layers))
    builder = MicroBatchBuilder(
        engine.store, engine.recipe, forward.guided, widths, layers, hf.num_experts_per_tok, 3
    )  # fmt: skip
    batch = TrainBatch.collate(done, pad_id=0)
    micro_batch = builder.build(batch, 0, RowCounts())
    return Case(hf, tiny_weights(hf), engine.recipe, forward, batch, micro_batch)


def build(
    case: Case, grouped: bool = False, kwargs: dict[str, Any] | None = None, **overrides: Any
) -> tuple[Any, ScheduledContext]:
    """A guided model with the case's weights, and its context; kwargs: of GPTModel, overrides: of its config."""
    config = mcore_config(case.hf, **overrides)
    spec = block_spec(config) if config.sequence_parallel else layer_spec(config)
    spec = guided_layer_spec(grouped_experts(spec) if grouped else spec)
    model = gpt_model(case.hf, config, spec, **(kwargs or {}))
    load_weights(model, case.hf, case.weights)
    return model, prepare_chunks([model], case.recipe, case.forward)


def logits_and_gradients(
    case: Case, model: Any, context: ScheduledContext, packed: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the real tokens, and the gradients of the log-probs of what follows them."""
    numbers, arguments = case.inputs(packed)
    with context.armed(case.local(model, numbers)):
        logits = case.rows(model(**arguments), numbers)
    loss(case, logits).backward()
    context.rest()
    return logits.detach(), gradients(model, case.hf)


def loss(case: Case, logits: Tensor, tokens: Tensor | slice = slice(None)) -> Tensor:
    """The sum of the log-probs of the tokens that follow each row, of a weight of its own; tokens: the rows given."""
    targets = torch.cat([torch.tensor(t.token_ids[1:] + t.token_ids[:1]) for t in case.batch.trajectories])
    weights, targets = torch.linspace(0.5, 1.5, len(targets))[tokens], targets[tokens]
    return (torch.log_softmax(logits.float(), -1)[torch.arange(len(targets)), targets] * weights).sum()
