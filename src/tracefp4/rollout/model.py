"""The engine's own forward of Qwen3-MoE and Qwen3: fused projections, paged cache, incremental; no transformers code.

Legend: N rows of this step, B sequences, Q most rows of one sequence, V vocabulary, H hidden size, F expert width,
G KV heads, D head_dim, K experts per token, E experts.

Where it differs from the trainer's forward, on purpose, as engines do: one fused QKV product, RMSNorm and RoPE with
FP32 tables and a single rounding, attention over the cache with FP32 scores, experts as grouped products with FP32
accumulation of exact FP4 operands, and a weighted sum of expert outputs in FP32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.errors import TracefpError
from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.kernels.decoder_ops import rms_norm, rotate
from tracefp4.kernels.grouped_experts import ExpertMatrices, PackedExperts, Routing, grouped_linear
from tracefp4.kernels.paged_attention import paged_attention
from tracefp4.recipe import QuantRecipe, quantize_expert_weights
from tracefp4.rollout.compensation import ResidualCompensation
from tracefp4.rollout.kv_pool import KVPool
from tracefp4.rollout.weights import Take, check_weights, tensors_of


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Qwen3-MoE or Qwen3 decoder that the forward needs.

    A dense model has one expert, its MLP, without a router (experts 1, experts_per_token 0). dense_layers: layers of
    a mixture that have a dense MLP, which is not quantized.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_width: int
    dense_width: int
    vocab: int
    norm_eps: float
    rope_theta: float
    norm_topk_prob: bool
    max_positions: int
    tied_embeddings: bool
    dense_layers: frozenset[int]
    dense_model: bool = False

    @property
    def routed_layers(self) -> int:
        return 0 if self.dense_model else self.layers - len(self.dense_layers)

    @property
    def expert_width_field(self) -> str:
        """The checkpoint's own name for expert_width."""
        return "intermediate_size" if self.dense_model else "moe_intermediate_size"

    @staticmethod
    def from_hf(config: Any) -> ModelShape:
        """Reads a transformers config. Raises TracefpError, naming the field, where the engine has no such path."""
        c = config
        model_type = getattr(c, "model_type", None)
        if model_type not in ("qwen3_moe", "qwen3"):
            raise TracefpError(
                f"the rollout engine runs qwen3_moe and qwen3 models, not {model_type!r}; choose such a checkpoint"
            )
        moe = model_type == "qwen3_moe"
        rope = dict(getattr(c, "rope_parameters", None) or {})
        for field, ok, value in (
            ("rope_theta", rope.get("rope_theta") is not None, rope.get("rope_theta")),
            ("rope_type", rope.get("rope_type", "default") == "default", rope.get("rope_type")),
            ("hidden_act", c.hidden_act == "silu", c.hidden_act),
            ("sliding_window", c.sliding_window is None, c.sliding_window),
            ("attention_bias", not c.attention_bias, c.attention_bias),
        ):
            if not ok:
                raise TracefpError(
                    f"the rollout engine does not support {field} = {value!r} of this checkpoint's config"
                )
        layers = range(c.num_hidden_layers) if moe else ()
        dense = {i for i in layers if i in c.mlp_only_layers or c.num_experts == 0 or (i + 1) % c.decoder_sparse_step}
        heads, hidden = c.num_attention_heads, c.hidden_size
        return ModelShape(
            layers=c.num_hidden_layers,
            hidden=hidden,
            heads=heads,
            kv_heads=c.num_key_value_heads,
            head_dim=getattr(c, "head_dim", None) or hidden // heads,
            experts=c.num_experts if moe else 1,
            experts_per_token=c.num_experts_per_tok if moe else 0,
            expert_width=c.moe_intermediate_size if moe else c.intermediate_size,
            dense_width=c.intermediate_size,
            vocab=c.vocab_size,
            norm_eps=c.rms_norm_eps,
            rope_theta=rope["rope_theta"],
            norm_topk_prob=moe and c.norm_topk_prob,
            max_positions=c.max_position_embeddings,
            tied_embeddings=c.tie_word_embeddings,
            dense_layers=frozenset(dense),
            dense_model=not moe,
        )


