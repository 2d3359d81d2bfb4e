"""The cache stores packed bytes, and reads back exactly what the format says they mean."""

import pytest
import torch

from tracefp4.errors import TracefpError
from tracefp4.formats import get_format, list_formats
from tracefp4.rollout.kv_pool import DenseKVPool, QuantizedKVPool, make_kv_pool

LAYERS, SLOTS, HEADS, D = 2, 12, 2, 32


def kv(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(n, HEADS, D, generator=g) * s for s in (3.0, 0.2))
    return k, v


@pytest.mark.parametrize(("name", "bits"), [("nvfp4", 4.5), ("mxfp4-floor", 4.25), ("nvfp4-4over6", 4.5)])
def test_bytes_per_value(name: str, bits: float) -> None:
    scale = None if name.startswith("mx") else 1.0
    pool = make_kv_pool(LAYERS, SLOTS, HEADS, D, torch.bfloat16, name, scale, "cpu")
    assert isinstance(pool, QuantizedKVPool)
    stored = pool.codes.nbytes + pool.scales.nbytes
    values = LAYERS * 2 * SLOTS * HEADS * D
    assert stored * 8 == bits * values
    assert pool.bytes_per_token_layer * LAYERS * SLOTS == stored
    # Nothing else in the pool grows with the slots: whatever else it holds is a small table.
    others = [x for x in vars(pool).values() if isinstance(x, torch.Tensor) and x is not pool.codes]
    assert sum(x.numel() for x in others if x is not pool.scales) <= 1024


@pytest.mark.parametrize("name", [name for name in list_formats() if get_format(name).element_bits == 4])
def test_gather_is_the_formats_dequantization(name: str) -> None:
    S = None if name.startswith("mx") else 4.0
    pool = make_kv_pool(LAYERS, SLOTS, HEADS, D, torch.bfloat16, name, S, "cpu")
    k, v = kv(5)
    slots = torch.tensor([7, 0, 3, 11, 4])
    written = pool.write(1, slots, k, v)
    table = torch.tensor([[7, 0, 3], [4, 11, 7]])
    row_of = {int(s): i for i, s in enumerate(slots)}
    rows = torch.tensor([[row_of[int(s)] for s in line] for line in table])
    fmt = get_format(name)
    for site, x, got in zip(("key", "value"), (k, v), pool.gather(1, table), strict=True):
        blocks = fmt.quantize(x.flatten(1), encode_scale=None if S is None else torch.tensor(S))
        assert torch.equal(written[site].codes, blocks.codes)
        assert torch.equal(written[site].scales, blocks.scales)
        values = fmt.dequantize(blocks).view(5, HEADS, D)
        assert torch.equal(got * pool.epilogue, values[rows])
        assert torch.equal(got, got.bfloat16().float())
    empty = pool.gather(0, table)[0]
    assert torch.equal(empty, torch.zeros_like(empty))  # the other layer is untouched


def test_blocks_do_not_cross_heads_or_tokens() -> None:
    """A token's bytes are a function of its own K alone."""
    pool = QuantizedKVPool(1, SLOTS, HEADS, D, "nvfp4", 1.0, "cpu")
    k, v = kv(3)
    together = pool.write(0, torch.arange(3), k, v)["key"]
    alone = pool.write(0, torch.arange(1), k[1:2] * 1.0, v[1:2])["key"]
    assert torch.equal(alone.codes[0], together.codes[1])
    k2 = k.clone()
    k2[1, 1] *= 100
    other = pool.write(0, torch.arange(3), k2, v)["key"]
    half = D // 2
    assert torch.equal(other.codes[1, :half], together.codes[1, :half])
    assert not torch.equal(other.scales[1], together.scales[1])


def test_dense_pool_keeps_values() -> None:
    pool = make_kv_pool(LAYERS, SLOTS, HEADS, D, torch.bfloat16, None, None, "cpu")
    assert isinstance(pool, DenseKVPool)
    assert pool.bytes_per_token_layer == 2 * HEADS * D * 2
    k, v = (x.bfloat16() for x in kv(4))
    assert pool.write(0, torch.tensor([3, 1, 0, 2]), k, v) == {}
    got_k, got_v = pool.gather(0, torch.tensor([[3, 1], [0, 2]]))
    assert torch.equal(got_k.flatten(0, 1), k)
    assert torch.equal(got_v.flatten(0, 1), v)


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(TracefpError, match="head_dim 24"):
        make_kv_pool(1, 4, 1, 24, torch.bfloat16, "nvfp4", 1.0, "cpu")
    with pytest.raises(TracefpError, match="finite"):
        make_kv_pool(1, 4, 1, 32, torch.bfloat16, "nvfp4", float("inf"), "cpu")
