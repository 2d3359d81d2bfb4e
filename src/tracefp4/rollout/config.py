"""Settings of the engine, and which code runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tracefp4.config import StrictModel
from tracefp4.errors import TracefpError
from tracefp4.files import warn
from tracefp4.recipe import QuantRecipe

if TYPE_CHECKING:
    from tracefp4.rollout.model import ModelShape

SMALL_MODEL = 2e9
"""Bytes of BF16 weights below which a decode step takes the host longer than the GPU."""
BURST = 8
LARGE_BURST = 4
MOST_STEPS = 64


class RolloutConfig(StrictModel):
    """Sizes of the engine.

    dtype: compute dtype of everything that is not FP4. max_num_seqs: sequences decoded together.
    max_tokens_per_step: prefill rows per step; longer prompts are chunked. page_size: slots of a cache page; 0: 16
    with the backend "torch", 64 with the others. num_pages: cache pages; 0 sizes the cache so that max_num_seqs
    sequences of max_model_len fit. max_model_len: prompt plus response tokens of one sequence.

    backend: "torch", plain operations; "triton", this package's kernels; "native", FP4 matrix units for the experts'
    products and Triton for the rest; "auto": triton on a CUDA device where the kernels take model and recipe, else
    torch. cuda_graphs: a decode step is captured once per batch size and replayed (CUDA only). memory_gb: gigabytes
    (10^9 bytes) for weights, cache, recording and workspace together; what is left after the others becomes cache
    pages. 0: num_pages decides. steps_per_sync: decode steps between two looks of the host at what was drawn; rows that
    end in between compute to no purpose until then. 0: over the kernels on a GPU 8 for a small model (under 2 GB of
    BF16 weights), where the host would be the slower one, and 4 for others; else 1. prefix_caching: a
    prompt's whole pages that another sequence holds, computed with the same weights, are shared and not computed again,
    as those of the samples of one prompt; their rows' records are the first one's.
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_num_seqs: int = Field(128, ge=1)
    max_tokens_per_step: int = Field(4096, ge=1)
    page_size: int = Field(0, ge=0)
    num_pages: int = Field(0, ge=0)
    max_model_len: int = Field(256, ge=2)
    backend: Literal["auto", "torch", "triton", "native"] = "auto"
    cuda_graphs: bool = True
    memory_gb: float = Field(0.0, ge=0)
    steps_per_sync: int = Field(0, ge=0, le=MOST_STEPS)
    prefix_caching: bool = True


def resolve(config: RolloutConfig, device: str, shape: ModelShape, recipe: QuantRecipe) -> RolloutConfig:
    """The same settings with "auto" and page_size 0 replaced by what they mean on a device for a model and recipe.

    Raises TracefpError for settings that exclude one another, and for a backend that does not run the model or recipe.
    """
    backend = config.backend
    obstacle = "" if backend == "torch" else obstacle_to_kernels(shape, recipe, config)
    cuda = device.partition(":")[0] == "cuda"
    if backend == "auto":
        backend = "triton" if cuda and not obstacle else "torch"
        if obstacle and cuda:
            warn(f"the rollout runs in plain torch, since the kernels do not take {obstacle}")
    elif obstacle:
        raise TracefpError(f'rollout.backend "{backend}" does not run {obstacle}: set rollout.backend="torch"')
    if config.memory_gb and config.num_pages:
        raise TracefpError("rollout.memory_gb and rollout.num_pages both size the cache: set one of them to 0")
    page_size = config.page_size or (16 if backend == "torch" else 64)
    if backend != "torch" and page_size % 16:
        raise TracefpError(f'rollout.page_size {page_size} is no multiple of 16, which backend "{backend}" needs')
    graphs = config.cuda_graphs and backend == "triton"  # native products ask the host for the rows of each expert
    steps = config.steps_per_sync or (burst_of(shape) if cuda and backend == "triton" else 1)
    settings = {"backend": backend, "page_size": page_size, "cuda_graphs": graphs, "steps_per_sync": steps}
    return config.model_copy(update=settings)


def check_device(config: RolloutConfig, device: str) -> None:
    """Raises TracefpError where the kernels that the settings ask for by name do not run on a device at all, whatever
    the model; on "meta", where nothing is computed, all do."""
    kind = device.partition(":")[0]
    if config.backend != "triton" or kind == "meta":
        return
    from tracefp4.kernels.backend import triton_missing

    if (why := triton_missing([kind])) is not None:
        raise TracefpError(f'rollout.backend "triton" needs {why}, or set rollout.backend="torch"')


def burst_of(shape: ModelShape) -> int:
    """Decode steps in a row of a model over the kernels on a GPU, where the setting leaves it open."""
    from tracefp4.rollout.weights import num_parameters

    return BURST if 2 * num_parameters(shape) < SMALL_MODEL else LARGE_BURST


def obstacle_to_kernels(shape: ModelShape, recipe: QuantRecipe, config: RolloutConfig) -> str:
    """What of a model or recipe the kernels do not take, naming the setting; "" where they take all of it."""
    from tracefp4.formats import get_format
    from tracefp4.kernels.grouped_experts.packed import TILE
    from tracefp4.kernels.quantize_record import TRITON_FORMATS
    from tracefp4.rollout.emulated import EMULATED_EXPERTS, emulates_experts

    r, why = recipe, ""
    emulated = emulates_experts(recipe)
    what = (
        "residual compensation (method quads or resq)" if recipe.compensation else f"expert products in {_formats(r)}"
    )
    if emulated and config.backend == "native":
        why = what
    elif emulated and shape.experts > EMULATED_EXPERTS:
        why = f"{what} of more than {EMULATED_EXPERTS} experts"
    elif config.dtype != "bfloat16":
        why = f'rollout.dtype "{config.dtype}", the kernels compute in bfloat16'
    elif shape.head_dim not in (64, 128, 256):
        why = f"the checkpoint's head_dim {shape.head_dim}, the kernels take 64, 128 or 256"
    elif r.activations is not None and r.weights is None:
        why = f'quant.activations "{r.activations}" with quant.weights "none"'
    elif r.kv not in (None, *TRITON_FORMATS) and get_format(r.kv).scale_kind != "e8m0":
        why = f'quant.kv "{r.kv}", the kernels keep a cache in {" or ".join(TRITON_FORMATS)} or an MX format'
    elif r.weights is not None and not emulated:
        for field, width in (("hidden_size", shape.hidden), (shape.expert_width_field, shape.expert_width)):
            if width % TILE:
                why = f"the checkpoint's {field} {width}, the kernels take multiples of {TILE} in FP4"
    return why


def _formats(recipe: QuantRecipe) -> str:
    return " and ".join(dict.fromkeys(name for name in (recipe.weights, recipe.activations) if name))