@dataclass
class StepInput:
    """Rows of one step, flattened over sequences.

    tokens, positions, slots int64 [N]; pad_index int64 [B, Q]: which of the N rows sits at (sequence, query), -1
    for padding; context_slots int64 [B, T]: cache slots of each sequence's context in order of position;
    last_rows int64 [n]: rows whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    pad_index: Tensor
    context_slots: Tensor
    last_rows: Tensor


@dataclass
class Captured:
    """What a step leaves for the recorder: quantized blocks by (site, layer), and experts int16 [N, layers, K]."""

    blocks: dict[tuple[str, int], QuantizedBlocks]
    experts: Tensor | None


@dataclass(frozen=True)
class NativeExperts:
    """A stacked projection as FP4 matrix units read it: codes uint8 [E, O, I/2]; scales uint8 [E, bytes], see
    ``tracefp4.rollout.native.blocked_scales``; epilogue f32 [E], 1/S of each expert."""

    codes: Tensor
    scales: Tensor
    epilogue: Tensor


Experts = ExpertMatrices | PackedExperts | NativeExperts | Tensor
"""A stacked projection: as the torch path reads it, packed or BF16 as the kernels do, or as FP4 matrix units do."""


@dataclass
class Layer:
    """Weights of one decoder layer."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    post_norm: Tensor
    router: Tensor | None = None
    gate_up: Experts | None = None
    down: Experts | None = None
    dense_gate_up: Tensor | None = None
    dense_down: Tensor | None = None


PARTS = ("gate_up", "down")
"""Quantized projections of a layer."""


