"""A stand-in for Megatron-Bridge, which needs CUDA: what verl's Megatron engine asks of it, over the tiny model.

``install`` puts it in sys.modules; verl then builds, loads and exports through it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

import mcore_cpu


def _stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's weights with the experts of a layer in one tensor, as ``load_weights`` takes them."""
    out = {name: w for name, w in weights.items() if ".mlp.experts." not in name}
    bases = sorted({name.split(".mlp.experts.")[0] for name in weights if ".mlp.experts." in name})
    for base in bases:
        prefix = f"{base}.mlp.experts."
        if f"{prefix}gate_up_proj" in weights:
            out |= {f"{prefix}{n}": weights[f"{prefix}{n}"] for n in ("gate_up_proj", "down_proj")}
            continue
        count = 1 + max(int(name[len(prefix) :].split(".")[0]) for name in weights if name.startswith(prefix))
        part = {p: [weights[f"{prefix}{e}.{p}_proj.weight"] for e in range(count)] for p in ("gate", "up", "down")}
        out[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(part["gate"], part["up"])])  # noqa: B905
        out[f"{prefix}down_proj"] = torch.stack(part["down"])
    return out


def _plain_spec(provider: Any, vp_stage: int | None = None) -> Any:
    return mcore_cpu.layer_spec(provider)


@dataclass
class Provider(TransformerConfig):
    transformer_layer_spec: Any = _plain_spec
    hf: Any = None
    hooks: list[Any] = field(default_factory=list)

    def apply_overrides_and_finalize(self, dtype: torch.dtype, overrides: dict[str, Any]) -> None:
        known = {f.name for f in fields(self)}
        assert set(overrides) <= known, set(overrides) - known
        bf16 = dtype == torch.bfloat16
        self.__init__(  # type: ignore[misc]
            **mcore_cpu.mcore_fields(self.hf, **overrides), params_dtype=dtype, bf16=bf16, hf=self.hf,
            transformer_layer_spec=self.transformer_layer_spec,
        )  # fmt: skip

    def register_pre_wrap_hook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def provide_distributed_model(self, wrap_with_ddp: bool, ddp_config: Any, **kwargs: Any) -> list[Any]:
        model = mcore_cpu.gpt_model(self.hf, self, self.transformer_layer_spec(self, vp_stage=None))
        wrapped = Float16Module(self, model) if self.bf16 else model
        return [DistributedDataParallel(self, ddp_config, wrapped) if wrap_with_ddp else wrapped]


class AutoBridge:
    export_weight_dtype = None

    @classmethod
    def from_hf_pretrained(cls, path: str, **kwargs: Any) -> AutoBridge:
        bridge = cls()
        bridge.hf = AutoConfig.from_pretrained(path)
        return bridge

    hf: Any

    def to_megatron_provider(self, load_weights: bool) -> Provider:
        return Provider(**mcore_cpu.mcore_fields(self.hf), hf=self.hf)

    def load_hf_weights(self, module: list[Any], path: str, **kwargs: Any) -> None:
        weights = _stacked(load_file(f"{path}/model.safetensors"))
        if self.hf.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        mcore_cpu.load_weights(module[0], self.hf, weights)

    def get_conversion_tasks(self, module: list[Any]) -> None:
        return None

    def export_hf_weights(self, module: list[Any], conversion_tasks: Any = None) -> Iterator[tuple[str, Tensor]]:
        yield from mcore_cpu.export_weights(module[0], self.hf)


def _create_ddp_config(**kwargs: Any) -> DistributedDataParallelConfig | None:
    if not kwargs["wrap_with_ddp"]:
        return None
    return DistributedDataParallelConfig(
        use_distributed_optimizer=kwargs["use_distributed_optimizer"], **(kwargs["overrides"] or {})
    )


def install() -> list[str]:
    """Names of the modules that were put in sys.modules."""
    import megatron

    contents: dict[str, dict[str, Any]] = {
        "megatron.bridge": {"AutoBridge": AutoBridge},
        "megatron.bridge.training": {},
        "megatron.bridge.training.utils": {},
        "megatron.bridge.training.utils.train_utils": {
            "LinearForLastLayer": None, "freeze_moe_router": None, "make_value_model": lambda *args: None,
        },
        "megatron.bridge.training.utils.config_utils": {"create_ddp_config": _create_ddp_config},
    }  # fmt: skip
    for name, members in contents.items():
        module = ModuleType(name)
        module.__dict__.update(members, __path__=[])
        sys.modules[name] = module
    megatron.bridge = sys.modules["megatron.bridge"]  # type: ignore[attr-defined]
    return list(contents)
