"""The fault in verl's own QAT that docs/verl.md reports, and that this package's forward does not have it.

verl swaps ``nn.Linear`` modules, and with transformers 5 the experts are stacked parameters. Where a later verl swaps
them too, the first test fails: then the docs and the refusal of verl's QAT can go. Skipped without verl. What verl
would swap is asked of its own rule, as swapping itself needs Triton.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tiny import tiny_config, tiny_model

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

from verl.utils.qat.core import QATConfig, _should_quantize
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from tracefp4.adapters.verl.guided import GuidedForward
from tracefp4.adapters.verl.settings import read_settings

IGNORED = ["lm_head", "embed_tokens", "re:.*mlp.gate$"]  # verl's defaults
IDS = torch.tensor([[3, 4, 5, 6, 7]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def test_verls_qat_never_swaps_an_expert_of_the_trainer_though_it_sends_each_as_a_linear() -> None:
    model = tiny_model(tiny_config())
    config = QATConfig(enable=True, mode="w4a16", group_size=16, ignore_patterns=IGNORED)
    swapped = [name for name, module in model.named_modules() if _should_quantize(name, module, config)]
    assert any("self_attn.q_proj" in name for name in swapped)
    assert not any("experts" in name for name in swapped)

    sent = dict(unfuse_moe_params(model.state_dict().items(), "qwen3_moe"))
    experts = [name for name in sent if ".experts." in name]
    assert len(experts) == 2 * 8 * 3  # layers, experts, projections
    assert all(name.endswith(".weight") and sent[name].ndim == 2 for name in experts)


def test_this_packages_forward_quantizes_them() -> None:
    model = tiny_model(tiny_config())
    before = logits(model)
    none = {"kv": "none", "activations": "none"}
    settings = read_settings({"model_config": {}, "tracefp4": {"method": "qat", "quant": none}})
    assert settings is not None
    GuidedForward(model, settings)
    assert not torch.allclose(logits(model), before, atol=1e-3)
