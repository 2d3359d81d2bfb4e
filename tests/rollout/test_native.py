"""The seam for FP4 matrix units, with a provider of torch operations in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_case import engine, moe, requests
from tiny import tiny_recipe, tiny_weights
from tracefp4.errors import TracefpError
from tracefp4.formats import decode_e4m3
from tracefp4.formats.e2m1 import decode_packed
from tracefp4.recipe import quantize_expert_weights
from tracefp4.rollout import native
from tracefp4.rollout.config import RolloutConfig
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.model import PARTS, ModelShape
from tracefp4.rollout.native import FlashInferProvider, NativeModel, TorchProvider, blocked_scales, find_provider
from tracefp4.rollout.weights import tensors_of


def unblocked(flat: Tensor, R: int, C: int) -> Tensor:
    """Inverse of the layout by its own words, byte by byte."""
    out = torch.empty(R, C, dtype=torch.uint8)
    tiles = -(-C // 4)
    for r in range(R):
        for c in range(C):
            tile = (r // 128) * tiles + c // 4
            out[r, c] = flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]
    return out


class FakeProvider:
    """What an FP4 matrix unit computes, from the operands that one would be handed."""

    name = "fake"

    def __init__(self) -> None:
        self.calls = 0

    def missing(self, device: str) -> str | None:
        return None

    def linear(self, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor) -> Tensor:
        self.calls += 1

        def values(codes: Tensor, flat: Tensor) -> Tensor:
            R, C = len(codes), codes.shape[1] // 8
            tiles = torch.nn.functional.pad(torch.arange(R * C).view(R, C), (0, -C % 4, 0, -R % 128), value=-1)
            order = blocked_scales(tiles)
            scales = torch.empty(R * C, dtype=torch.uint8)
            scales[order[order >= 0]] = flat[order >= 0]
            return (decode_packed(codes).unflatten(-1, (-1, 16)) * decode_e4m3(scales.view(R, C))[..., None]).flatten(1)

        return (values(x_codes, x_scales) @ values(w_codes, w_scales).T).bfloat16()


@pytest.mark.parametrize(("R", "C"), [(1, 1), (128, 4), (130, 6), (300, 8)])
def test_scales_lie_where_the_layout_says(R: int, C: int) -> None:
    scales = torch.randint(0, 127, (R, C), generator=torch.Generator().manual_seed(R), dtype=torch.uint8)
    flat = blocked_scales(scales)
    assert flat.numel() == -(-R // 128) * 128 * (-(-C // 4) * 4)
    assert torch.equal(unblocked(flat, R, C), scales)
    assert int(flat.sum()) == int(scales.sum()), "padding is zero"


def test_a_provider_computes_the_same_rollout() -> None:
    """Against the kernels' references: products rounded to BF16 before an exact power of two, so equal up to sums."""
    provider = FakeProvider()
    recipe = tiny_recipe("trace-all", 2)
    config = RolloutConfig(max_num_seqs=4, max_model_len=48, page_size=16, backend="triton", cuda_graphs=False)
    model = NativeModel(ModelShape.from_hf(moe()), recipe, torch.bfloat16, "cpu", provider)
    made = RolloutEngine(moe(), recipe, config, kernel_model=model)
    assert made.kernels is not None
    model.backend = made.kernels.pool.backend = "torch"
    made.update_weights(tiny_weights(moe()).items(), 0)
    before = [t.data_ptr() for t in model.weight_tensors]
    made.update_weights(tiny_weights(moe()).items(), 1)
    assert [t.data_ptr() for t in model.weight_tensors] == before
    want = engine("trace-all", "references")
    for a, b in zip(made.generate(requests(4)), want.generate(requests(4)), strict=True):
        n = next((i for i, (x, y) in enumerate(zip(a.response_ids, b.response_ids, strict=True)) if x != y), 4)
        assert (a.logprobs[:n] - b.logprobs[:n]).abs().max() < 0.1 if n else True
        r, s = (e.store.get(t.guidance) for e, t in ((made, a), (want, b)) if t.guidance is not None)
        rows = len(a.prompt_ids)
        for site in ("expert_input", "key", "value"):
            assert torch.equal(r.sites[site].payload[0, :rows], s.sites[site].payload[0, :rows])
    assert provider.calls > 0


def test_replaced_experts_are_those_that_are_multiplied() -> None:
    """Weights of a quantizer that saw more: in place, and in the form that the provider reads."""
    recipe = tiny_recipe("trace-all", 2)
    model = NativeModel(ModelShape.from_hf(moe()), recipe, torch.bfloat16, "cpu", FakeProvider())
    weights = dict(tiny_weights(moe()))
    model.load(weights.items())
    for part in PARTS:
        held = list(tensors_of(getattr(model._layers[1], part)))
        w = 0.5 * weights[f"model.layers.1.mlp.experts.{part}_proj"]
        model.replace_experts(1, part, quantize_expert_weights(w, "nvfp4", recipe.pow2))
        now = list(tensors_of(getattr(model._layers[1], part)))
        assert [t.data_ptr() for t in now] == [t.data_ptr() for t in held]
        want = list(tensors_of(model._expert_matrices(w)))
        assert all(torch.equal(a, b) for a, b in zip(now, want, strict=True))


def test_without_the_hardware_it_is_refused_by_name() -> None:
    with pytest.raises(
        TracefpError, match=r'backend "native" cannot run here \(flashinfer: .*torch: .*set rollout'
    ) as e:
        find_provider("cpu")
    assert "\n" not in str(e.value)
    config = RolloutConfig(backend="native", max_model_len=64)
    with pytest.raises(TracefpError, match='backend "native" cannot run here'):
        RolloutEngine(moe(), tiny_recipe("trace-all", 2), config)


def test_each_provider_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no FP4 matrix units" in str(TorchProvider().missing("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert FlashInferProvider().missing("cpu") == "the package flashinfer-python is not installed"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert "(SM90) has no FP4 matrix units" in str(TorchProvider().missing("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert TorchProvider().missing("cuda") is None
    monkeypatch.delattr(torch, "float4_e2m1fn_x2")
    assert "has no float4_e2m1fn_x2" in str(TorchProvider().missing("cuda"))


def test_the_first_that_can_run_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeProvider()
    monkeypatch.setattr(native, "PROVIDERS", [FlashInferProvider(), fake])
    assert find_provider("cpu") is fake


@pytest.mark.parametrize("quant", [{"weights": "none", "activations": "none"}, {"activations": "none"}])
def test_it_wants_both_operands_in_fp4(quant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PROVIDERS", [FakeProvider()])
    config = RolloutConfig(backend="native", max_model_len=64)
    with pytest.raises(TracefpError, match="multiplies FP4 by FP4"):
        RolloutEngine(moe(), tiny_recipe("naive", 2, **quant), config)
