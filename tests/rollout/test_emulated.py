"""Formats and records without a kernel, beside the kernels: what the torch backend computes and records."""

from dataclasses import replace

import pytest
import torch

from kernel_case import engine, requests
from tracefp4.formats import get_format
from tracefp4.guidance import pack_rows
from tracefp4.kernels.quantize_record import RecordTarget
from tracefp4.methods import MethodConfig, QuantConfig, get_method
from tracefp4.rollout.emulated import emulated_experts, fuses_record, record_rows
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.kernel_model import KernelModel
from tracefp4.rollout.model import Captured, ExpertMatrices
from tracefp4.types import GuidanceHandle

MX4 = {"weights": "mxfp4-rceil", "activations": "mxfp4-rceil", "kv": "mxfp4-rceil"}
MX8 = {**MX4, "activations": "mxfp8-rceil"}
W4A16 = {**MX4, "activations": "none"}


@pytest.mark.parametrize("quant", [MX4, MX8, W4A16], ids=["w4a4", "w4a8", "w4a16"])
def test_experts_are_those_of_the_torch_path(quant: dict[str, str]) -> None:
    want, made = (engine("naive", backend, quant=quant).model for backend in ("torch", "references"))
    assert isinstance(made, KernelModel)
    h = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    y, chosen = want._moe(1, want._layers[1], h, Captured({}, None))
    layer = made._layers[1]
    gates, same = made._choose(1, layer, h)
    assert torch.equal(same, chosen)
    name = made.recipe.activations
    blocks = None if name is None else get_format(name).quantize(h)
    assert isinstance(layer.gate_up, ExpertMatrices)
    assert isinstance(layer.down, ExpertMatrices)
    real = torch.ones(7, dtype=torch.bool)
    got = emulated_experts(h, blocks, same, gates, layer.gate_up, layer.down, made.recipe, None, real)
    assert float((got != y).float().mean()) < 0.02  # BF16 values at a rounding border of the FP32 sum
    assert torch.allclose(got.float(), y.float(), rtol=2**-7, atol=1e-4)


def record_of(made: RolloutEngine, handle: GuidanceHandle | None):  # type: ignore[no-untyped-def]
    assert handle is not None
    return made.store.get(handle)


@pytest.mark.parametrize(
    ("quant", "bits"), [(MX4, 1.125), (MX8, 1.125), ({}, 0.5), ({}, 0.125)], ids=["w4a4", "w4a8", "0.5", "0.125"]
)
def test_an_engine_records_what_the_torch_backend_records(quant: dict[str, str], bits: float) -> None:
    """K and V of the first layer follow from the embedding by the same roundings: equal bytes."""
    # 1.125 bits are 1.03125 in MX formats.
    recipe = get_method("trace-all").configured(MethodConfig(bits=bits)).recipe(QuantConfig(**quant), 2)  # type: ignore[arg-type]
    a, b = (engine(backend=backend, recipe=recipe) for backend in ("torch", "references"))
    asked = [replace(r, probe=True) for r in requests(4)]
    for x, y in zip(a.generate(asked), b.generate(asked), strict=True):
        n = len(x.prompt_ids)
        for theirs, ours in ((x.guidance, y.guidance), (x.probe, y.probe)):
            r, s = record_of(a, theirs), record_of(b, ours)
            assert (s.layers, s.bits, s.recipe_hash) == (r.layers, r.bits, r.recipe_hash)
            assert s.valid.all()
            for site in ("key", "value"):
                assert torch.equal(r.sites[site].payload[0, :n], s.sites[site].payload[0, :n])
            assert s.sites["expert_input"].payload.shape[2] == r.sites["expert_input"].payload.shape[2]
            far = (r.sites["expert_input"].payload[0, :n] != s.sites["expert_input"].payload[0, :n]).float().mean()
            assert float(far) < (
                0.5 if quant == MX8 else 0.2
            )  # attention's roundings cross E4M3's finer borders more often


def test_an_mx_cache_holds_exact_values() -> None:
    made = engine("naive", "references", quant=MX4)
    assert made.kernels is not None
    pool, fmt = made.kernels.pool, get_format("mxfp4-rceil")
    k, v = torch.randn(2, 3, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots = torch.tensor([5, 0, 17])
    blocks, _ = pool.write(1, slots, k, v, None)
    assert blocks is not None
    read, values = pool.read(1, slots)
    assert torch.equal(read.float(), fmt.dequantize(blocks).view(3, 2, 64))
    assert torch.equal(values.float(), fmt.dequantize(fmt.quantize(v.flatten(1))).view(3, 2, 64))


def test_rows_of_any_width_are_recorded_in_place() -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    blocks = get_format("nvfp4").quantize(x, encode_scale="row-pow2")
    assert fuses_record("nvfp4", 0.5)
    assert not fuses_record("mxfp4-rceil", 1.03125)
    rows = pack_rows(blocks, 0.5)
    wide = torch.zeros(9, rows.shape[1] + 4, dtype=torch.uint8)
    scales = torch.zeros(9, 2)
    record_rows(blocks, RecordTarget(wide[:, 4:], torch.tensor([7, 2, 0]), 0.5, scales[:, 1]))
    assert torch.equal(wide[[7, 2, 0], 4:], rows)
    assert not wide[:, :4].any()
    assert torch.equal(scales[[7, 2, 0], 1], blocks.encode_scale.reshape(-1))  # type: ignore[union-attr]
    assert not scales[[1, 3, 4, 5, 6, 8]].any()