class RolloutModel:
    """Weights in the form the engine reads, and one forward step over them.

    backend: "torch", or what a subclass runs on.
    """

    def __init__(
        self, shape: ModelShape, recipe: QuantRecipe, dtype: torch.dtype, device: str, backend: str = "torch"
    ) -> None:
        self.shape, self.recipe, self.dtype, self.device, self.backend = shape, recipe, dtype, device, backend
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.arange(shape.max_positions, dtype=torch.float32)[:, None] * (1.0 / shape.rope_theta**half)
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)
        self._layers: list[Layer] = []
        self._embed = self._norm = self._head = torch.empty(0)
        self.broken = False
        self.compensation = ResidualCompensation.of(recipe, backend)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes all weights under their transformers names and quantizes the experts.

        Nothing is replaced unless every tensor is there with its right shape: raises TracefpError naming the first
        that is missing, misshapen or not finite. Unknown names are refused too, so that a renamed layer cannot
        leave old weights in place. The tensors are copied: the trainer goes on changing its own.
        """
        given = {name: w.detach().to(self.device, self.dtype, copy=True) for name, w in weights}
        check_weights(given, self.shape, self.dtype)
        self.fill(given.__getitem__)

    @torch.no_grad()
    def fill(self, take: Take) -> None:
        """Replaces all weights by those that ``take`` gives, which are kept where they need no other form."""
        s = self.shape
        embed = take("model.embed_tokens.weight")
        layers = [self._load_layer(i, take) for i in range(s.layers)]
        norm = take("model.norm.weight")
        head = embed if s.tied_embeddings else take("lm_head.weight")
        self._embed, self._layers, self._norm, self._head = embed, layers, norm, head

    @property
    def weight_tensors(self) -> list[Tensor]:
        """All weights in the form the engine reads; a tied head is the embedding."""
        own = [self._embed, self._norm, self._layers, None if self.shape.tied_embeddings else self._head]
        return [t for part in own for t in tensors_of(part)]

    def _load_layer(self, i: int, take: Take) -> Layer:
        s, p = self.shape, f"model.layers.{i}"
        a = f"{p}.self_attn"
        layer = Layer(
            input_norm=take(f"{p}.input_layernorm.weight"),
            qkv=torch.cat([take(f"{a}.{x}_proj.weight") for x in "qkv"]),
            q_norm=take(f"{a}.q_norm.weight"),
            k_norm=take(f"{a}.k_norm.weight"),
            o=take(f"{a}.o_proj.weight"),
            post_norm=take(f"{p}.post_attention_layernorm.weight"),
        )
        if s.dense_model or i in s.dense_layers:
            gate_up = torch.cat([take(f"{p}.mlp.gate_proj.weight"), take(f"{p}.mlp.up_proj.weight")])
            down = take(f"{p}.mlp.down_proj.weight")
            if s.dense_model:
                layer.gate_up, layer.down = self._expert_matrices(gate_up[None]), self._expert_matrices(down[None])
            else:
                layer.dense_gate_up, layer.dense_down = gate_up, down
            return layer
        layer.router = take(f"{p}.mlp.gate.weight")
        layer.gate_up = self._expert_matrices(take(f"{p}.mlp.experts.gate_up_proj"))
        layer.down = self._expert_matrices(take(f"{p}.mlp.experts.down_proj"))
        return layer

    def _expert_matrices(self, w_EOI: Tensor) -> Experts:
        if self.recipe.weights is not None:
            return ExpertMatrices.quantized(quantize_expert_weights(w_EOI, self.recipe.weights, self.recipe.pow2))
        # Unquantized weights beside quantized activations: the products still run on FP32 operands.
        dtype = torch.float32 if self.recipe.activations is not None else self.dtype
        return ExpertMatrices(w_EOI.to(dtype))

    def replace_experts(self, i: int, part: str, blocks: QuantizedBlocks) -> None:
        """Other quantized weights [E, out, in] for "gate_up" or "down" of layer i: of quantizers that see more than the
        weights. The next ``load`` quantizes by the recipe again."""
        assert part in PARTS
        setattr(self._layers[i], part, ExpertMatrices.quantized(blocks))

    @torch.no_grad()
    def forward(self, step: StepInput, pool: KVPool) -> tuple[Tensor, Captured]:
        """Logits [n, V] of ``step.last_rows``, and what the recorder takes. Writes the step's K and V to the pool."""
        s = self.shape
        captured = Captured({}, None)
        experts: list[Tensor] = []
        residual = self._embed[step.tokens]
        h = rms_norm(residual, self._layers[0].input_norm, s.norm_eps)
        for i, layer in enumerate(self._layers):
            residual = residual + self._attention(i, layer, h, step, pool, captured)
            h = rms_norm(residual, layer.post_norm, s.norm_eps)
            if s.dense_model:
                residual = residual + self._one_expert(i, layer, h, captured)
            elif layer.router is None:
                residual = residual + self._dense(layer, h)
            else:
                y, chosen = self._moe(i, layer, h, captured)
                residual = residual + y
                experts.append(chosen)
            following = self._layers[i + 1].input_norm if i + 1 < s.layers else self._norm
            h = rms_norm(residual, following, s.norm_eps)
        if experts:
            captured.experts = torch.stack(experts, dim=1).to(torch.int16)
        return F.linear(h[step.last_rows], self._head), captured

    def _attention(
        self, i: int, layer: Layer, h_NH: Tensor, step: StepInput, pool: KVPool, captured: Captured
    ) -> Tensor:
        s = self.shape
        N = h_NH.shape[0]
        qkv = F.linear(h_NH, layer.qkv).view(N, s.heads + 2 * s.kv_heads, s.head_dim)
        q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        cos, sin = self._cos[step.positions], self._sin[step.positions]
        q = rotate(rms_norm(q, layer.q_norm, s.norm_eps), cos, sin)
        k = rotate(rms_norm(k, layer.k_norm, s.norm_eps), cos, sin)
        # Written first and read back: a token sees its own K and V as every later token will, through the cache.
        for site, blocks in pool.write(i, step.slots, k, v).items():
            captured.blocks[site, i] = blocks
        k_ctx, v_ctx = pool.gather(i, step.context_slots)
        pad = step.pad_index
        q_positions = torch.where(pad >= 0, step.positions[pad], -1)
        out = paged_attention(
            q[pad],
            k_ctx,
            v_ctx,
            q_positions,
            s.head_dim**-0.5,
            k_epilogue=pool.epilogue,
            v_epilogue=pool.epilogue,
        )
        flat = torch.empty(N, s.heads * s.head_dim, dtype=self.dtype, device=h_NH.device)
        real = pad >= 0
        flat[pad[real]] = out.flatten(2)[real]
        return F.linear(flat, layer.o)

    def _dense(self, layer: Layer, h_NH: Tensor) -> Tensor:
        assert layer.dense_gate_up is not None
        assert layer.dense_down is not None
        return F.linear(_silu_mul(F.linear(h_NH, layer.dense_gate_up)), layer.dense_down)

    def _moe(self, i: int, layer: Layer, h_NH: Tensor, captured: Captured) -> tuple[Tensor, Tensor]:
        s = self.shape
        assert layer.router is not None
        probs = torch.softmax(F.linear(h_NH, layer.router), dim=-1, dtype=torch.float32)
        gates, chosen = probs.topk(s.experts_per_token, dim=-1)
        if s.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True)
        routing = Routing.of(chosen, s.experts)
        x, x_scale = self._expert_input(i, h_NH, captured)
        x_scale = None if x_scale is None else x_scale[routing.token]
        out = self._products(layer, x[routing.token], x_scale, routing.counts)
        y = torch.empty_like(out)
        y[routing.order] = out
        y = (y.view(-1, s.experts_per_token, s.hidden).float() * gates[..., None]).sum(1)
        return y.to(self.dtype), chosen

    def _one_expert(self, i: int, layer: Layer, h_NH: Tensor, captured: Captured) -> Tensor:
        """A dense model's MLP: the expert of every token, with nothing to route or weigh."""
        x, x_scale = self._expert_input(i, h_NH, captured)
        return self._products(layer, x, x_scale, (h_NH.shape[0],))

    def _expert_input(self, i: int, h_NH: Tensor, captured: Captured) -> tuple[Tensor, Tensor | None]:
        x, x_scale, blocks = self._operand(h_NH)
        if blocks is not None:
            captured.blocks["expert_input", i] = blocks
        return x, x_scale

    def _products(self, layer: Layer, x_MH: Tensor, x_scale_M1: Tensor | None, counts: tuple[int, ...]) -> Tensor:
        """Gate/up and down projections of dispatched rows, [M, H] in the compute dtype."""
        assert isinstance(layer.gate_up, ExpertMatrices)
        assert isinstance(layer.down, ExpertMatrices)
        up = grouped_linear(x_MH, x_scale_M1, layer.gate_up, counts)
        a, a_scale, _ = self._operand(_silu_mul(up.to(self.dtype)))
        return grouped_linear(a, a_scale, layer.down, counts).to(self.dtype)

    def _operand(self, x: Tensor) -> tuple[Tensor, Tensor | None, QuantizedBlocks | None]:
        """(operand, epilogue f32 [N, 1] or None, blocks) of an expert projection's input."""
        r = self.recipe
        if r.activations is None:
            return (x.float() if r.weights is not None else x), None, None
        fmt = get_format(r.activations)
        blocks = fmt.quantize(x, encode_scale=r.site_encode_scale("expert_input"))
        operand, epilogue = fmt.operands(blocks, dtype=torch.float32)
        if self.compensation is not None:
            operand, epilogue = self.compensation.operand(x, blocks, operand, epilogue)
        return operand, epilogue, blocks


def _silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in FP32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
