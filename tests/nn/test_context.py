"""Arming of micro-batches, and gradient checkpointing under guidance."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from tiny import tiny_config, tiny_model
from tracefp4.formats import get_format
from tracefp4.guidance import CompactGuidance, GuidanceError, encode
from tracefp4.nn import GuidanceContext, MicroBatch, TrainerForward, prepare_model
from tracefp4.recipe import QuantRecipe

RECIPE = QuantRecipe(num_layers=2, weights="nvfp4", activations="nvfp4", kv="nvfp4", guided_layers=(0, 1), bits=1.5)
QAT = TrainerForward(weights=True, activations=True, kv=True)
TRACE = TrainerForward(weights=True, activations=True, kv=True, guided=True)
IDS = torch.tensor([[3, 9, 4, 17, 30, 8], [6, 2, 28, 7, 0, 0]])
MASK = IDS > 0
ROWS = IDS.numel()


def record(site: str, seed: int) -> CompactGuidance:
    """Slots of random values: nothing that the trainer's own values would decode to themselves."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 64, generator=g)
    blocks = get_format("nvfp4").quantize(x, encode_scale=RECIPE.site_encode_scale(site))
    return encode(blocks, RECIPE.bits, RECIPE.hash, valid=torch.rand(ROWS, generator=g) < 0.7)


def micro_batch(key: int, seed: int = 0) -> MicroBatch:
    sites = [(site, layer) for site in ("expert_input", "key", "value") for layer in (0, 1)]
    experts = torch.arange(ROWS)[:, None].add(torch.tensor([0, 3])) % 8
    return MicroBatch(
        key,
        guidance={where: record(where[0], 10 * seed + i) for i, where in enumerate(sites)},
        experts={layer: (experts, MASK.reshape(-1)) for layer in (0, 1)},
    )


def prepared(forward: TrainerForward, checkpointing: bool = False) -> tuple[Qwen3MoeForCausalLM, GuidanceContext]:
    model = tiny_model(tiny_config()).train()
    context = prepare_model(model, RECIPE, forward)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, context


def logits(model: Qwen3MoeForCausalLM, **kwargs: int) -> Tensor:
    return model(input_ids=IDS, attention_mask=MASK, use_cache=False, **kwargs).logits[MASK]


def test_arming_is_exclusive_and_ends_with_the_block() -> None:
    _, context = prepared(TRACE)
    first, second = micro_batch(1), micro_batch(2)
    assert context.current is None
    with context.armed(first) as kwargs:
        assert kwargs == {"guidance_key": 1}
        assert context.current is first
        with pytest.raises(GuidanceError, match="micro-batch 1 is still armed"), context.armed(second):
            pass
        assert context.current is first
    assert context.current is None
    with pytest.raises(RuntimeError, match="boom"), context.armed(second):
        raise RuntimeError("boom")
    assert context.current is None
    assert context.observer is None


@torch.no_grad()
def test_a_forward_must_carry_the_armed_key() -> None:
    model, context = prepared(TRACE)
    with context.armed(micro_batch(4)) as kwargs:
        logits(model, **kwargs)
        with pytest.raises(GuidanceError, match="called for micro-batch 5, but 4 is armed"):
            logits(model, guidance_key=5)
        with pytest.raises(GuidanceError, match="called for micro-batch None, but 4 is armed"):
            logits(model)
    with pytest.raises(GuidanceError, match="called for micro-batch 4, but None is armed"):
        logits(model, guidance_key=4)


@torch.no_grad()
def test_disarmed_and_recordless_forwards_round_to_nearest() -> None:
    model, context = prepared(TRACE)
    plain, _ = prepared(QAT)
    nearest = logits(plain)
    assert torch.equal(logits(model), nearest)
    with context.armed(MicroBatch(1)) as kwargs:
        assert torch.equal(logits(model, **kwargs), nearest)
    with context.armed(micro_batch(2)) as kwargs:
        assert (logits(model, **kwargs) - nearest).abs().max() > 0.1
    assert torch.equal(logits(model), nearest)


@torch.no_grad()
def test_records_are_ignored_by_an_unguided_forward() -> None:
    """A qat trainer handed the same records and experts differs from trace only by the guidance."""
    model, context = prepared(QAT)
    with context.armed(micro_batch(1)) as kwargs:
        with_records = logits(model, **kwargs)
    with context.armed(MicroBatch(2, experts=micro_batch(1).experts)) as kwargs:
        assert torch.equal(logits(model, **kwargs), with_records)


