"""A checkpoint is loaded whole or not at all."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import tiny_config, tiny_model
from tracefp4.errors import TracefpError
from tracefp4.nn.loading import load_policy


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model(tiny_config()).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_back(checkpoint: Path, dtype: str) -> None:
    model = load_policy(checkpoint, dtype)
    want = tiny_model(tiny_config(), dtype).state_dict()
    assert model.state_dict().keys() == want.keys()
    for name, w in model.state_dict().items():
        assert w.dtype == getattr(torch, dtype)
        assert torch.equal(w, want[name]), name


def test_a_missing_weight_is_an_error(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.self_attn.k_norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(TracefpError, match=r"lacks weight model\.layers\.1\.self_attn\.k_norm\.weight"):
        load_policy(checkpoint, "float32")


def test_a_weight_of_another_shape_is_an_error(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.ones(32)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(TracefpError, match=r"weight model\.norm\.weight has shape \(32,\), .* \(64,\)"):
        load_policy(checkpoint, "float32")
