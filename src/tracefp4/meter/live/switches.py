"""A trainer's forward in which any site of any layer takes what the rollout took.

A site is where the two paths can part. In state "method" it does what the method does there; "aligned" feeds the
trainer the rollout's own choice (its weights, slots, scales, experts); "raw" takes away what the method does to align
it. Legend: N rows of a padded micro-batch, K values of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import TracefpError
from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.guidance import CompactGuidance, decode
from tracefp4.kernels.grouped_experts import ExpertMatrices, PackedExperts
from tracefp4.nn import GuidanceContext, SiteObserver, fake_quantize
from tracefp4.nn.observe import slot_index
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.model import Experts

SITES = ("weights", "codes", "scales", "down_input", "kv", "router", "prompt_rows")
METHOD, ALIGNED, RAW = "method", "aligned", "raw"
OUTSIDE = -1
"""Layer number of the embedding, the last norm and the head."""

TITLES = {
    "weights": "weights",
    "codes": "activation codes",
    "scales": "activation scales",
    "down_input": "down-projection input",
    "kv": "KV cache",
    "router": "router",
    "prompt_rows": "prompt rows",
}


@dataclass(frozen=True)
class Switches:
    """States by (site, layer); what is not listed is in ``default``. "prompt_rows" has layer OUTSIDE."""

    default: str = METHOD
    states: Mapping[tuple[str, int], str] = field(default_factory=dict)

    def state(self, site: str, layer: int) -> str:
        return self.states.get((site, layer), self.default)

    def with_site(self, site: str, state: str, layers: range | list[int]) -> Switches:
        return Switches(self.default, {**self.states, **{(site, layer): state for layer in layers}})


@dataclass
class Batch:
    """What the switched forward knows of a micro-batch. records: the rollout's full codes by (site, layer), N rows
    each.
    prompt: bool [N], rows of prompt tokens. experts: the rollout's, by layer. rates: where not None, filled with
    f32 [N], the share of a row's slots that differ from the rollout's by nearest rounding, by (site, layer)."""

    records: dict[tuple[str, int], CompactGuidance]
    prompt: Tensor
    experts: dict[int, tuple[Tensor, Tensor]]
    rates: dict[tuple[str, int], Tensor] | None = None


class Switchboard:
    """Holds the switches of a prepared model. ``set`` changes them between forwards."""

    def __init__(self, model: nn.Module, context: GuidanceContext, engine: RolloutEngine) -> None:
        self.context, self.recipe = context, context.recipe
        self.switches = Switches()
        self.batch: Batch | None = None
        self.observer: SiteObserver | None = None
        self.layers = self.recipe.num_layers
        self._model = model
        self._rollout_weights = rollout_weights(engine)
        for module in model.modules():
            if getattr(module, "tracefp4_context", None) is context:
                module.tracefp4_context = _LayerView(self, int(module.tracefp4_layer))  # type: ignore[assignment,arg-type]

    @contextmanager
    def set(self, switches: Switches) -> Iterator[None]:
        """Applies switches to the weights and to every forward inside; the trainer's weights are back afterwards."""
        before, self.switches = self.switches, switches
        held: list[tuple[nn.Parameter, Tensor]] = []
        parameters = dict(self._model.named_parameters())
        try:
            with torch.no_grad():
                for layer in (OUTSIDE, *range(self.layers)):
                    if switches.state("weights", layer) != ALIGNED:
                        continue
                    for name, value in self._rollout_weights[layer].items():
                        p = parameters[name]
                        held.append((p, p.data))
                        p.data = value.to(p.device, p.dtype)
            yield
        finally:
            self.switches = before
            for p, data in held:
                p.data = data

    def replayed(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Experts to replay under the switches: none in layers whose router is raw."""
        assert self.batch is not None
        method = self.context.forward.replay
        on = {ALIGNED: True, METHOD: method, RAW: False}
        return {layer: e for layer, e in self.batch.experts.items() if on[self.switches.state("router", layer)]}


class _LayerView:
    """What the modules of one layer consult in place of the context."""

    def __init__(self, board: Switchboard, layer: int) -> None:
        self._board, self._layer = board, layer
        self.recipe: QuantRecipe = board.recipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board.context, name)  # what no switch concerns

    @property
    def weight_format(self) -> str | None:
        state = self._board.switches.state("weights", self._layer)
        # Aligned weights are the rollout's own values already.
        return self._board.context.weight_format if state == METHOD else None

    def round_activation(self, x: Tensor) -> Tensor:
        """The down projection's input; its slots are not recorded, so aligned means rounded to nearest."""
        state = self._board.switches.state("down_input", self._layer)
        name = self.recipe.activations
        if state == RAW or name is None:
            return x
        if state == ALIGNED:
            return fake_quantize(x, name, self.recipe.site_encode_scale("expert_input"))
        return self._board.context.round_activation(x)

    def round_site(self, site: str, layer: int, x_NK: Tensor) -> Tensor:
        board = self._board
        name = self.recipe.site_format(site)
        if name is None or board.batch is None:
            return board.context.round_site(site, layer, x_NK)
        record = board.batch.records.get((site, layer))
        method, nearest = self._method(site, layer, x_NK)
        if record is None:
            return method if isinstance(method, Tensor) else _value(method, x_NK)
        own_scale = self.recipe.site_encode_scale(site)
        truth, valid = decode(record, x_NK, own_encode_scale=own_scale)
        if board.batch.rates is not None:
            board.batch.rates[site, layer] = torch.where(valid, _mismatch(nearest, truth), torch.nan)
        if board.observer is not None:
            mb, forward = board.context.current, board.context.forward
            used = mb.guidance.get((site, layer)) if mb is not None and forward.guided else None
            applied = board.context.quantizes(site)
            board.observer.observe(
                site, layer, x_NK, record, used, own_scale, self.recipe.rule, applied, self.recipe.band
            )
        codes, scales = self._states(site, layer)
        out = _mixed(x_NK, method, nearest, truth, codes, scales)
        prompt_state = board.switches.state("prompt_rows", OUTSIDE)
        if prompt_state != board.switches.default:
            of_prompt = _mixed(x_NK, method, nearest, truth, prompt_state, prompt_state)
            out = torch.where(board.batch.prompt[:, None], of_prompt, out)
        own = method if isinstance(method, Tensor) else _value(method, x_NK)
        return torch.where(valid[:, None], out, own)

    def _states(self, site: str, layer: int) -> tuple[str, str]:
        switches = self._board.switches
        if site == "expert_input":
            return switches.state("codes", layer), switches.state("scales", layer)
        return switches.state("kv", layer), switches.state("kv", layer)

    def _method(self, site: str, layer: int, x: Tensor) -> tuple[Tensor | QuantizedBlocks, QuantizedBlocks]:
        """(what the method takes: blocks, or x itself where it does not round; blocks by nearest rounding)."""
        context = self._board.context
        name, own = self.recipe.site_format(site), self.recipe.site_encode_scale(site)
        assert name is not None
        nearest = get_format(name).quantize(x, encode_scale=own)
        if not context.quantizes(site):
            return x, nearest
        mb = context.current
        guidance = mb.guidance.get((site, layer)) if mb is not None and context.forward.guided else None
        if guidance is None:
            return nearest, nearest
        blocks, _ = decode(guidance, x, self.recipe.rule, self.recipe.hash, own, self.recipe.band)
        return blocks, nearest


def _value(blocks: QuantizedBlocks, like: Tensor) -> Tensor:
    return get_format(blocks.format).dequantize(blocks, dtype=like.dtype)


def _mixed(
    x: Tensor,
    method: Tensor | QuantizedBlocks,
    nearest: QuantizedBlocks,
    truth: QuantizedBlocks,
    codes: str,
    scales: str,
) -> Tensor:
    """Values with codes and scales each in a state of their own."""
    own = nearest if codes == RAW or scales == RAW else method
    if codes == ALIGNED and scales == ALIGNED:
        return _value(truth, x)
    if codes == ALIGNED:  # the rollout's slots on the trainer's scales
        blocks = own if isinstance(own, QuantizedBlocks) else nearest
        return _value(QuantizedBlocks(truth.codes, blocks.scales, blocks.encode_scale, blocks.format, blocks.shape), x)
    if isinstance(own, Tensor):
        return own
    if scales != ALIGNED:
        return _value(own, x)
    # The trainer's slots on the rollout's scales: where those are the same, its very slots, else rounded anew.
    fmt = get_format(own.format)
    same = fmt.effective_scale(own.scales, own.encode_scale) == fmt.effective_scale(truth.scales, truth.encode_scale)
    same = same.repeat_interleave(own.block_size, dim=-1)
    again = fmt.round_with_scales(x, truth.scales, truth.encode_scale)
    kept = fmt.pack(torch.where(same, own.unpacked_codes(), again))
    return _value(QuantizedBlocks(kept, truth.scales, truth.encode_scale, own.format, own.shape), x)


def _mismatch(mine: QuantizedBlocks, truth: QuantizedBlocks) -> Tensor:
    bits = truth.element_bits
    return (slot_index(mine.unpacked_codes(), bits) != slot_index(truth.unpacked_codes(), bits)).float().mean(-1)


def rollout_weights(engine: RolloutEngine) -> dict[int, dict[str, Tensor]]:
    """Weights that the engine computes with, under transformers names, by layer; OUTSIDE: embedding, norm, head.

    Quantized experts as the values of their slots, so that a wrong scale in the engine shows.
    """
    model, shape = engine.model, engine.shape
    out: dict[int, dict[str, Tensor]] = {
        OUTSIDE: {"model.embed_tokens.weight": model._embed, "model.norm.weight": model._norm}
    }
    if not shape.tied_embeddings:
        out[OUTSIDE]["lm_head.weight"] = model._head
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for i, layer in enumerate(model._layers):
        p = f"model.layers.{i}"
        names = ("q_proj", "k_proj", "v_proj")
        weights = {f"{p}.self_attn.{n}.weight": w for n, w in zip(names, layer.qkv.split([q, kv, kv]), strict=True)}
        weights |= {
            f"{p}.input_layernorm.weight": layer.input_norm,
            f"{p}.self_attn.q_norm.weight": layer.q_norm,
            f"{p}.self_attn.k_norm.weight": layer.k_norm,
            f"{p}.self_attn.o_proj.weight": layer.o,
            f"{p}.post_attention_layernorm.weight": layer.post_norm,
        }
        if layer.router is not None:
            weights[f"{p}.mlp.gate.weight"] = layer.router
        if layer.dense_gate_up is not None and layer.dense_down is not None:
            weights |= _dense(p, layer.dense_gate_up, layer.dense_down)
        elif layer.gate_up is not None and layer.down is not None:
            gate_up, down = _matrices(layer.gate_up), _matrices(layer.down)
            if shape.dense_model:
                weights |= _dense(p, gate_up[0], down[0])
            else:
                weights |= {f"{p}.mlp.experts.gate_up_proj": gate_up, f"{p}.mlp.experts.down_proj": down}
        out[i] = weights
    return out


def _dense(prefix: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    gate, up = gate_up.chunk(2)
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"{prefix}.mlp.{n}.weight": w for n, w in zip(names, (gate, up, down), strict=True)}


def _matrices(weights: Experts) -> Tensor:
    """Values, [E, O, I]: the operand times 1/S, as the epilogue applies it."""
    if isinstance(weights, Tensor):
        return weights
    if isinstance(weights, PackedExperts):
        return weights.operands() * weights.epilogue[:, None, None]
    if not isinstance(weights, ExpertMatrices):
        raise TracefpError(
            'the meter does not read weights laid out for FP4 matrix units: set rollout.backend="triton", which has '
            "the same values"
        )
    operand, epilogue = weights.operand_EOI, weights.epilogue_E
    return operand if epilogue is None else operand * epilogue[:, None, None]
