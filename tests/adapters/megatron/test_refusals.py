"""Models that were not built or prepared as they must be are refused by name, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed (make test-megatron)")

from megatron.core.transformer.moe.experts import SequentialMLP

import mcore_cpu
from mcore_cpu import Case, layer_spec, mcore_config, rolled_out
from tracefp4.adapters.megatron import prepare
from tracefp4.adapters.megatron.prepare import check_chunks, moe_layers, prepare_chunks
from tracefp4.adapters.megatron.spec import guided_layer_spec
from tracefp4.errors import TracefpError
from tracefp4.methods import get_method

FORWARD = get_method("trace").forward


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with mcore_cpu.megatron(tmp_path_factory.mktemp("group") / "rendezvous"):
        yield


@pytest.fixture(scope="module")
def case() -> Case:
    return rolled_out("trace", n=2)


def gpt(case: Case, spec: Any) -> Any:
    return mcore_cpu.gpt_model(case.hf, mcore_config(case.hf), spec)


def test_a_plain_model_is_refused(case: Case) -> None:
    config = mcore_config(case.hf)
    with pytest.raises(TracefpError, match="layer 0: the attention is a plain PackedAttention: build the model from"):
        prepare_chunks([gpt(case, layer_spec(config))], case.recipe, FORWARD)


def test_an_attention_that_was_put_back_is_noticed(case: Case) -> None:
    """Megatron-Bridge does so for attention_backend=local, after the spec was made."""
    spec = guided_layer_spec(layer_spec(mcore_config(case.hf)))
    spec.submodules.self_attention.submodules.core_attention = mcore_cpu.PackedAttention
    with pytest.raises(TracefpError, match=r"the attention is a plain PackedAttention.*attention_backend"):
        prepare_chunks([gpt(case, spec)], case.recipe, FORWARD)


def test_what_is_lost_after_preparation_is_noticed(case: Case) -> None:
    model, context = mcore_cpu.build(case)
    check_chunks([model], context)
    router = model.decoder.layers[1].mlp.router
    replay, router.router_replay = router.router_replay, None
    with pytest.raises(TracefpError, match="layer 1: the router lost its replay"):
        check_chunks([model], context)
    router.router_replay = replay
    model.decoder.layers[1].mlp.experts.tracefp4_context = None
    with pytest.raises(TracefpError, match="layer 1: the experts lost the guidance context"):
        check_chunks([model], context)


def test_a_model_is_prepared_once_for_its_number_of_layers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = mcore_cpu.build(case)
    with pytest.raises(TracefpError, match="already prepared"):
        prepare_chunks([model], case.recipe, FORWARD)
    fresh = gpt(case, guided_layer_spec(layer_spec(mcore_config(case.hf))))
    with pytest.raises(TracefpError, match="the recipe is for 3 layers, the model has 2"):
        prepare_chunks([fresh], replace(case.recipe, num_layers=3), FORWARD)
    monkeypatch.setattr(prepare, "__version__", "0.17.0")
    with pytest.raises(TracefpError, match=r"0\.17\.0 is installed"):
        prepare_chunks([fresh], case.recipe, FORWARD)


def test_a_guided_model_does_not_run_unprepared(case: Case) -> None:
    model = gpt(case, guided_layer_spec(layer_spec(mcore_config(case.hf))))
    _, arguments = case.inputs(packed=True)
    with pytest.raises(TracefpError, match="call prepare_chunks"):
        model(**arguments)


def test_experts_of_another_class_are_refused(case: Case) -> None:
    class OtherExperts(torch.nn.Module):
        pass

    spec = layer_spec(mcore_config(case.hf))
    submodules = replace(spec.submodules.mlp.keywords["submodules"], experts=partial(OtherExperts))
    mlp = partial(spec.submodules.mlp.func, submodules=submodules)
    with pytest.raises(TracefpError, match="experts of class OtherExperts are not supported; use SequentialMLP"):
        guided_layer_spec(replace(spec, submodules=replace(spec.submodules, mlp=mlp)))


def test_layers_without_attention_are_refused(case: Case) -> None:
    spec = layer_spec(mcore_config(case.hf))
    bare = replace(spec, submodules=replace(spec.submodules, self_attention=torch.nn.Identity))
    with pytest.raises(TracefpError, match="layers of TransformerLayer have no core attention"):
        guided_layer_spec(bare)


def test_the_given_spec_is_left_as_it_is(case: Case) -> None:
    spec = layer_spec(mcore_config(case.hf))
    guided_layer_spec(spec)
    assert spec.submodules.self_attention.submodules.core_attention is mcore_cpu.PackedAttention
    assert spec.submodules.mlp.keywords["submodules"].experts.func is SequentialMLP


def test_dense_layers_among_the_mixture_keep_their_mlp() -> None:
    assert moe_layers(SimpleNamespace(num_layers=4, moe_layer_freq=[0, 1, 1, 0])) == (1, 2)
    assert moe_layers(SimpleNamespace(num_layers=4, moe_layer_freq=2)) == (0, 2)
    dense = mcore_cpu.get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    guided = guided_layer_spec(dense)
    assert guided.submodules.mlp is dense.submodules.mlp
