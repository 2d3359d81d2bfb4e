"""Settings of Megatron-core under which the guided forward would be wrong, or silently not there."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from tracefp4.errors import TracefpError
from tracefp4.formats import get_format
from tracefp4.nn import TrainerForward
from tracefp4.recipe import QuantRecipe

# Each must be unset (None, False, 0, "none"), for the reason given.
_UNSET = {
    "moe_shared_expert_overlap": "the shared experts would read the rounded input of the routed ones",
    "moe_latent_size": "the routed experts' input is no hidden state, which is what the rollout records",
    "moe_apply_probs_on_input": "the gates would be applied before the rounding",
    "moe_expert_capacity_factor": "tokens that the rollout did compute would be dropped",
    "moe_expert_rank_capacity_factor": "tokens that the rollout did compute would be dropped",
    "moe_router_padding_for_quantization": "rows that are no tokens would reach the experts",
    "moe_router_padding_for_fp8": "rows that are no tokens would reach the experts",
    "moe_router_force_load_balancing": "the rollout's routing could not be replayed",
    "moe_router_force_biased": "the rollout's routing could not be replayed",
    "moe_router_fusion": "the fused router does not ask for the replayed experts",
    "moe_enable_routing_replay": "the guided forward replays the routing itself",
    "moe_use_legacy_grouped_gemm": "its experts are not supported",
    "moe_single_grouped_weight": "its experts are not supported",
    "moe_mlp_glu_interleave_size": "gate and up would be interleaved",
    "moe_paged_stash": "it stands on the fused experts, which do not round",
    "use_transformer_engine_op_fuser": "the fused experts do not round",
    "activation_func_clamp_value": "the rollout does not clamp",
    "glu_linear_offset": "the rollout adds no offset",
    "add_bias_linear": "the rollout's experts have no bias",
    "multi_latent_attention": "K and V of latent attention are not what the rollout caches",
    "experimental_attention_variant": "its cache is not what the rollout records",
    "mtp_num_layers": "the rollout records nothing for the layers that predict further tokens",
    "fp8": "it quantizes a second time",
    "fp4": "it quantizes a second time",
    "enable_cuda_graph": "a captured graph would replay one micro-batch's guidance for all",
    "external_cuda_graph": "a captured graph would replay one micro-batch's guidance for all",
    "cuda_graph_impl": "a captured graph would replay one micro-batch's guidance for all",
    "overlap_moe_expert_parallel_comm": "it mixes the stages of two micro-batches",
    "delay_wgrad_compute": "the experts' products are not those of Transformer Engine",
    "overlap_dispatch_backward_with_experts_wgrad": "the experts' products are not those of Transformer Engine",
}


def refuse_config(
    config: Any, recipe: QuantRecipe, forward: TrainerForward, prefix: str = "TransformerConfig."
) -> None:
    """Raises TracefpError naming the first field of a TransformerConfig that the guided forward cannot work under.

    prefix: what the user writes before a field's name.
    """
    if config.num_moe_experts is None:
        raise TracefpError(
            "this model has no routed experts, and a dense model's MLP is not quantized under Megatron: train it with "
            "actor_rollout_ref.actor.strategy=fsdp2"
        )
    for name, why in _UNSET.items():
        value = getattr(config, name, None)
        if value not in (None, False, 0, "none"):
            unset = "none" if name == "cuda_graph_impl" else "False" if isinstance(value, bool) else "null"
            raise _refused(f"{prefix}{name}={unset}", why)
    if not config.gated_linear_unit or config.activation_func is not functional.silu:
        raise TracefpError("the guided forward knows experts of the form down(silu(gate(x)) * up(x)) only")
    balancing = config.moe_router_load_balancing_type
    if "sinkhorn" in ([balancing] if isinstance(balancing, str) else balancing):
        raise _refused(f"{prefix}moe_router_load_balancing_type=none", "the rollout's routing could not be replayed")
    offloaded = set(getattr(config, "offload_modules", None) or ()) & {"expert_fc1", "moe_act"}
    if getattr(config, "fine_grained_activation_offloading", False) and offloaded:
        raise _refused(f"{prefix}offload_modules without {sorted(offloaded)[0]}", "the experts here do not offload")
    if getattr(config, "transformer_impl", "") == "inference_optimized":
        raise _refused(f"{prefix}transformer_impl=transformer_engine", "the inference layers do not round")
    _refuse_split_rows(config, recipe, forward, prefix)


def _refuse_split_rows(config: Any, recipe: QuantRecipe, forward: TrainerForward, prefix: str) -> None:
    """A row that is quantized with one scale must lie on one rank."""
    size = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    if size > 1:
        raise _refused(
            f"{prefix}expert_tensor_parallel_size=1",
            "an expert's weights and activations are quantized with scales over whole rows and matrices",
        )
    if forward.kv and recipe.kv is not None and config.kv_channels % get_format(recipe.kv).block_size:
        raise TracefpError(
            f"a head of {config.kv_channels} values is no whole number of blocks of {recipe.kv}: use another quant.kv"
        )


def _refused(remedy: str, why: str) -> TracefpError:
    return TracefpError(f"the guided forward does not work under this setting ({why}); set {remedy}")
