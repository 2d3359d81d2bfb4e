"""Settings and versions of Megatron that cannot work are refused by name; runs without megatron-core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiny import tiny_recipe
from tracefp4.adapters.megatron import refusals
from tracefp4.adapters.megatron.refusals import refuse_config
from tracefp4.adapters.megatron.versions import check_megatron_version
from tracefp4.errors import TracefpError
from tracefp4.methods import get_method

FORWARD, RECIPE = get_method("trace").forward, tiny_recipe("trace", 2)


def fake_config(**changes: Any) -> Any:
    """What is read of a TransformerConfig, in any combination, also those that Megatron itself refuses."""
    fields = {
        "num_moe_experts": 8,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "moe_router_load_balancing_type": "none",
        "tensor_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "kv_channels": 32,
    }
    return SimpleNamespace(**{**fields, **changes})


def refused(**changes: Any) -> str:
    with pytest.raises(TracefpError) as error:
        refuse_config(fake_config(**changes), RECIPE, FORWARD, "prefix.")
    return str(error.value)


@pytest.mark.parametrize("name", refusals._UNSET)
def test_each_field_is_refused_with_its_reason_and_its_key(name: str) -> None:
    value = {"cuda_graph_impl": "local", "fp8": "hybrid", "mtp_num_layers": 1}.get(name, True)
    message = refused(**{name: value})
    assert refusals._UNSET[name] in message
    assert f"set prefix.{name}=" in message
    refuse_config(fake_config(**{name: None}), RECIPE, FORWARD)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_moe_experts": None}, "no routed experts.*strategy=fsdp2"),
        ({"gated_linear_unit": False}, r"down\(silu\(gate\(x\)\)"),
        ({"activation_func": torch.nn.functional.gelu}, r"down\(silu\(gate\(x\)\)"),
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "moe_router_load_balancing_type=none"),
        ({"expert_tensor_parallel_size": 2}, "prefix.expert_tensor_parallel_size=1"),
        ({"expert_tensor_parallel_size": None, "tensor_model_parallel_size": 2}, "expert_tensor_parallel_size=1"),
        ({"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]}, "without moe_act"),
        ({"transformer_impl": "inference_optimized"}, "transformer_impl=transformer_engine"),
        ({"kv_channels": 24}, "a head of 24 values is no whole number of blocks of nvfp4"),
    ],
    ids=str,
)
def test_other_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TracefpError, match=words):
        refuse_config(fake_config(**changes), RECIPE, FORWARD, "prefix.")


def test_what_verl_sets_is_accepted() -> None:
    offloading = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    refuse_config(fake_config(moe_router_load_balancing_type="none", moe_permute_fusion=True, **offloading),
                  RECIPE, FORWARD)  # fmt: skip


@pytest.mark.parametrize("version", ["0.18.0", "0.18.7", "0.18.0+core_v0.18.0", "0.18.0rc3"])
def test_supported_versions(version: str) -> None:
    check_megatron_version(version)


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.19.0", "1.0.0", "main", ""])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(TracefpError, match=rf"from 0\.18\.0 up to, not including, 0\.19\.0 .*, and {version} is inst"):
        check_megatron_version(version)
