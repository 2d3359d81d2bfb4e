"""How many cache pages fit into a budget of bytes, after everything else has had its share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from tracefp4.errors import TracefpError
from tracefp4.formats import get_format
from tracefp4.guidance import row_bytes, site_bits
from tracefp4.guidance.stream import StreamRecorder
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.config import RolloutConfig
from tracefp4.rollout.decode import buckets
from tracefp4.rollout.emulated import emulates_experts
from tracefp4.rollout.head import HEAD_BYTES, HEAD_LOGIT_BYTES
from tracefp4.rollout.kernel_executor import CONTEXT_ROWS, chunk_rows, row_layout
from tracefp4.rollout.model import ModelShape
from tracefp4.rollout.paged_pool import slot_bytes
from tracefp4.rollout.sampler import DRAW_BYTES, DRAW_LOGIT_BYTES, row_blocks
from tracefp4.rollout.weights import weight_sizes

GB = 1e9
LOGITS_SLACK = 1.25
"""By how much more than the sum of its parts the logits' share is: the allocator rounds up and leaves gaps."""
TORCH_LOGIT_BYTES = 33
"""At the peak of drawing in plain torch without top-p, all rows at once, beside the logits: FP32 logits and log-probs
(8), FP64 probabilities, cumulated, and in reverse (24), and whether they are above 0 (1)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of an engine. weights: exact, with the tables of the rotary embedding. recording: device buffers of
    guidance and routing that do not grow with the cache. workspace: an estimate of a step's temporaries and of
    what captured steps keep, generous. slot: of one cache slot, with what is recorded by slot on the device. pages:
    what fits into the budget."""

    weights: int
    recording: int
    workspace: int
    slot: int
    pages: int = 0

    @property
    def fixed(self) -> int:
        return self.weights + self.recording + self.workspace


def weight_bytes(shape: ModelShape, recipe: QuantRecipe, dtype: torch.dtype, backend: str) -> int:
    """Bytes of all weights in the form that a backend reads; what ``RolloutModel.weight_tensors`` take."""
    total = shape.max_positions * shape.head_dim // 2 * 4 * 2
    for name, size in weight_sizes(shape):
        count = int(torch.Size(size).numel())
        expert = ".mlp.experts." in name or (shape.dense_model and ".mlp." in name)
        if not expert or (recipe.weights is None and (recipe.activations is None or backend != "torch")):
            total += count * dtype.itemsize
        elif recipe.weights is None:
            total += count * 4
        else:
            fmt = get_format(recipe.weights)
            # Gate and up of a dense model are one matrix with one scale.
            scales = 0 if fmt.scale_kind != "e4m3" or name.endswith("up_proj.weight") else shape.experts * 4
            if backend != "torch" and emulates_experts(recipe):  # operands alone
                total += count * 4 + scales
                continue
            total += count // 2 + count // fmt.block_size + scales
            if backend == "torch":  # operands in FP32 beside the codes, and an epilogue beside S
                total += count * 4 + scales
    return total


