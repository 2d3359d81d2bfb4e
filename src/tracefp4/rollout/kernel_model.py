"""The forward over the GPU kernels: the same model, the same roundings, other orders of summation.

Legend: N rows of this step, B sequences, P pages of a block table, T context rows, H query heads, G KV heads, D
head_dim.

Nothing in a decode step asks the host anything, so that it can be captured. Prefill reads the context back from the
cache as BF16 (exact: E2M1 * SF), so that a row sees its own K and V as every later one will, and attends with torch's
scaled_dot_product_attention: neighbours of equal lengths, as samples of one prompt are, in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from tracefp4.device import attention_for
from tracefp4.formats import QuantizedBlocks
from tracefp4.guidance.stream import StreamRecorder
from tracefp4.kernels.decoder_ops import add_norm, choose_experts, norm_rotate
from tracefp4.kernels.grouped_experts import ExpertMatrices, PackedExperts, routed_experts
from tracefp4.kernels.paged_attention import paged_decode
from tracefp4.kernels.quantize_record import RecordTarget, quantize_record
from tracefp4.recipe import quantize_expert_weights
from tracefp4.rollout.emulated import emulated_experts, emulates_experts, fuses_record, record_rows
from tracefp4.rollout.model import PARTS, Experts, Layer, RolloutModel
from tracefp4.rollout.paged_pool import PagedPool
from tracefp4.rollout.weights import Take, check_weights, put

PACK_VALUES = 1 << 26
"""Weight values quantized at a time: the temporaries of more would crowd the cache out."""


@dataclass(frozen=True)
class Span:
    """Rows [first, first + rows) of a step, the last of the context rows [start, stop) of one sequence."""

    first: int
    rows: int
    start: int
    stop: int


@dataclass(frozen=True)
class Context:
    """Some sequences whose contexts are read together: slots int64 [T], one context behind the other."""

    slots: Tensor
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Recording:
    """Where a step's rows are recorded: rows int64 [N] of a recorder's device buffer."""

    recorder: StreamRecorder
    rows: Tensor


@dataclass(frozen=True)
class KernelStep:
    """Rows of one step.

    tokens, positions, slots int64 [N]. Decode: one row per sequence, tables int32 [N, P], lengths int32 [N], 0 for
    padding. Prefill: contexts, which together have all rows (None in a decode step).
    last_rows int64: rows whose logits are wanted, None for all. recordings: the run's own record, and the probe's.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    recordings: tuple[Recording, ...] = ()
    tables: Tensor | None = None
    lengths: Tensor | None = None
    contexts: tuple[Context, ...] | None = None
    last_rows: Tensor | None = None

    @cached_property
    def real(self) -> Tensor:
        """bool [N]: False for padding. A step that is captured is made in its graph, and so is this."""
        return self.positions >= 0

    def targets(self, site: str, layer: int) -> list[RecordTarget]:
        found = [r.recorder.target(site, layer, r.rows) for r in self.recordings]
        return [t for t in found if t is not None]


