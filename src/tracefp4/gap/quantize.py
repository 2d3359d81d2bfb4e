"""Rounds the linear layers of any transformers model to a four-bit format, as weight-only and W4A4 deployments do."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tracefp4.errors import TracefpError
from tracefp4.formats import Format, get_format
from tracefp4.recipe import quantize_expert_weights


@dataclass
class Rounded:
    """What was rounded: numbers of layers and weights; skipped: layers whose width is no multiple of a block."""

    layers: int = 0
    weights: int = 0
    all_weights: int = 0
    skipped: list[str] = field(default_factory=list)


def check_inputs(config: PretrainedConfig, weights: str) -> None:
    """Raises TracefpError where a model of this config has stacked experts, which ``quantize_linears`` refuses."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" and any(p.ndim == 3 for p in module.parameters(recurse=False)):
            raise _stacked(name, weights)


@torch.no_grad()
def quantize_linears(model: PreTrainedModel, weights: str, activations: str | None) -> Rounded:
    """Rounds in place the weights of all linear layers but the output head; hooks round their inputs where
    ``activations`` names a format, with one encode scale a token.

    Stacked experts (3-D parameters [E, out, in] of a module named ``experts``) are rounded too, one scale an expert.
    The rounded values are kept in the model's dtype. Raises TracefpError where nothing can be rounded, and for
    ``activations`` on stacked experts, whose inner input no hook reaches.
    """
    fmt = get_format(weights)
    head = model.get_output_embeddings()
    done = Rounded(all_weights=sum(p.numel() for p in model.parameters()))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            _round_layer(name, module, fmt, activations, done)
        elif name.rpartition(".")[2] == "experts":
            _round_experts(name, module, weights, activations, done)
    if not done.layers:
        raise TracefpError(
            f"no linear layer of the model can be rounded to {weights}"
            + (f": the width of {done.skipped[0]} is no multiple of {fmt.block_size}" if done.skipped else "")
        )
    return done


def _round_layer(name: str, module: nn.Linear | Conv1D, fmt: Format, activations: str | None, done: Rounded) -> None:
    transposed = isinstance(module, Conv1D)  # stores [in, out]
    weight = module.weight.T if transposed else module.weight
    if weight.shape[-1] % fmt.block_size:
        done.skipped.append(name)
        return
    blocks = fmt.quantize(weight, "tensor") if fmt.scale_kind == "e4m3" else fmt.quantize(weight)
    rounded = fmt.dequantize(blocks, module.weight.dtype)
    module.weight.copy_(rounded.T if transposed else rounded)
    done.layers += 1
    done.weights += module.weight.numel()
    if activations:
        module.register_forward_pre_hook(_RoundInput(get_format(activations)))


def _round_experts(name: str, module: nn.Module, weights: str, activations: str | None, done: Rounded) -> None:
    fmt = get_format(weights)
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.ndim != 3:
            continue
        if activations:
            raise _stacked(name, weights)
        if parameter.shape[-1] % fmt.block_size:
            done.skipped.append(f"{name}.{key}")
            continue
        parameter.copy_(fmt.dequantize(quantize_expert_weights(parameter, weights), parameter.dtype))
        done.layers += 1
        done.weights += parameter.numel()


def _stacked(name: str, weights: str) -> TracefpError:
    return TracefpError(
        f"the experts {name} are stacked, and the input of their down-projection cannot be rounded from outside: use "
        f"@{weights} (weights alone), or @engine:{weights} for a Qwen3-MoE"
    )


class _RoundInput:
    """A forward pre-hook: x [..., K] to the nearest values of the format, in x's dtype."""

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = args
        return (self.fmt.dequantize(self.fmt.quantize(x), x.dtype), *rest)
