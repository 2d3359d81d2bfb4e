"""Second moments of what the experts' weights are multiplied with: the calibration data of post-training quantizers.

Legend: E experts, H hidden size, F expert width, N tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

Moments = dict[tuple[int, str], Tensor]
"""(layer, "gate_up" or "down") to f32 [E, H] or [E, F]: sums of squares of each input channel, by expert."""


@torch.no_grad()
def input_moments(model: PreTrainedModel, sequences: Iterable[Tensor]) -> Moments:
    """Runs token ids (int64 [T] each) through an unquantized Qwen3-MoE or dense Qwen3 model (E = 1) and sums squares.

    The model is left as it was. Dense layers among a mixture's are not quantized and not in the result.
    """
    moments: Moments = {}
    hooks = []
    mixture = model.config.model_type == "qwen3_moe"
    for i, layer in enumerate(model.get_decoder().layers):
        if hasattr(layer.mlp, "experts"):
            hooks.append(layer.mlp.experts.register_forward_pre_hook(_experts_hook(moments, i)))
        elif not mixture:
            hooks.append(layer.mlp.register_forward_pre_hook(_dense_hook(moments, i)))
    try:
        for ids in sequences:
            model(input_ids=ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return moments


def _add(moments: Moments, where: tuple[int, str], expert: int, experts: int, x: Tensor) -> None:
    if where not in moments:
        moments[where] = torch.zeros(experts, x.shape[-1], device=x.device)
    moments[where][expert] += x.float().square().flatten(0, -2).sum(0)


def _experts_hook(moments: Moments, layer: int) -> Any:
    """Before an experts module runs on (hidden states [N, H], experts [N, K], gates [N, K])."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        x, chosen = args[0].reshape(-1, args[0].shape[-1]), args[1]
        gate_up, count = module.gate_up_proj, module.gate_up_proj.shape[0]  # type: ignore[index]
        for expert in chosen.unique().tolist():
            rows = x[(chosen == expert).any(-1)]
            gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=-1)  # type: ignore[index]
            _add(moments, (layer, "gate_up"), expert, count, rows)  # type: ignore[arg-type]
            _add(moments, (layer, "down"), expert, count, module.act_fn(gate) * up)  # type: ignore[operator, arg-type]

    return hook


def _dense_hook(moments: Moments, layer: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0]
        hidden = module.act_fn(module.gate_proj(x)) * module.up_proj(x)  # type: ignore[operator]
        _add(moments, (layer, "gate_up"), 0, 1, x)
        _add(moments, (layer, "down"), 0, 1, hidden)

    return hook