@torch.no_grad()
def test_a_record_of_another_recipe_or_size_is_refused() -> None:
    model, context = prepared(TRACE)
    x = torch.randn(ROWS, 64)
    blocks = get_format("nvfp4").quantize(x, encode_scale="row-pow2")
    for guidance, message in (
        (encode(blocks, 1.5, "other"), "under recipe 'other'"),
        (encode(blocks.rows(slice(3)), 1.5, RECIPE.hash), "activations are"),
    ):
        mb = MicroBatch(1, guidance={("expert_input", 1): guidance})
        with pytest.raises(GuidanceError, match=message), context.armed(mb) as kwargs:
            logits(model, **kwargs)


# -- gradient checkpointing -------------------------------------------------------------------------------------


@contextmanager
def loss_of(model: Qwen3MoeForCausalLM, context: GuidanceContext, mb: MicroBatch) -> Iterator[Tensor]:
    with context.armed(mb) as kwargs:
        yield torch.log_softmax(logits(model, **kwargs), -1).gather(-1, IDS[MASK][:, None]).sum()


def test_checkpointing_changes_neither_loss_nor_gradient() -> None:
    losses, gradients = [], []
    for checkpointing in (False, True):
        model, context = prepared(TRACE, checkpointing)
        with loss_of(model, context, micro_batch(1)) as loss:
            loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert torch.equal(*losses)
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        assert torch.equal(gradient, gradients[1][name]), name


def test_checkpointing_recomputes_under_guidance() -> None:
    """The check above means something: the layers do run a second time, in the backward."""
    model, context = prepared(TRACE, checkpointing=True)
    runs: list[int] = []
    model.model.layers[1].self_attn.register_forward_hook(lambda *a: runs.append(1))
    with loss_of(model, context, micro_batch(1)) as loss:
        assert len(runs) == 1
        loss.backward()
    assert len(runs) == 2


def test_backward_outside_the_armed_block_is_an_error_under_checkpointing() -> None:
    model, context = prepared(TRACE, checkpointing=True)
    with loss_of(model, context, micro_batch(1)) as loss:
        pass
    with pytest.raises(GuidanceError, match="called for micro-batch 1, but None is armed"):
        loss.backward()
    with loss_of(model, context, micro_batch(2)) as loss:
        pass
    with (
        pytest.raises(GuidanceError, match="called for micro-batch 2, but 3 is armed"),
        context.armed(micro_batch(3)),
    ):
        loss.backward()


def test_decoding_once_keeps_the_first_forwards_slots() -> None:
    """After the weights moved, the guided rows hold the very values of the first forward; the others round anew."""
    _, context = prepared(TRACE)
    once, anew = micro_batch(1), micro_batch(1)
    once.decoded = {}
    x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(5))
    moved = x + 0.3 * torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(6))
    for site in ("expert_input", "key"):
        valid = once.guidance[site, 1].valid
        with context.armed(anew):
            fresh, fresh_moved = context.round_site(site, 1, x), context.round_site(site, 1, moved)
        with context.armed(once):
            first, later = context.round_site(site, 1, x), context.round_site(site, 1, moved)
        assert torch.equal(first, fresh)
        assert torch.equal(later[valid], first[valid])
        assert torch.equal(later[~valid], fresh_moved[~valid])
        assert not torch.equal(fresh_moved[valid], first[valid])
    assert set(once.decoded) == {("expert_input", 1), ("key", 1)}


def test_decoding_once_keeps_what_a_band_gave_up() -> None:
    """The band holds in the first forward; its slots stand in the later ones, wherever the values are by then."""
    banded = prepared(TRACE)[1]
    banded.recipe = replace(banded.recipe, band=0.06)
    plain = prepared(TRACE)[1]
    once, anew = micro_batch(1), micro_batch(1)
    once.decoded = {}
    for mb in (once, anew):
        mb.guidance = {at: replace(g, stale=torch.ones_like(g.valid)) for at, g in mb.guidance.items()}
    valid = once.guidance["expert_input", 1].valid
    x, moved = (torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    with banded.armed(anew):
        expected = banded.round_site("expert_input", 1, x)
    with plain.armed(anew):
        everywhere = plain.round_site("expert_input", 1, x)
    with banded.armed(once):
        first, later = (banded.round_site("expert_input", 1, v) for v in (x, moved))
    assert torch.equal(first, expected)
    assert torch.equal(later[valid], first[valid])
    assert (first != everywhere)[valid].any()


def test_decoding_once_passes_the_gradient_straight_through() -> None:
    _, context = prepared(TRACE)
    mb = micro_batch(1)
    mb.decoded = {}
    x = torch.randn(ROWS, 64, requires_grad=True)
    with context.armed(mb):
        (context.round_site("expert_input", 0, x) * 3).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
