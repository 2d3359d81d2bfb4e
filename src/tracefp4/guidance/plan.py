"""Sizing: bytes of guidance, the time to move them, and how many sequences a cache holds, before anything runs.

Record sizes come from ``schema.row_bytes`` and the recipe, as those of real records do. Units: bytes; GB is 1e9 bytes,
KiB 1024. The shapes of a few models are below; any other comes from its Hugging Face config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracefp4.config import did_you_mean
from tracefp4.errors import TracefpError
from tracefp4.formats import get_format
from tracefp4.guidance.schema import row_bytes, site_bits
from tracefp4.recipe import QuantRecipe

_QWEN3: dict[str, Any] = {"model_type": "qwen3_moe", "vocab_size": 151936, "num_experts": 128, "head_dim": 128}
_HYBRID: dict[str, Any] = {  # one attention layer in four, the others gated linear attention
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
    },
    "qwen3-235b-a22b": _QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
    },
    "qwen3-next-80b-a3b": _HYBRID
    | {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_experts": 512, "vocab_size": 151936},
    "qwen3.5-35b-a3b": _HYBRID
    | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_experts": 256, "vocab_size": 248320},
}
"""Name -> the keys of its config.json that sizes depend on."""

LARGEST, MAX_LAYERS = 10**12, 4096

_GATED_ATTENTION = ("qwen3_next", "qwen3_5")
"""Prefixes of model types whose query projection also makes an output gate."""


@dataclass(frozen=True)
class ModelShape:
    """What sizes depend on.

    moe_layers, attention_layers: 0-based layers with routed experts, with a KV cache. kv_width: values of K (and of V)
    per token and layer. expert_params, other_params: numbers of weights, norms left out. state_bytes: of one sequence
    whatever its length (linear attention: FP32 state, BF16 convolution window).
    """

    name: str
    hidden_size: int
    num_layers: int
    moe_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    kv_width: int
    expert_params: int
    other_params: int
    state_bytes: int = 0


def find_model(model: str) -> ModelShape:
    """A built-in name, a config.json, or a directory that holds one. Raises TracefpError for anything else."""
    if model.lower() in MODELS:
        return shape_from_config(model.lower(), MODELS[model.lower()])
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            raise TracefpError(f"--model {model} is a folder without a config.json")
        raise TracefpError(f"--model {model} is no file or folder and no model known here{_nearest(model)}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TracefpError(f"--model {file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise TracefpError(f"--model {file} holds no JSON object, so it is no config.json of a model")
    return shape_from_config(model, config)


def _nearest(model: str) -> str:
    return did_you_mean(model.lower(), list(MODELS))


def shape_from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face config describes; a nested text_config is followed.

    Raises TracefpError for a missing or odd key, and for caches that are not K and V of every earlier token.
    """
    text = config.get("text_config", config)
    c = _Keys(name, text if isinstance(text, Mapping) else {})
    if c.given("kv_lora_rank"):
        raise TracefpError(f"{name} keeps latent vectors in place of K and V, which tracefp4 does not record")
    hidden, layers, heads = (c.size(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads = c.size("num_key_value_heads", default=heads)
    head_dim = c.size("head_dim", default=hidden // heads)
    kinds = _layer_kinds(c, layers)
    attention = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    linear = layers - len(attention)
    experts = c.size("num_experts", "num_local_experts", "n_routed_experts", default=0)
    moe = _moe_layers(c, layers) if experts else ()
    expert_width = c.size("moe_intermediate_size", "intermediate_size") if experts else 0
    gate = 2 if str(c.values.get("model_type", "")).startswith(_GATED_ATTENTION) else 1
    linear_params, state_bytes = _linear_attention(c, hidden) if linear else (0, 0)
    dense = layers - len(moe)
    other = (
        c.size("vocab_size") * hidden * (1 if c.values.get("tie_word_embeddings") else 2)
        + len(attention) * hidden * head_dim * ((1 + gate) * heads + 2 * kv_heads)
        + linear * linear_params
        + (dense * 3 * hidden * c.size("intermediate_size") if dense else 0)
        + len(moe) * hidden * experts
    )
    shared = c.size("shared_expert_intermediate_size", default=0)
    if shared:
        other += len(moe) * hidden * (3 * shared + 1)  # and the gate of the shared expert
    expert_params = len(moe) * experts * 3 * hidden * expert_width
    return ModelShape(
        name, hidden, layers, moe, attention, kv_heads * head_dim, expert_params, other, linear * state_bytes
    )


class _Keys:
    """Keys of a config, with one sentence for each that is missing or odd."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name, self.values = name, values

    def given(self, key: str) -> bool:
        return self.values.get(key) is not None

    def size(self, *keys: str, default: int | None = None) -> int:
        """The first of these keys that is there: a whole number of at least 1 (0 where the default is 0)."""
        key = next((key for key in keys if self.given(key)), None)
        if key is None:
            if default is None:
                raise TracefpError(f"the config of {self.name} has no {' or '.join(keys)}, so it cannot be sized")
            return default
        value = self.values[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < (0 if default == 0 else 1):
            raise TracefpError(f"the config of {self.name} has {key} = {value!r}, which is no size")
        if value > (MAX_LAYERS if key == "num_hidden_layers" else LARGEST):
            raise TracefpError(f"the config of {self.name} has a {key} beyond any model: give the config of a model")
        return value


def _layer_kinds(c: _Keys, layers: int) -> list[str]:
    kinds = c.values.get("layer_types")
    if kinds is None:
        every = c.size("full_attention_interval", default=1)
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise TracefpError(f"the config of {c.name} has {len(kinds)} layer_types for {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "linear_attention"):
            raise TracefpError(f"{c.name} has layers of type {kind}, whose cache this plan cannot size")
    return list(kinds)


def _moe_layers(c: _Keys, layers: int) -> tuple[int, ...]:
    dense = set(c.values.get("mlp_only_layers") or ())
    step, first = c.size("decoder_sparse_step", default=1), c.size("first_k_dense_replace", default=0)
    return tuple(i for i in range(first, layers) if i not in dense and (i + 1) % step == 0)


def _linear_attention(c: _Keys, hidden: int) -> tuple[int, int]:
    """(weights, state bytes of a sequence) of one gated-delta-net layer."""
    k_heads, v_heads = c.size("linear_num_key_heads"), c.size("linear_num_value_heads")
    k_dim, v_dim = c.size("linear_key_head_dim"), c.size("linear_value_head_dim")
    kernel = c.size("linear_conv_kernel_dim")
    keys, values = k_heads * k_dim, v_heads * v_dim
    conv = 2 * keys + values
    weights = hidden * (2 * keys + 2 * values + 2 * v_heads) + conv * kernel + values * hidden
    return weights, 4 * v_heads * k_dim * v_dim + 2 * conv * kernel


@dataclass(frozen=True)
class GuidanceSize:
    """Bytes of guidance per token of one mode, and what is stored besides.

    activations, kv: packed planes of the expert input, of K and V. encode_scales: f32 per guided row. rows: token id,
    version and valid flag of each row. per_trajectory: static scales and the checksum.
    """

    activations: int
    kv: int
    encode_scales: int
    rows: int
    per_trajectory: int

    @property
    def payload(self) -> int:
        return self.activations + self.kv

    @property
    def per_token(self) -> int:
        return self.payload + self.encode_scales + self.rows


ROW_BYTES = 4 + 4 + 1
"""token_ids int32, versions int32, valid bool of a TrajectoryGuidance."""

CHECKSUM_BYTES = 4


def guidance_size(shape: ModelShape, recipe: QuantRecipe) -> GuidanceSize:
    """What one token of a trajectory takes under a recipe; zeros where the recipe records nothing."""
    sites = {
        "expert_input": (shape.hidden_size, shape.moe_layers),
        "key": (shape.kv_width, shape.attention_layers),
        "value": (shape.kv_width, shape.attention_layers),
    }
    payload = dict.fromkeys(sites, 0)
    scales, static = 0, 0
    for site, (width, layers) in sites.items():
        name, guided = recipe.site_format(site), len(set(layers) & set(recipe.guided_layers))
        if name is None or not guided:
            continue
        payload[site] = guided * row_bytes(name, site_bits(name, recipe.bits), width)
        kind = recipe.site_encode_scale(site)
        scales += 4 * guided if isinstance(kind, str) else 0
        static += 4 if isinstance(kind, float) else 0
    if not any(payload.values()):
        return GuidanceSize(0, 0, 0, 0, 0)
    kv = payload["key"] + payload["value"]
    return GuidanceSize(payload["expert_input"], kv, scales, ROW_BYTES, static + CHECKSUM_BYTES)


def record_row_bytes(recipe: QuantRecipe, widths: Mapping[str, int], layers: int, bits: float) -> int:
    """Bytes that a row of a record takes in ``layers`` layers: packed planes, F32 encode scales, and ROW_BYTES.

    widths: values per row of each site, as the engine records them. 0 where the recipe quantizes none of the sites.
    """
    total = 0
    for site, width in widths.items():
        if (name := recipe.site_format(site)) is not None:
            total += layers * (
                row_bytes(name, site_bits(name, bits), width) + 4 * isinstance(recipe.site_encode_scale(site), str)
            )
    return total + ROW_BYTES if total else 0


def kv_bytes_per_token(shape: ModelShape, format_name: str | None) -> float:
    """Bytes of K and V of one token in all attention layers; None: BF16."""
    values = 2 * len(shape.attention_layers) * shape.kv_width
    return values * (2.0 if format_name is None else _bits(format_name) / 8)


def weight_bytes(shape: ModelShape, format_name: str | None) -> float:
    """Bytes of the weights: the routed experts in a format, all others in BF16; None: all in BF16."""
    return 2.0 * shape.other_params + shape.expert_params * (2.0 if format_name is None else _bits(format_name) / 8)


def _bits(format_name: str) -> float:
    """Bits of a stored value: a 4-bit code and its share of the block's scale byte."""
    return 4 + 8 / get_format(format_name).block_size


def plan(
    shape: ModelShape,
    modes: Sequence[tuple[str, QuantRecipe]],
    context: int,
    trajectories: int,
    link: float = 300.0,
    disk: float = 5.0,
    memory: float = 130.0,
) -> dict[str, Any]:
    """Everything as plain JSON values. context: tokens of a trajectory. link, disk: GB/s. memory: GB.

    Raises TracefpError for a size that is not positive, or a width that is no whole number of blocks.
    """
    given = {"context": context, "trajectories": trajectories, "link": link, "disk": disk, "memory": memory}
    for option, value in given.items():
        if not value > 0:
            raise TracefpError(f"--{option} must be greater than 0, got {value:g}")
        if value > LARGEST:
            raise TracefpError(f"--{option} must be at most {LARGEST:g}: no machine holds more")
    guidance = []
    for name, recipe in modes:
        size = guidance_size(shape, recipe)
        per_trajectory = context * size.per_token + size.per_trajectory
        step = trajectories * per_trajectory
        guidance.append(
            {
                "mode": name,
                "bits": recipe.bits,
                "guided_layers": len(recipe.guided_layers),
                "activation_bytes_per_token": size.activations,
                "kv_bytes_per_token": size.kv,
                "payload_bytes_per_token": size.payload,
                "overhead_bytes_per_token": size.per_token - size.payload,
                "overhead_share": size.per_token / size.payload - 1 if size.payload else 0.0,
                "bytes_per_trajectory": per_trajectory,
                "bytes_per_step": step,
                "payload_bytes_per_step": trajectories * context * size.payload,
                "link_seconds": step / (link * 1e9),
                "disk_seconds": step / (disk * 1e9),
            }
        )
    return {
        "model": shape.name,
        "layers": shape.num_layers,
        "moe_layers": len(shape.moe_layers),
        "attention_layers": len(shape.attention_layers),
        "context": context,
        "trajectories": trajectories,
        "link_gb_per_s": link,
        "disk_gb_per_s": disk,
        "memory_gb": memory,
        "guidance": guidance,
        "capacity": _capacity(shape, context, memory * 1e9),
    }


def _capacity(shape: ModelShape, context: int, memory: float) -> list[dict[str, Any]]:
    rows = []
    for weights, kv in ((None, None), ("nvfp4", None), ("nvfp4", "nvfp4")):
        used, per_token = weight_bytes(shape, weights), kv_bytes_per_token(shape, kv)
        free = max(0.0, memory - used)
        rows.append(
            {
                "weights": weights or "bf16",
                "kv": kv or "bf16",
                "weight_bytes": used,
                "kv_bytes_per_token": per_token,
                "tokens": int(free // per_token) if per_token else None,
                "sequences": int(free // (context * per_token + shape.state_bytes)) if per_token else None,
            }
        )
    return rows
