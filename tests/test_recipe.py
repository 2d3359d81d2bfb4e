"""The numeric contract: its hash, its layers, its weights."""

import hashlib
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tracefp4.errors import TracefpError
from tracefp4.formats import FormatError, get_format
from tracefp4.recipe import Compensation, QuantRecipe, quantize_expert_weights, resolve_guided_layers

BASE = QuantRecipe(num_layers=4, weights="nvfp4", activations="nvfp4", kv="nvfp4", guided_layers=(2, 3))
OTHER: dict[str, Any] = {
    "num_layers": 5,
    "weights": "mxfp4-rceil",
    "activations": None,
    "kv": "nvfp4-4over6",
    "encode_scale": "row",
    "kv_encode_scale": 2.0,
    "guided_layers": (3,),
    "bits": 1.5,
    "rule": "bracket",
    "compensation": Compensation("quads"),
}


def test_hash_changes_with_every_field() -> None:
    assert {*OTHER, "band"} == {f.name for f in fields(QuantRecipe)}
    assert replace(BASE, band=0.1).hash == BASE.hash, "how a record is read changes nothing in it"
    hashes = {replace(BASE, **{name: value}).hash for name, value in OTHER.items()}
    assert len(hashes | {BASE.hash}) == len(OTHER) + 1


def test_hash_is_a_function_of_the_fields_alone() -> None:
    """Records and checkpoints carry it; both paths compute it in their own process."""
    text = (
        '{"activations":"nvfp4","bits":1.125,"encode_scale":"row-pow2","guided_layers":[2,3],"kv":"nvfp4",'
        '"kv_encode_scale":1.0,"num_layers":4,"rule":"cell","weights":"nvfp4"}'
    )
    assert BASE.hash == replace(BASE).hash == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("layers", "which", "want"),
    [
        (4, "deeper-half", (2, 3)),
        (5, "deeper-half", (3, 4)),
        (1, "deeper-half", (0,)),
        (3, "all", (0, 1, 2)),
        (3, "none", ()),
    ],
)
def test_guided_layers(layers: int, which: str, want: tuple[int, ...]) -> None:
    assert resolve_guided_layers(which, layers) == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "nvfp"}, "did you mean"),
        ({"kv": "fp8"}, "unknown format 'fp8'"),
        ({"kv": "mxfp8-rceil"}, "the KV cache holds four-bit formats, not mxfp8-rceil"),
        ({"encode_scale": "tensor"}, "encode_scale must be one of row, row-pow2, got 'tensor'"),
        ({"rule": "cells"}, "rule must be one of cell, bracket, got 'cells'"),
        ({"kv_encode_scale": 0.0}, "kv_encode_scale must be > 0"),
        ({"kv_encode_scale": math.nan}, "kv_encode_scale must be > 0"),
        ({"guided_layers": (3, 2)}, "must ascend within 0..3"),
        ({"guided_layers": (2, 2)}, "must ascend"),
        ({"guided_layers": (4,)}, "must ascend"),
        ({"guided_layers": (-1,)}, "must ascend"),
    ],
    ids=str,
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TracefpError, match=message):
        replace(BASE, **change)


def test_unknown_guided_layers_name_the_choices() -> None:
    with pytest.raises(TracefpError, match="one of none, deeper-eighth, deeper-quarter, deeper-half, all, got 'half'"):
        resolve_guided_layers("half", 4)


def test_sites() -> None:
    recipe = replace(BASE, activations="mxfp4-rceil", kv="nvfp4", kv_encode_scale=8.0)
    assert [recipe.site_format(s) for s in ("expert_input", "key", "value")] == ["mxfp4-rceil", "nvfp4", "nvfp4"]
    assert [recipe.site_encode_scale(s) for s in ("expert_input", "key", "value")] == [None, 8.0, 8.0]
    assert BASE.site_encode_scale("expert_input") == "row-pow2"
    nothing = QuantRecipe(num_layers=4)
    assert nothing.site_format("key") is nothing.site_encode_scale("key") is None
    assert not nothing.quantized
    assert all(replace(nothing, **{part: "nvfp4"}).quantized for part in ("weights", "activations", "kv"))


@pytest.mark.parametrize("pow2", [False, True])
def test_expert_weights_have_one_scale_an_expert(pow2: bool) -> None:
    """Experts of very different size: each is as if it were alone."""
    w = (
        torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    )
    blocks = quantize_expert_weights(w, "nvfp4", pow2)
    assert blocks.encode_scale.shape == (3, 1, 1)
    amax = w.abs().amax((1, 2))
    scale = 6 * 448 / amax
    want = torch.exp2(torch.floor(torch.log2(scale))) if pow2 else scale
    torch.testing.assert_close(blocks.encode_scale.flatten(), want, rtol=0 if pow2 else 1e-6, atol=0)
    for e in range(3):
        alone = quantize_expert_weights(w[e : e + 1], "nvfp4", pow2)
        assert torch.equal(alone.codes[0], blocks.codes[e])
        assert torch.equal(alone.scales[0], blocks.scales[e])
    error = (get_format("nvfp4").dequantize(blocks) - w).abs().amax((1, 2))
    assert (error <= amax / 6).all()


def test_expert_weights_in_mx_formats_need_no_scale() -> None:
    w = torch.randn(2, 8, 32)
    blocks = quantize_expert_weights(w, "mxfp4-rceil")
    assert blocks.encode_scale is None
    assert torch.equal(blocks.codes, get_format("mxfp4-rceil").quantize(w).codes)


def test_a_ragged_inner_size_is_refused() -> None:
    with pytest.raises(FormatError, match="multiple"):
        quantize_expert_weights(torch.ones(2, 8, 24), "nvfp4")