class KernelModel(RolloutModel):
    """``RolloutModel`` over the kernels. backend: theirs, "triton", or "torch" for their references."""

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As ``RolloutModel.load``, without a second copy of all weights: checks everything, then writes in place."""
        given = {name: w.detach() for name, w in weights}
        check_weights(given, self.shape, self.dtype)
        self.fill(lambda name: given[name].to(self.device, self.dtype))

    @torch.no_grad()
    def fill(self, take: Take) -> None:
        """Writes all weights, layer by layer, from the second time on into the same memory: captured graphs read it.

        A failure halfway, such as no memory for a temporary, leaves weights of two versions, and ``broken`` set.
        """
        s = self.shape
        old = (self._embed, self._norm, self._head) if self._layers else (None, None, None)
        self.broken = True
        self._embed = put(old[0], take("model.embed_tokens.weight"))
        for i in range(s.layers):
            layer = self._layers[i] if i < len(self._layers) else None
            self._layers[i : i + 1] = [put(layer, self._load_layer(i, take))]
        self._norm = put(old[1], take("model.norm.weight"))
        self._head = self._embed if s.tied_embeddings else put(old[2], take("lm_head.weight"))
        self.broken = False

    def _expert_matrices(self, w_EOI: Tensor) -> Experts:
        """BF16 as it is, or packed; a few experts at a time, since each has an encode scale of its own."""
        name = self.recipe.weights
        if name is None:
            return w_EOI
        if emulates_experts(self.recipe):
            return replace(
                ExpertMatrices.quantized(quantize_expert_weights(w_EOI, name, self.recipe.pow2)), blocks=None
            )
        E, O, I = w_EOI.shape
        some = max(1, PACK_VALUES // (O * I))
        packed = None
        for start in range(0, E, some):
            part = PackedExperts.pack(quantize_expert_weights(w_EOI[start : start + some], name, self.recipe.pow2))
            if len(part.epilogue) == E:
                return part
            packed = packed or _empty_experts(part, E)
            whole = packed
            stop = start + part.experts
            put(whole.words[start:stop], part.words)
            put(whole.scales[start:stop], part.scales)
            put(whole.epilogue[start:stop], part.epilogue)
        assert packed is not None
        return packed

    @torch.no_grad()
    def replace_experts(self, i: int, part: str, blocks: QuantizedBlocks) -> None:
        """As ``RolloutModel.replace_experts``, into the memory that captured graphs read."""
        assert part in PARTS
        layer = self._layers[i]
        setattr(layer, part, put(getattr(layer, part), self._replacement(blocks)))

    def _replacement(self, blocks: QuantizedBlocks) -> Experts:
        """Quantized weights in the form that the products read."""
        if emulates_experts(self.recipe):
            return replace(ExpertMatrices.quantized(blocks), blocks=None)
        return PackedExperts.pack(blocks)

    @torch.no_grad()
    def run(self, step: KernelStep, pool: PagedPool, out: Tensor | None = None) -> Tensor:
        """Logits [n, V] of the wanted rows. Writes the step's K and V, and its record.

        out: compute dtype, contiguous [n, V]: where the logits are written, and what is returned then.
        """
        s = self.shape
        experts: list[Tensor] = []
        eps, backend = s.norm_eps, self.backend
        residual, h = add_norm(self._embed[step.tokens], None, self._layers[0].input_norm, eps, backend=backend)
        for i, layer in enumerate(self._layers):
            residual, h = add_norm(
                residual, self._attend(i, layer, h, step, pool), layer.post_norm, eps, backend=backend
            )
            following = self._layers[i + 1].input_norm if i + 1 < s.layers else self._norm
            y, gates = self._mlp(i, layer, h, step, experts)
            residual, h = add_norm(residual, y, following, eps, gates, backend=backend)
        if experts:
            for recording in step.recordings:
                recording.recorder.write_experts(recording.rows, torch.stack(experts, dim=1))
        wanted = h if step.last_rows is None else h[step.last_rows]
        return F.linear(wanted, self._head) if out is None else torch.mm(wanted, self._head.t(), out=out)

    def _attend(self, i: int, layer: Layer, h_NH: Tensor, step: KernelStep, pool: PagedPool) -> Tensor:
        s = self.shape
        N = h_NH.shape[0]
        qkv = F.linear(h_NH, layer.qkv)
        q, k = norm_rotate(
            qkv, layer.q_norm, layer.k_norm, self._cos, self._sin, step.positions, s.heads, s.kv_heads, s.norm_eps,
            backend=self.backend,
        )  # fmt: skip
        v = qkv.view(N, s.heads + 2 * s.kv_heads, s.head_dim)[:, s.heads + s.kv_heads :]
        keys, values = step.targets("key", i), step.targets("value", i)
        fused = bool(keys) and fuses_record(str(self.recipe.kv), keys[0].bits)
        k_blocks, v_blocks = pool.write(i, step.slots, k, v, (keys[0], values[0]) if fused else None)
        for key, value in zip(keys[fused:], values[fused:], strict=True):
            self._record(k, k_blocks, key)
            self._record(v, v_blocks, value)
        if step.contexts is not None:
            out = self._prefill(i, q, step.contexts, pool)
        else:
            assert step.tables is not None
            assert step.lengths is not None
            out = paged_decode(q, pool.layers[i], step.tables, step.lengths, s.head_dim**-0.5, backend=self.backend)
        return F.linear(out.view(N, -1), layer.o)

    def _record(self, x_NGD: Tensor, blocks: QuantizedBlocks | None, target: RecordTarget) -> None:
        """K's or V's slots, of a function of the row: quantized once more where the cache's writer kept no blocks."""
        name, scale = self.recipe.kv, self.recipe.site_encode_scale("key")
        assert name is not None
        if fuses_record(name, target.bits):
            quantize_record(x_NGD.flatten(1), name, scale, backend=self.backend, record=target)
        else:
            record_rows(blocks or quantize_record(x_NGD.flatten(1), name, scale, backend=self.backend), target)

    def _prefill(self, i: int, q_NHD: Tensor, contexts: tuple[Context, ...], pool: PagedPool) -> Tensor:
        cache = pool.layers[i]
        out = torch.empty_like(q_NHD)
        scale = self.shape.head_dim**-0.5 * cache.k_epilogue
        for context in contexts:
            k, v = pool.read(i, context.slots)
            for _, run in groupby(context.spans, key=lambda s: (s.rows, s.stop - s.start)):
                alike = list(run)
                rows = slice(alike[0].first, alike[-1].first + alike[-1].rows)
                at = slice(alike[0].start, alike[-1].stop)
                q_BQHD, k_BTGD, v_BTGD = (x.unflatten(0, (len(alike), -1)) for x in (q_NHD[rows], k[at], v[at]))
                with attention_for(q_NHD.device, q_BQHD.shape[0] * q_BQHD.shape[1] * k_BTGD.shape[1]):
                    out[rows] = _causal(q_BQHD, k_BTGD, v_BTGD, scale).flatten(0, 1)
        return out if cache.v_epilogue == 1.0 else out * cache.v_epilogue

    def _mlp(
        self, i: int, layer: Layer, h_NH: Tensor, step: KernelStep, experts: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """(the layer's output [N, H], None), or (that of each of a row's experts [N, K, H], their gates [N, K])."""
        s = self.shape
        if layer.dense_gate_up is not None:
            return self._dense(layer, h_NH), None
        if s.dense_model:
            gates, chosen = h_NH.new_ones(len(h_NH), 1, dtype=torch.float32), h_NH.new_zeros(len(h_NH), 1).long()
        else:
            gates, chosen = self._choose(i, layer, h_NH)
            experts.append(chosen)
        r, targets = self.recipe, step.targets("expert_input", i)
        if emulates_experts(r):
            assert isinstance(layer.gate_up, ExpertMatrices)
            assert isinstance(layer.down, ExpertMatrices)
            # Compensated rows are quantized again by their own kernel: here only for a record.
            wanted = r.activations is not None and bool(targets)
            blocks = self._quantized_input(h_NH, targets) if wanted else None
            y = emulated_experts(
                h_NH, blocks, chosen, gates, layer.gate_up, layer.down, r, self.compensation, step.real, self.backend,
                summed=False,
            )  # fmt: skip
            return y, gates
        fused = r.activations is not None and bool(targets) and fuses_record(r.activations, targets[0].bits)
        x: Tensor | QuantizedBlocks = h_NH
        if others := targets[fused:]:  # the same slots, in other widths
            blocks = self._quantized_input(h_NH, others)
            x = h_NH if fused else blocks
        return self._experts(layer, x, targets[0] if fused else None, gates, chosen), gates

    def _choose(self, i: int, layer: Layer, h_NH: Tensor) -> tuple[Tensor, Tensor]:
        """(gates f32 [N, K], experts int64 [N, K]) by the router."""
        assert layer.router is not None
        logits = F.linear(h_NH, layer.router)
        return choose_experts(logits, self.shape.experts_per_token, self.shape.norm_topk_prob, backend=self.backend)

    def _quantized_input(self, h_NH: Tensor, targets: Sequence[RecordTarget]) -> QuantizedBlocks:
        """The experts' input, quantized and recorded in one pass where the kernels take the width, else in two."""
        r = self.recipe
        assert r.activations is not None
        fused = bool(targets) and fuses_record(r.activations, targets[0].bits)
        scale = r.site_encode_scale("expert_input")
        blocks = quantize_record(h_NH, r.activations, scale, backend=self.backend, record=targets[0] if fused else None)
        for target in targets[fused:]:
            if fuses_record(r.activations, target.bits):
                quantize_record(h_NH, r.activations, scale, backend=self.backend, record=target)
            else:
                record_rows(blocks, target)
        return blocks

    def _experts(
        self,
        layer: Layer,
        x: Tensor | QuantizedBlocks,
        record: RecordTarget | None,
        gates: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """Each expert's output [N, K, H].

        x: their input, BF16 (quantized and recorded by the kernel that lays it out) or blocks.
        """
        r = self.recipe
        assert isinstance(layer.gate_up, (PackedExperts, Tensor))
        assert isinstance(layer.down, (PackedExperts, Tensor))
        scale = r.site_encode_scale("expert_input") or "row"
        return routed_experts(
            x, chosen, gates, layer.gate_up, layer.down, backend=self.backend, activations=r.activations,
            encode_scale=scale, record=record, summed=False,
        )  # fmt: skip


def _empty_experts(part: PackedExperts, E: int) -> PackedExperts:
    words, scales, epilogue = (t.new_empty(E, *t.shape[1:]) for t in (part.words, part.scales, part.epilogue))
    return PackedExperts(words, scales, epilogue, part.format)


def _causal(q_BQHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scale: float) -> Tensor:
    """Attention of sequences' last Q tokens over their T, [B, Q, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BQHD, k_BTGD, v_BTGD))
    Q, T = q.shape[2], k.shape[2]
    if Q == T:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    elif Q == 1:
        out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    else:
        bias = causal_lower_right(Q, T)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)
