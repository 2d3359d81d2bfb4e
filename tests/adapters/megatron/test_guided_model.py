"""A GPTModel with guided layers against the transformers trainer at the same weights. Skipped without megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed (make test-megatron)")

import mcore_cpu
from mcore_cpu import Case, build, logits_and_gradients, rolled_out
from tiny import tiny_model
from tracefp4.adapters.megatron.layers import GuidedExperts, expert_parameters
from tracefp4.errors import TracefpError
from tracefp4.formats import get_format
from tracefp4.guidance import decode
from tracefp4.nn import GuidanceContext, fake_quantize, prepare_model
from tracefp4.nn.experts import quantized_experts

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
ACTIVATION_RECOMPUTE = {
    "recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with mcore_cpu.megatron(tmp_path_factory.mktemp("group") / "rendezvous"):
        yield


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    """In FP32; "trace-full" was rolled out in BF16, so that its slots are not the trainer's own."""
    return {m: rolled_out(m, dtype="bfloat16" if m == "trace-full" else "float32")
            for m in ("bf16", "qat", "trace-full")}  # fmt: skip


def reference(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the real tokens and gradients of the transformers trainer."""
    model = tiny_model(case.hf)
    context = prepare_model(model, case.recipe, case.forward)
    b = case.batch
    with context.armed(case.micro_batch) as kwargs:
        logits = model(input_ids=b.input_ids, attention_mask=b.attention_mask, use_cache=False, **kwargs).logits
        logits = logits[b.attention_mask]
        mcore_cpu.loss(case, logits).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("packed", [True, False], ids=["thd", "bshd"])
@pytest.mark.parametrize("grouped", [False, True], ids=["sequential", "grouped"])
@pytest.mark.parametrize("method", ["bf16", "qat", "trace-full"])
def test_logits_and_gradients_are_those_of_the_transformers_trainer(
    cases: dict[str, Case], method: str, grouped: bool, packed: bool
) -> None:
    """FP32: two implementations sum the same products in other orders, and round to the same slots."""
    case = cases[method]
    want, want_gradients = reference(case)
    model, context = build(case, grouped)
    got, gradients = logits_and_gradients(case, model, context, packed)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"} <= {
        name.removeprefix("model.layers.0.") for name in gradients
    }
    for name, gradient in gradients.items():
        wanted = want_gradients[name]
        if name == "model.embed_tokens.weight":  # transformers teaches the padding token's embedding nothing
            gradient, wanted = gradient[1:], wanted[1:]
        assert wanted.abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=2e-5, msg=name)


def sites_of(context: GuidanceContext, seen: dict[tuple[str, int], list[Tensor]]) -> None:
    """Collects what round_site returns."""
    rounding = context.round_site

    def round_site(site: str, layer: int, x_NK: Tensor) -> Tensor:
        y = rounding(site, layer, x_NK)
        seen.setdefault((site, layer), []).append(y.detach().clone())
        return y

    context.round_site = round_site  # type: ignore[method-assign]


@pytest.mark.parametrize("packed", [True, False], ids=["thd", "bshd"])
def test_guided_rows_take_the_recorded_slots(cases: dict[str, Case], packed: bool) -> None:
    """Full codes: what the layers go on with is what the rollout computed with, bit for bit, row by row."""
    case = cases["trace-full"]
    model, context = build(case)
    seen: dict[tuple[str, int], list[Tensor]] = {}
    sites_of(context, seen)
    numbers, arguments = case.inputs(packed)
    with context.armed(case.local(model, numbers)), torch.no_grad():
        model(**arguments)
    order = numbers.T.flatten()
    for (site, layer), record in case.micro_batch.guidance.items():
        chosen, _ = decode(record, torch.zeros(record.rows, record.header.k))
        slots = get_format(record.header.format).dequantize(chosen)
        rows = (order - 1).clamp(min=0)
        guided = record.valid[rows] & (order > 0)
        assert guided.sum() == sum(case.lengths) - len(case.lengths)
        assert torch.equal(seen[site, layer][0][guided], slots[rows][guided])
    # The trainer by itself would have chosen others.
    with context.armed(replace(case.local(model, numbers), guidance={})), torch.no_grad():
        model(**arguments)
    assert all(not torch.equal(*(values[guided] for values in pair)) for pair in seen.values())


@pytest.mark.parametrize("packed", [True, False], ids=["thd", "bshd"])
@pytest.mark.parametrize(
    ("grouped", "recompute"),
    [(False, FULL_RECOMPUTE), (False, SELECTIVE_RECOMPUTE), (True, ACTIVATION_RECOMPUTE)],
    ids=["full", "selective", "moe_act"],
)
def test_recomputation_changes_no_bit_and_repeats_the_same_roundings(
    cases: dict[str, Case], grouped: bool, recompute: dict[str, Any], packed: bool
) -> None:
    case = cases["trace-full"]
    want, want_gradients = logits_and_gradients(case, *build(case, grouped), packed)
    model, context = build(case, grouped, **recompute)
    model.train()
    seen: dict[tuple[str, int], list[Tensor]] = {}
    sites_of(context, seen)
    got, gradients = logits_and_gradients(case, model, context, packed)
    assert torch.equal(got, want)
    assert all(torch.equal(gradients[name], wanted) for name, wanted in want_gradients.items())
    repeated = [values for values in seen.values() if len(values) == 2]
    assert bool(repeated) == (recompute is not ACTIVATION_RECOMPUTE)
    assert all(torch.equal(*values) for values in repeated)


def test_micro_batches_in_flight_are_recomputed_each_with_its_own_guidance(cases: dict[str, Case]) -> None:
    """As pipeline parallelism orders them: two forwards, then two backwards."""
    first, second = cases["trace-full"], rolled_out("trace-full", n=3, dtype="bfloat16")
    alone, context = build(first)
    total: dict[str, Tensor] = {}
    for case in (first, second):
        _, gradients = logits_and_gradients(case, alone, context)
        total = {name: g.clone() for name, g in gradients.items()}
    model, context = build(first, **FULL_RECOMPUTE)
    model.train()
    losses = []
    for key, case in enumerate((first, second), start=1):
        numbers, arguments = case.inputs(packed=True)
        with context.armed(case.local(model, numbers, key)):
            losses.append(mcore_cpu.loss(case, case.rows(model(**arguments), numbers)))
        assert context.current is None
    for loss in losses:
        loss.backward()
    context.rest()
    assert context.current is None
    for name, gradient in mcore_cpu.gradients(model, first.hf).items():
        assert torch.equal(gradient, total[name]), name


def test_the_experts_equal_the_torch_reference(cases: dict[str, Case]) -> None:
    """The same hidden states and routing through this package's experts: nothing but the order of sums differs."""
    case = cases["qat"]
    model, context = build(case)
    mlp = model.decoder.layers[1].mlp
    torch.manual_seed(0)
    hidden = torch.randn(7, 2, case.hf.hidden_size)
    got = mlp(hidden)[0].flatten(0, 1)

    trainer = tiny_model(case.hf)
    prepare_model(trainer, case.recipe, case.forward)
    block = trainer.model.layers[1].mlp
    _, gates, chosen = block.gate(hidden.flatten(0, 1))
    want = quantized_experts(block.experts, hidden.flatten(0, 1), chosen, gates)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    # and the weights are the very numbers that the rollout multiplies with
    for name, stacked in (("linear_fc1", block.experts.gate_up_proj), ("linear_fc2", block.experts.down_proj)):
        amax = stacked.detach().flatten(1).abs().amax(1)
        scale = torch.exp2(torch.floor(torch.log2(448 * 6 / amax)))
        for e, w in enumerate(stacked.detach()):
            want_w = fake_quantize(w, "nvfp4", float(scale[e]))
            assert torch.equal(mlp.experts._weights(name)[e], want_w)
    assert all(torch.equal(torch.stack(list(expert_parameters(mlp.experts, n))), s) for n, s in
               (("linear_fc1", block.experts.gate_up_proj), ("linear_fc2", block.experts.down_proj)))  # fmt: skip
    context.rest()


def test_the_router_and_the_residual_see_unrounded_hidden_states(cases: dict[str, Case]) -> None:
    model, _ = build(cases["qat"])
    given: list[Tensor] = []
    mlp = model.decoder.layers[0].mlp
    mlp.router.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    mlp.experts.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    hidden = torch.randn(5, 1, cases["qat"].hf.hidden_size)
    mlp(hidden)
    assert torch.equal(given[0], hidden)
    rounded = fake_quantize(hidden.flatten(0, 1), "nvfp4", "row-pow2")
    assert {tuple(r) for r in given[1].tolist()} == {tuple(r) for r in rounded.tolist()}


def test_without_valid_routing_a_row_keeps_its_own_experts(cases: dict[str, Case]) -> None:
    case = cases["trace-full"]
    model, context = build(case)
    numbers, arguments = case.inputs(packed=True)
    local = case.local(model, numbers)
    chosen: list[Tensor] = []
    router = model.decoder.layers[0].mlp.router
    router.register_forward_hook(lambda module, args, output: chosen.append(output[1].clone()))
    experts, valid = (local.experts[0][0] + 1) % case.hf.num_experts, local.experts[0][1]
    for mask in (valid, torch.zeros_like(valid)):
        with context.armed(replace(local, experts={0: (experts, mask)})), torch.no_grad():
            model(**arguments)
    replayed, own = chosen
    assert not valid.all()
    assert valid.any()
    wanted = torch.zeros_like(replayed).scatter_(1, experts, True)
    assert torch.equal(replayed[valid], wanted[valid])
    assert torch.equal(replayed[~valid], own[~valid])


def test_experts_without_tokens_still_give_every_parameter_a_gradient(cases: dict[str, Case]) -> None:
    model, _ = build(cases["qat"])
    experts = model.decoder.layers[0].mlp.experts
    rows = torch.zeros(case_experts(cases), dtype=torch.int64)
    x, gates = (torch.zeros(0, *shape, requires_grad=True) for shape in ((cases["qat"].hf.hidden_size,), ()))
    y, bias = experts(x, rows, gates)
    y.sum().backward()
    assert x.grad is not None
    assert gates.grad is not None
    assert y.shape == (0, cases["qat"].hf.hidden_size)
    assert bias is None
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


def case_experts(cases: dict[str, Case]) -> int:
    return int(cases["qat"].hf.num_experts)


def test_kept_weights_last_until_the_optimizer_has_moved_them(cases: dict[str, Case]) -> None:
    """Megatron's optimizer writes parameters through ``.data``, which autograd does not see."""
    model, context = build(cases["qat"])
    context.keep_weights = True
    experts = model.decoder.layers[0].mlp.experts
    before = experts._weights("linear_fc2")
    assert experts._weights("linear_fc2").data_ptr() == before.data_ptr()
    for p in expert_parameters(experts, "linear_fc2"):
        p.data.mul_(2.0)
    assert torch.equal(experts._weights("linear_fc2"), before)
    context.weights_changed()
    assert torch.equal(experts._weights("linear_fc2"), 2 * before)


def test_hooks_that_wait_for_gathered_parameters_are_called(cases: dict[str, Case]) -> None:
    """With overlap_param_gather, Megatron's data parallelism waits for a module's parameters before its forward."""
    for grouped in (False, True):
        model, _ = build(cases["qat"], grouped)
        experts = model.decoder.layers[0].mlp.experts
        waited: list[str] = []
        for name, module in experts.named_modules():
            if name:
                module.register_forward_pre_hook(lambda module, args, name=name, waited=waited: waited.append(name))
                module.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
        experts(torch.ones(2, 64), torch.tensor([2] + [0] * 7), torch.ones(2))
        owners = {name.rpartition(".")[0] for name, _ in experts.named_parameters()}
        assert owners <= set(waited)
        module.register_forward_pre_hook(lambda module, args: (args[0],) if args else (0,))
        with pytest.raises(TracefpError, match="changes its input"):
            experts(torch.ones(2, 64), torch.tensor([2] + [0] * 7), torch.ones(2))


def test_modules_keep_their_names_and_parameters(cases: dict[str, Case]) -> None:
    """Weight converters go by the names of classes and parameters, distributed checkpoints by sharded keys."""
    case = cases["qat"]
    config = mcore_cpu.mcore_config(case.hf)
    plain = mcore_cpu.gpt_model(case.hf, config, mcore_cpu.layer_spec(config))
    guided, _ = build(case)
    assert [(n, type(m).__name__) for n, m in plain.named_modules()] == [
        (n, type(m).__name__) for n, m in guided.named_modules()
    ]
    assert plain.state_dict().keys() == guided.state_dict().keys()
    assert plain.sharded_state_dict().keys() == guided.sharded_state_dict().keys()
    assert isinstance(guided.decoder.layers[0].mlp.experts, GuidedExperts)
