"""Quantizers that run after training and see calibration data: H-Scale."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tracefp4.errors import TracefpError
from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.formats.hscale import quantize_hscale
from tracefp4.guidance.store import MemoryStore
from tracefp4.loop.parts import Parts
from tracefp4.nn.moments import Moments, input_moments
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.model import PARTS

CALIBRATION_TAG = "calibrate"


def quantize_calibrated(engine: RolloutEngine, parts: Parts, model: PreTrainedModel) -> None:
    """Gives the engine, which holds the model's weights, expert weights with H-Scale block scales.

    Calibration data: the unquantized policy's own responses to the training prompts of step 0, of another random
    stream than the step's. Raises TracefpError where the engine's weights are not plain NVFP4.
    """
    moments = calibrate(parts, model)
    name = engine.recipe.weights
    if name is None or get_format(name).scale_kind != "e4m3":
        raise TracefpError(f"H-Scale chooses scales of NVFP4 weights, and these are {name}: set quant.weights")
    for layer in sorted({where[0] for where in moments}):
        for part in PARTS:
            w_EOI = expert_weights(model, layer, part)
            engine.model.replace_experts(
                layer, part, hscale_expert_weights(w_EOI, moments[layer, part], name, engine.recipe.pow2)
            )


def calibrate(parts: Parts, model: PreTrainedModel) -> Moments:
    """Second moments of every expert projection's input on responses of the unquantized policy."""
    config = parts.config
    rollout = parts.make_engine(MemoryStore(), QuantRecipe(num_layers=parts.hf_config.num_hidden_layers))
    rollout.update_weights(((n, p.detach()) for n, p in model.named_parameters()), 0)
    prompts, encoded = parts.encode(parts.task.train_prompts(0, config.sampling.prompts_per_step))
    requests = parts.requests(prompts, config.sampling.samples_per_prompt, CALIBRATION_TAG, encoded=encoded)
    each = [p for p in prompts for _ in range(config.sampling.samples_per_prompt)]
    exchanges = parts.exchanges({r.request_id: p for r, p in zip(requests, each, strict=True)})
    trajectories = rollout.generate(requests, on_turn=exchanges)
    device = next(model.parameters()).device
    return input_moments(model, (torch.tensor(t.token_ids[:-1], device=device) for t in trajectories))


def expert_weights(model: PreTrainedModel, layer: int, part: str) -> torch.Tensor:
    """[E, out, in] of "gate_up" or "down", as the engine stacks them; a dense MLP is one expert."""
    mlp = model.get_decoder().layers[layer].mlp
    if hasattr(mlp, "experts"):
        w: torch.Tensor = getattr(mlp.experts, f"{part}_proj").detach()
        return w
    if part == "down":
        return mlp.down_proj.weight.detach()[None]
    return torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()[None]


def hscale_expert_weights(
    w_EOI: torch.Tensor, moments_EI: torch.Tensor, format_name: str, pow2: bool
) -> QuantizedBlocks:
    """``quantize_expert_weights`` with H-Scale block scales; the encode scale of an expert is the same."""
    scale_E1 = get_format(format_name).resolve_encode_scale(w_EOI.flatten(1), "row-pow2" if pow2 else "row")
    assert scale_E1 is not None
    return quantize_hscale(w_EOI, moments_EI[:, None], format_name, scale_E1[:, :, None])
