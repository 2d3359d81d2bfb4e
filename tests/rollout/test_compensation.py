"""The compensated product is the published formula over quantized operands, and it gives back what it says."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kernel_case
from tiny import make_engine, tiny_config, tiny_dense_config, tiny_recipe, tiny_requests
from tracefp4.errors import TracefpError
from tracefp4.formats import get_format
from tracefp4.methods import MethodConfig, QuantConfig, get_method
from tracefp4.recipe import Compensation, QuantRecipe
from tracefp4.rollout.compensation import ResidualCompensation, select
from tracefp4.rollout.emulated import emulated_experts
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.kernel_model import KernelModel
from tracefp4.rollout.model import Captured, ExpertMatrices

FORMATS = ["nvfp4", "mxfp4-rceil", "mxfp8-rceil"]


def recipe_of(rule: str, select: str = "channels", share: float = 0.5, **parts: str) -> QuantRecipe:
    formats = {"weights": "nvfp4", "activations": "nvfp4", "kv": "nvfp4", **parts}
    return QuantRecipe(num_layers=2, **formats, compensation=Compensation(rule, select, share))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    """(x BF16 [24, 64] with outlier channels, w FP32 [48, 64])."""
    g = torch.Generator().manual_seed(seed)
    channel = torch.randn(64, generator=g).exp()
    return (torch.randn(24, 64, generator=g) * channel).bfloat16(), torch.randn(48, 64, generator=g)


def formula(x: Tensor, w: Tensor, recipe: QuantRecipe) -> Tensor:
    """Q(X) Q(W)^T + Q(R_C) Q(W)^T, or S(Q(R)) Q(W)^T, in FP64, by loops over channels."""
    c = recipe.compensation
    assert c is not None
    assert recipe.activations is not None
    assert recipe.weights is not None
    fmt, weight_format = get_format(recipe.activations), get_format(recipe.weights)
    scale = recipe.site_encode_scale("expert_input")

    def q(t: Tensor) -> Tensor:
        return fmt.dequantize(fmt.quantize(t, encode_scale=scale))

    qw = weight_format.dequantize(weight_format.quantize(w)).double()
    residual = x.float() - q(x)
    seen = residual if c.rule == "quads" else q(residual)
    keep = torch.zeros(seen.shape, dtype=torch.bool)
    if c.select == "channels":
        norms = [math.sqrt(sum(float(v) ** 2 for v in seen[:, i])) for i in range(seen.shape[1])]
        for i in sorted(range(len(norms)), key=lambda i: -norms[i])[: round(c.share * len(norms))]:
            keep[:, i] = True
    else:
        width = 4 if c.select == "2:4" else seen.shape[1]
        count = 2 if c.select == "2:4" else round(c.share * width)
        for n in range(seen.shape[0]):
            for start in range(0, seen.shape[1], width):
                order = sorted(range(start, start + width), key=lambda i: -abs(float(seen[n, i])))
                keep[n, order[:count]] = True
    second = q(torch.where(keep, residual, 0.0)) if c.rule == "quads" else torch.where(keep, seen, 0.0)
    return q(x).double() @ qw.T + second.double() @ qw.T


@pytest.mark.parametrize("selection", ["channels", "row", "2:4"])
@pytest.mark.parametrize("rule", ["quads", "resq"])
@pytest.mark.parametrize("name", FORMATS)
def test_one_product_is_the_sum_of_the_two(name: str, rule: str, selection: str) -> None:
    x, w = inputs()
    weights = "nvfp4" if name == "nvfp4" else "mxfp4-rceil"
    recipe = recipe_of(rule, selection, activations=name, weights=weights)
    compensation = ResidualCompensation.of(recipe)
    assert compensation is not None
    fmt, weight_format = get_format(name), get_format(weights)
    blocks = fmt.quantize(x, encode_scale=recipe.site_encode_scale("expert_input"))
    operand, epilogue = compensation.operand(x, blocks, *fmt.operands(blocks, dtype=torch.float32))
    qw = weight_format.dequantize(weight_format.quantize(w)).double()
    product = operand.double() @ qw.T * (1.0 if epilogue is None else epilogue.double())
    want = formula(x, w, recipe)
    # The summed operand is rounded once to FP32.
    size = operand.double().abs() @ qw.abs().T * (1.0 if epilogue is None else epilogue.double())
    assert ((product - want).abs() <= size * 2.0**-23).all()
    plain = fmt.dequantize(blocks).double() @ qw.T
    exact = x.double() @ qw.T
    assert (product - exact).norm() < 0.75 * (plain - exact).norm()


@pytest.mark.parametrize("scale", ["row", "row-pow2"])
def test_the_packed_operand_is_what_is_added(scale: str) -> None:
    """``residual`` is what a kernel would multiply; ``operand`` adds its values."""
    x, _ = inputs()
    recipe = QuantRecipe(2, "nvfp4", "nvfp4", "nvfp4", encode_scale=scale, compensation=Compensation("quads"))
    compensation = ResidualCompensation.of(recipe)
    assert compensation is not None
    fmt = get_format("nvfp4")
    blocks = fmt.quantize(x, encode_scale=scale)
    packed = fmt.dequantize(compensation.residual(x, blocks))
    operand, epilogue = compensation.operand(x, blocks, *fmt.operands(blocks, dtype=torch.float32))
    assert epilogue is not None
    total = operand.double() * epilogue.double()
    torch.testing.assert_close(total, (fmt.dequantize(blocks) + packed).double(), rtol=1e-6, atol=1e-9)
    assert ((packed != 0).any(0).sum()) == 32


def test_selection() -> None:
    r = torch.tensor([[1.0, -5.0, 2.0, 0.0], [4.0, 0.5, 0.1, 0.0]])
    rows = {"channels": [[1, 1, 0, 0]] * 2, "row": [[0, 1, 1, 0], [1, 1, 0, 0]], "2:4": [[0, 1, 1, 0], [1, 1, 0, 0]]}
    for selection, want in rows.items():
        assert select(r, Compensation("quads", selection)).int().tolist() == want
    assert select(r, Compensation("quads", "channels", 0.25)).int().tolist() == [[0, 1, 0, 0]] * 2
    assert select(r, Compensation("quads", "channels", 1.0)).all()
    assert select(torch.zeros(1, 8), Compensation("resq", "2:4")).int().tolist() == [[1, 1, 0, 0] * 2]


@pytest.mark.parametrize("rule", ["quads", "resq"])
def test_more_channels_leave_less_error(rule: str) -> None:
    x, _ = inputs()
    left, kept = [], []
    for share in (0.125, 0.25, 0.5, 0.75, 1.0):
        compensation = ResidualCompensation.of(recipe_of(rule, share=share))
        assert compensation is not None
        compensation.residual(x, get_format("nvfp4").quantize(x, encode_scale="row-pow2"))
        metrics = compensation.metrics()
        left.append(metrics["compensation/error_left"])
        kept.append(metrics["compensation/kept_share"])
        assert compensation.metrics() == {}
    assert left == sorted(left, reverse=True)
    assert kept == sorted(kept)
    assert left[0] > 0.3
    assert left[-1] < 0.02
    assert kept[-1] > 0.98


def test_metrics_add_up_over_calls() -> None:
    one, two = (ResidualCompensation.of(recipe_of("quads")) for _ in range(2))
    assert one is not None
    assert two is not None
    x, _ = inputs()
    blocks = get_format("nvfp4").quantize(x, encode_scale="row-pow2")
    one.residual(x, blocks)
    for _ in range(2):
        two.residual(x, blocks)
    assert one.metrics() == pytest.approx(two.metrics())
    zero = torch.zeros(2, 64).bfloat16()
    one.residual(zero, get_format("nvfp4").quantize(zero, encode_scale="row-pow2"))
    assert one.metrics() == {}


def first_distribution(engine: RolloutEngine) -> Tensor:
    """f32 [16, V]: log-probs of the first token after each of 16 prompts."""
    asked = [replace(r, sampling=replace(r.sampling, top_logprobs=32)) for r in tiny_requests(16, max_new_tokens=1)]
    heads = [t.head for t in engine.generate(asked)]
    return torch.stack([torch.empty(32).scatter(0, h.ids[0].long(), h.logprobs[0]) for h in heads if h is not None])


@pytest.mark.parametrize("config", [tiny_config(), tiny_dense_config()], ids=["moe", "dense"])
@pytest.mark.parametrize("method", ["quads", "resq"])
def test_an_engine_comes_nearer_to_unquantized_activations(method: str, config: Any) -> None:
    """Compensated FP4 lies nearer to W4A16 than FP4 does, routers that flip included."""
    engines = {name: make_engine(name, "float32", config=config, quant={"kv": "none"}) for name in ("naive", method)}
    reference = first_distribution(make_engine("w4a16", "float32", config=config, quant={"kv": "none"}))
    far, near = ((first_distribution(e) - reference).abs().mean() for e in engines.values())
    assert near < 0.7 * far
    compensation = engines[method].model.compensation
    assert compensation is not None
    assert 0 < compensation.metrics()["compensation/error_left"] < 0.5


def test_rows_of_their_own_choice_do_not_depend_on_the_batch() -> None:
    """With select = "row" a request's tokens depend on weights, prompt and seed alone, as in every other mode."""
    method = get_method("quads").configured(MethodConfig(compensation={"select": "row"}))  # type: ignore[arg-type]
    results = []
    for size in (1, 8):
        engine = make_engine("quads", "float32", load=True, max_num_seqs=size)
        engine.model.compensation = ResidualCompensation.of(method.recipe(QuantConfig(), 2))
        results.append(engine.generate(tiny_requests(6, max_new_tokens=8)))
    for a, b in zip(*results, strict=True):
        assert a.response_ids == b.response_ids
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