def plan(shape: ModelShape, recipe: QuantRecipe, config: RolloutConfig) -> MemoryPlan:
    """What an engine takes, and the pages that config.memory_gb leaves (at most those that can be used).

    config: resolved. Raises TracefpError where not even one sequence of max_model_len fits.
    """
    dtype = getattr(torch, config.dtype)
    kernels = config.backend != "torch"
    recording = 0
    if kernels:
        slot = slot_bytes(shape, recipe, dtype)
        layout = row_layout(shape, recipe)
        recording = 0 if layout is None else StreamRecorder.device_bytes(layout, chunk_rows(config))
    else:
        slot = _slot_bytes_torch(shape, recipe, dtype)
    found = MemoryPlan(
        weight_bytes(shape, recipe, dtype, config.backend), recording, _workspace(shape, recipe, config), slot
    )
    per_seq = -(-config.max_model_len // config.page_size)
    page = slot * config.page_size
    # One page more is there for padding rows to write to.
    pages = int((config.memory_gb * GB - found.fixed) // page) - (1 if kernels else 0)
    if config.memory_gb and pages < per_seq:
        need = found.fixed + (per_seq + 1) * page
        raise TracefpError(
            f"rollout.memory_gb {config.memory_gb:g} does not hold one sequence: weights {_gb(found.weights)}, "
            f"recording {_gb(found.recording)}, workspace {_gb(found.workspace)}, a sequence of rollout.max_model_len "
            f"{config.max_model_len} {_gb(per_seq * page)}; give it at least {need / GB:.3g}"
        )
    most = config.max_num_seqs * per_seq
    return MemoryPlan(found.weights, found.recording, found.workspace, slot, min(pages, most))


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.3g} GB"


def _slot_bytes_torch(shape: ModelShape, recipe: QuantRecipe, dtype: torch.dtype) -> int:
    """One cache slot of the torch backend, with its record and its routing, which are kept by slot."""
    kv_width = shape.kv_heads * shape.head_dim
    total = shape.routed_layers * shape.experts_per_token * 2
    if recipe.kv is None:
        total += 2 * kv_width * dtype.itemsize * shape.layers
    else:
        total += 2 * (kv_width // 2 + kv_width // get_format(recipe.kv).block_size) * shape.layers
    for site, width in (("expert_input", shape.hidden), ("key", kv_width), ("value", kv_width)):
        name = recipe.site_format(site)
        if name is not None:
            scale = 4 if isinstance(recipe.site_encode_scale(site), str) else 0
            total += len(recipe.guided_layers) * (row_bytes(name, site_bits(name, recipe.bits), width) + scale)
    return total


def _workspace(shape: ModelShape, recipe: QuantRecipe, config: RolloutConfig) -> int:
    """Temporaries of the largest step: rows of a layer, dispatched rows, a context read back, logits; and what captured
    steps keep of them."""
    s, rows = shape, chunk_rows(config)
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
    k = max(1, s.experts_per_token)
    width = max(s.expert_width, s.dense_width if s.dense_layers else 0)
    per_row = 2 * (6 * s.hidden + 3 * qkv) + 2 * k * (4 * width + s.hidden)
    context = max(config.max_model_len, CONTEXT_ROWS if config.max_num_seqs > 1 else 0)
    per_context = 2 * 2 * s.kv_heads * s.head_dim
    if emulates_experts(recipe):  # every expert for every row
        per_row += 4 * s.experts * 3 * k * max(2 * width, s.hidden)
    if config.backend == "torch":
        per_row, per_context = 2 * per_row + 4 * k * s.hidden, 2 * per_context
        context = config.max_num_seqs * config.max_model_len
    if config.cuda_graphs:
        # Graphs share memory and give none back: captured from small to large, none finds a block that is large enough.
        rows += sum(buckets(config.max_num_seqs))
    context = min(context, config.max_num_seqs * config.max_model_len)
    return rows * per_row + context * per_context + logits_bytes(shape, config)


def logits_bytes(shape: ModelShape, config: RolloutConfig) -> int:
    """Logits of max_num_seqs rows, and what it takes at most to draw from them; LOGITS_SLACK times their sum."""
    M, V = config.max_num_seqs, shape.vocab

    def block(rows: int, logit_bytes: int, most: int) -> int:
        return row_blocks(rows, V, logit_bytes, most)[0].stop * V * logit_bytes

    logits = M * V * getattr(torch, config.dtype).itemsize  # of a prefill step, or of a decode step without graphs
    # Top-p and the likeliest tokens follow one another.
    drawing = max(block(M, DRAW_LOGIT_BYTES, DRAW_BYTES), block(M, HEAD_LOGIT_BYTES, HEAD_BYTES))
    if config.backend == "torch":
        drawing = max(drawing, M * V * TORCH_LOGIT_BYTES)
    captured = 0
    if config.cuda_graphs:
        # The buffer of logits, and the likeliest tokens in graphs captured from small to large.
        heads = [block(n, HEAD_LOGIT_BYTES, HEAD_BYTES) for n in buckets(M)]
        captured = logits + sum(set(accumulate(heads, max)))
    return int(LOGITS_SLACK * (logits + drawing + captured))
