"""The engine on a dense Qwen3: against transformers, and against itself under other chunks and pages."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import make_engine, tiny_dense_config, tiny_model, tiny_requests, tiny_weights
from tracefp4.errors import TracefpError
from tracefp4.formats import get_format
from tracefp4.guidance import row_bytes
from tracefp4.recipe import quantize_expert_weights
from tracefp4.types import Trajectory


def logprobs(model: Any, t: Trajectory) -> Tensor:
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([t.token_ids])).logits[0].float(), -1)
    return logp[len(t.prompt_ids) - 1 : -1].gather(-1, torch.tensor(t.response_ids)[:, None])[:, 0]


def test_greedy_equals_transformers_generate() -> None:
    model = tiny_model(tiny_dense_config())
    engine = make_engine("bf16", "float32", config=tiny_dense_config())
    for t in engine.generate(tiny_requests(4, temperature=0.0, stop=True)):
        prompt = torch.tensor([t.prompt_ids])
        out = model.generate(prompt, max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert tuple(out[0, prompt.shape[1] :].tolist()) == t.response_ids


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4-rceil"])
def test_fp4_weights_are_those_of_a_stock_model_with_rounded_weights(name: str) -> None:
    """Gate and up under one encode scale. FP32, only weights in FP4, so that nothing is left but summation order."""
    quant = {"weights": name, "activations": "none", "kv": "none"}
    engine = make_engine("naive", "float32", config=tiny_dense_config(), quant=quant)
    model, fmt = tiny_model(tiny_dense_config()), get_format(name)

    def rounded(*weights: Tensor) -> Tensor:
        return fmt.dequantize(quantize_expert_weights(torch.cat(weights)[None], name, True))[0]

    with torch.no_grad():
        for layer in model.model.layers:
            mlp = layer.mlp
            gate, up = rounded(mlp.gate_proj.weight, mlp.up_proj.weight).chunk(2)
            mlp.down_proj.weight.copy_(rounded(mlp.down_proj.weight))
            mlp.gate_proj.weight.copy_(gate)
            mlp.up_proj.weight.copy_(up)
    plain = tiny_model(tiny_dense_config())
    for t in engine.generate(tiny_requests(6)):
        assert (t.logprobs - logprobs(model, t)).abs().max() <= 1e-5
        assert (t.logprobs - logprobs(plain, t)).abs().max() > 1e-3


@functools.cache
def recorded(**sizes: int) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    """Response and expert-input payload of each request, FP32 with full codes."""
    engine = make_engine("trace-full", "float32", config=tiny_dense_config(), **sizes)
    out = {}
    for t in engine.generate(tiny_requests(8)):
        assert t.guidance is not None
        assert t.routed_experts is None
        out[t.request_id] = (t.response_ids, engine.store.get(t.guidance).sites["expert_input"].payload)
    return out


@pytest.mark.parametrize("sizes", [{"max_tokens_per_step": 5}, {"max_num_seqs": 2, "page_size": 3}], ids=str)
def test_sizes_do_not_change_a_rollout_or_its_record(sizes: dict[str, int]) -> None:
    """A handful of codes may flip where an FP32 sum of another order crosses a rounding boundary."""
    want, got = recorded(), recorded(**sizes)
    for name, (response, payload) in want.items():
        assert got[name][0] == response
        assert got[name][1].shape == payload.shape == (2, payload.shape[1], row_bytes("nvfp4", 4.5, 64))
        assert (got[name][1] != payload).float().mean() < 0.01


def test_bad_updates_are_refused_by_name() -> None:
    engine = make_engine("trace-all", config=tiny_dense_config())
    weights = tiny_weights(tiny_dense_config())
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in (
        ({name: torch.full_like(weights[name], torch.nan)}, f"{name} holds NaN"),
        ({name: weights[name][:3]}, rf"{name} has shape \(3, 64\), the model needs \(96, 64\)"),
        ({"model.layers.1.mlp.gate.weight": weights[name]}, "mlp.gate.weight is not part of this model"),
    ):
        with pytest.raises(TracefpError, match=message):
            engine.update_weights({**weights, **change}.items(), 1)
    assert engine.version == 0
    engine.update_weights(weights.items(), 1)