def test_recipes() -> None:
    recipe = tiny_recipe("quads", 2)
    assert recipe.compensation == Compensation("quads", "channels", 0.5)
    assert recipe.hash != tiny_recipe("naive", 2).hash
    config = MethodConfig(compensation={"select": "2:4", "share": 0.25})  # type: ignore[arg-type]
    changed = get_method("resq").configured(config).recipe(QuantConfig(), 2)
    assert changed.compensation == Compensation("resq", "2:4", 0.25)
    with pytest.raises(TracefpError, match="compensation of activations needs quantized activations"):
        tiny_recipe("quads", 2, activations="none")
    for wrong, what in (({"rule": "no"}, "rule"), ({"select": "no"}, "select"), ({"share": 0.0}, "share")):
        with pytest.raises(TracefpError, match=f"compensation {what} must be"):
            Compensation(**{"rule": "quads", **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["quads", "resq"])
def test_beside_the_kernels_the_product_is_that_of_the_torch_path(method: str) -> None:
    """Every expert for every row, the chosen ones taken: the same sums in another order. Padding has no part in it."""
    want = kernel_case.engine(method, "torch").model
    made = kernel_case.engine(method, "references").model
    h = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    y, chosen = want._moe(1, want._layers[1], h, Captured({}, None))
    assert want.compensation is not None
    assert made.compensation is not None
    assert isinstance(made, KernelModel)
    facts = want.compensation.metrics()
    rows = torch.cat([h, 50 * torch.ones(2, 128).bfloat16()])
    gates, same = made._choose(1, made._layers[1], rows)
    assert torch.equal(same[:7], chosen)
    blocks = get_format("nvfp4").quantize(rows, encode_scale="row-pow2")
    layer, real = made._layers[1], torch.arange(9) < 7
    assert isinstance(layer.gate_up, ExpertMatrices)
    assert isinstance(layer.down, ExpertMatrices)
    matrices, compensation = (layer.gate_up, layer.down), made.compensation
    got = emulated_experts(rows, blocks, same, gates, *matrices, made.recipe, compensation, real)[:7]
    assert float((got != y).float().mean()) < 0.02  # BF16 values at a rounding border of the FP32 sum
    assert torch.allclose(got.float(), y.float(), rtol=2**-7, atol=1e-4)
    assert made.compensation.metrics() == pytest.approx(facts, rel=1e-6)


@pytest.mark.parametrize("scale", ["row", "row-pow2"])
@pytest.mark.parametrize("rule", ["quads", "resq"])
def test_the_kernels_quantize_residuals_to_the_same_bits(rule: str, scale: str) -> None:
    x, _ = inputs()
    x = x.to(DEVICE)
    recipe = QuantRecipe(2, "nvfp4", "nvfp4", "nvfp4", encode_scale=scale, compensation=Compensation(rule))
    blocks = get_format("nvfp4").quantize(x, encode_scale=scale)
    real = torch.arange(len(x), device=DEVICE) < len(x) - 1
    plain, kernel = (ResidualCompensation.of(recipe, backend) for backend in ("torch", "triton"))
    assert plain is not None
    assert kernel is not None
    want, got = plain.residual(x, blocks, real), kernel.residual(x, blocks, real)
    for name in ("codes", "scales", "encode_scale"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert kernel.metrics() == plain.metrics() != {}


class Operations(TorchDispatchMode):
    """Names of operations that are no views: nearly each is a launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in str(func):
            self.names.append(str(func).rpartition(".")[0].removeprefix("aten."))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("selection", ["channels", "row", "2:4"])
@pytest.mark.parametrize("rule", ["quads", "resq"])
def test_a_layer_over_the_kernels_is_that_of_torch(rule: str, selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, padding included; beside the kernels are two matrix products, and silu."""
    made = kernel_case.engine("quads", "references").model
    g = torch.Generator().manual_seed(3)
    h, real = torch.randn(6, 128, generator=g).bfloat16().to(DEVICE), torch.arange(6, device=DEVICE) < 5
    gates, chosen = (t.to(DEVICE) for t in made._choose(1, made._layers[1], h.cpu()))  # type: ignore[attr-defined]
    layer, recipe = made._layers[1], recipe_of(rule, selection)
    matrices = [
        ExpertMatrices(w.operand_EOI.to(DEVICE), None if w.epilogue_E is None else w.epilogue_E.to(DEVICE))
        for w in (layer.gate_up, layer.down)
        if isinstance(w, ExpertMatrices)
    ]
    blocks = get_format("nvfp4").quantize(h, encode_scale="row-pow2")
    results, calls = [], []
    for backend in ("torch", "triton"):
        compensation = ResidualCompensation.of(recipe, backend)
        given = None if backend == "triton" else blocks
        results.append(emulated_experts(h, given, chosen, gates, *matrices, recipe, compensation, real, backend))
    assert torch.equal(*results)
    outputs = emulated_experts(h, None, chosen, gates, *matrices, recipe, compensation, real, backend, summed=False)
    assert outputs.shape == (6, 2, 128)
    assert torch.equal((outputs.float() * gates[..., None]).sum(1).bfloat16(), results[0])

    def compensated(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        calls.append("compensated_rows")
        return x.new_empty(x.shape, dtype=torch.float32), x.new_empty(len(x), 1, dtype=torch.float32)

    def taken(y: Tensor, chosen: Tensor, *_: Any, **__: Any) -> Tensor:
        calls.append("chosen_outputs")
        return y.new_empty(chosen.numel(), y.shape[2])

    monkeypatch.setattr("tracefp4.rollout.compensation.compensated_rows", compensated)
    monkeypatch.setattr("tracefp4.rollout.emulated.chosen_outputs", taken)
    with Operations() as operations:
        emulated_experts(h, None, chosen, gates, *matrices, recipe, compensation, real, "triton", summed=False)
    assert operations.names == ["bmm", "silu", "bmm"]
    assert calls == ["compensated_rows", "chosen_outputs"] * 2


@pytest.mark.parametrize("method", ["quads", "resq"])
def test_an_engine_over_the_kernels_compensates(method: str) -> None:
    """Three sequences in a step of four rows; again from the same weights, the same."""
    torch_engine, first, second = (kernel_case.engine(method, b) for b in ("torch", "references", "references"))
    want, got, again = (e.generate(kernel_case.requests(3, 12)) for e in (torch_engine, first, second))
    assert sum(t.num_sampled for t in got) == sum(t.num_sampled for t in want)
    for a, b in zip(got, again, strict=True):
        assert a.response_ids == b.response_ids
        assert torch.equal(a.logprobs, b.logprobs)
    facts = []
    for made in (torch_engine, first):
        assert made.model.compensation is not None
        facts.append(made.model.compensation.metrics())
    assert facts[1] == pytest.approx(facts[0], rel=0.1)  # other tokens, after the first that is drawn differently
    first.update_weights(kernel_case.tiny_weights(kernel_case.moe()).items(), 1)  # in place, as captured graphs need


def test_many_experts_are_compensated_in_plain_torch() -> None:
    with pytest.raises(TracefpError, match=r"does not run residual compensation .* of more than 16 experts"):
        kernel_case.engine("quads", "references", kernel_case.moe(num_experts=32), load=False)
