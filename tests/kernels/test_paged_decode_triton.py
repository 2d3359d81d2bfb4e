"""Paged decode attention in Triton against the torch reference; under the interpreter unless there is a GPU.

On a GPU: `python -m pytest tests/kernels`, which also runs the PTX unpacking that the interpreter has to spell out.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch

from tracefp4.formats import get_format
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.paged_attention import PagedCache, paged_decode
from tracefp4.kernels.paged_attention.cache import codes_from_k_words, codes_from_v_words, k_words, v_words

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(lengths: list[int], H: int, G: int, D: int, page: int, fp4: bool, scale: float = 4.0) -> dict[str, Any]:
    """Random q and cache, pages in random order; what no sequence owns is poison."""
    g = torch.Generator().manual_seed(len(lengths) * D + page)
    counts = [-(-n // page) for n in lengths]
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=g)
    tables = torch.full((len(lengths), max(1, *counts)), 2**31 - 1, dtype=torch.int32)  # past the end: not a page
    owned = torch.zeros(pages, page, dtype=torch.bool)
    taken = 0
    for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[b, :count] = order[taken : taken + count].int()
        t = torch.arange(n)
        owned[tables[b].long()[t // page], t % page] = True
        taken += count
    kv = torch.randn(2, pages * page, G * D, generator=g).bfloat16()
    unowned = ~owned.flatten()
    if fp4:
        blocks = get_format("nvfp4").quantize(kv, encode_scale=torch.tensor(scale))
        blocks.codes[:, unowned], blocks.scales[:, unowned] = 0xFF, 0x7E
        cache = PagedCache.from_slots(blocks.codes, blocks.scales, G, page, 1 / scale, 1 / scale)
    else:
        kv[:, unowned] = float("nan")
        cache = PagedCache.from_slots(kv, None, G, page)
    q = torch.randn(len(lengths), H, D, generator=g).bfloat16()
    cache = PagedCache(*(t.to(DEVICE) for t in cache.tensors), k_epilogue=cache.k_epilogue, v_epilogue=cache.v_epilogue)
    return {
        "q_BHD": q.to(DEVICE),
        "cache": cache,
        "block_tables_BP": tables.to(DEVICE),
        "lengths_B": torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        "scaling": D**-0.5,
    }


CASES = {
    "one token": ([1], 8, 1, 128, 16),
    "ragged": ([1, 40, 0, 65], 8, 2, 128, 16),
    "whole pages": ([64, 128], 4, 4, 128, 64),
    "odd page, odd group": ([100], 6, 2, 64, 48),
    "wide group": ([33, 7], 12, 1, 64, 16),
    "wide head": ([50], 3, 1, 256, 16),
    "many shares": ([700], 2, 1, 64, 32),
}


@pytest.mark.parametrize("fp4", [True, False], ids=["fp4", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, fp4: bool) -> None:
    """|out - exact| <= (2 u + 2^-9 of the output's rounding) max|v|, u = 2^-9.

    Both sides round every p once to BF16 (relative error 2^-9 each, on weights that sum to 1; their bases differ, so
    the errors may add) and the result once; FP32 sums of D and T terms stay far below.
    """
    args = problem(*CASES[case], fp4=fp4)
    out = paged_decode(**args, backend="triton")
    exact = paged_decode(**args | {"q_BHD": args["q_BHD"].float()}, backend="torch")
    assert torch.isfinite(out).all()
    v = args["cache"].to_slots()[0][1]
    largest = 6 * 448 * args["cache"].v_epilogue if fp4 else float(v.float().nan_to_num().abs().max())
    if fp4:
        largest = min(largest, 6.0)  # of standard normal values
    assert float((out.float() - exact).abs().max()) <= (2 * 2.0**-9 + 2.0**-9) * largest
    empty = args["lengths_B"] == 0
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))


@pytest.mark.parametrize("fp4", [True, False], ids=["fp4", "bf16"])
@pytest.mark.parametrize(
    ("programs", "even", "R", "D"), [(3, True, 4, 128), (20, True, 6, 64), (100, True, 2, 128), (48, False, 4, 128)]
)
def test_every_cut_of_unequal_contexts(programs: int, even: bool, R: int, D: int, fp4: bool) -> None:
    """Parts that end within contexts, more programs than there is work for, splits without tokens; shares of one to
    four heads added by one program, and more than one program's thread takes at a time."""
    from tracefp4.kernels.paged_attention import triton as kernel

    args = problem([140, 0, 40, 1, 300, 0], R, 1, D, 32, fp4)
    config = kernel.AttentionConfig(32, 1, 1, programs, asm=DEVICE == "cuda", even=even)
    operands = (args["q_BHD"], args["cache"], args["block_tables_BP"], args["lengths_B"], args["scaling"], 320)
    out = kernel.paged_decode(*operands, config)
    for _ in range(2 if even else 0):  # the second finds what the first has left
        alone = kernel.paged_decode(*operands, dataclasses.replace(config, fused=True))
        assert float((alone.float() - out.float()).abs().max()) <= 2.0**-8 * float(out.float().abs().max())
        assert not alone[args["lengths_B"] == 0].any()
    exact = paged_decode(**args | {"q_BHD": args["q_BHD"].float()}, backend="torch")
    assert torch.isfinite(out).all()
    assert float((out.float() - exact).abs().max()) <= 3 * 2.0**-9 * 6  # as above; |v| < 6
    assert not out[args["lengths_B"] == 0].any()


@pytest.mark.parametrize(("D", "R", "tile"), [(128, 8, 16), (64, 3, 32), (256, 1, 16)])
def test_sums_rescaled_only_when_a_score_outgrows_them(D: int, R: int, tile: int) -> None:
    """Two tiles of scores 0, then two of `bits`, in powers of two: FP16 has room for some seven of them, and no more.

    Then scores as they come, of a few, some ten and hundreds of bits. Bounds as above.
    """
    from tracefp4.kernels.paged_attention import triton as kernel

    args = problem([4 * tile, 17, 1], R, 1, D, 32, fp4=True, scale=1.0)
    config = kernel.AttentionConfig(tile, 1, 1, 2, asm=DEVICE == "cuda", even=True, lazy=True)

    def check(args: dict[str, Any], scaling: float) -> None:
        args = args | {"scaling": scaling}
        rest = args["cache"], args["block_tables_BP"], args["lengths_B"], scaling
        out = kernel.paged_decode(args["q_BHD"], *rest, 4 * tile, config)
        exact = paged_decode(args["q_BHD"].float(), *rest, backend="torch")
        assert torch.isfinite(out).all()
        assert float((out.float() - exact).abs().max()) <= 3 * 2.0**-9 * 6

    for scaling in (D**-0.5, 1.0, 8.0):
        check(args, scaling)
    rows, scales = (t.cpu() for t in args["cache"].to_slots())
    t = torch.arange(4 * tile)
    slots = args["block_tables_BP"][0].long().cpu()[t // 32] * 32 + t % 32
    rows[0], scales[0] = 0, 0x38
    rows[0, slots[2 * tile :], 0] = 0x02  # a first value of 1
    cache = PagedCache.from_slots(rows, scales, 1, 32)
    q = torch.zeros_like(args["q_BHD"])
    q[..., 0] = 1.0
    steps = args | {"q_BHD": q, "cache": PagedCache(*(t.to(DEVICE) for t in cache.tensors))}
    for bits in (0.5, 6.9, 7.1, 7.9, 8.1, 9.5, 30.0, 1000.0):
        check(steps, bits * math.log(2.0))


def test_subnormal_scales_count() -> None:
    """Tiny keys at S = 1 have E4M3 scales below 2^-6; flushing them would make every score equal."""
    args = problem([40], 8, 1, 128, 16, fp4=True, scale=1.0)
    cache = args["cache"]
    for scales in (cache.k_scales, cache.v_scales):
        scales.random_(0, 8, generator=torch.Generator(DEVICE).manual_seed(0))  # 0 .. 7 * 2^-9
    args["scaling"] = 30.0
    out = paged_decode(**args, backend="triton")
    exact = paged_decode(**args | {"q_BHD": args["q_BHD"].float()}, backend="torch")
    assert float((out.float() - exact).abs().max()) <= 3 * 2.0**-9 * 6 * 7 * 2.0**-9
    assert float(exact.std()) > 2.0**-8


def test_a_word_unpacks_to_every_code() -> None:
    """Each of a word's eight places with each code, in each place of a tile, through the kernel.

    All tokens but one have keys of -6 each, and so a weight of 0; the output is that one's value row.
    """
    D, n = 128, 16
    codes = torch.arange(16 * 16, dtype=torch.uint8).view(4, 64).repeat(4, 1)  # all pairs of codes in 4 rows of 128
    args = problem([n] * n, 1, 1, D, n, fp4=True, scale=1.0)
    args["q_BHD"].fill_(1.0)
    slots = args["block_tables_BP"][:, 0].long().cpu() * n + torch.arange(n)
    rows, scales = (t.cpu() for t in args["cache"].to_slots())
    rows[0], scales[0] = 0xFF, 0x38
    rows[0, slots] = 0x77
    # Every code passes through every place of its word; the slow interpreter, which has no PTX, takes two of them.
    for shift in range(8) if DEVICE == "cuda" else (0, 3):
        rolled = torch.roll(get_format("nvfp4").dequantize(_blocks(codes), torch.float32), shift, dims=-1)
        blocks = get_format("nvfp4").quantize(rolled * 2.0**shift, encode_scale=torch.tensor(1.0))
        rows[1, slots], scales[1, slots] = blocks.codes, blocks.scales
        cache = PagedCache.from_slots(rows, scales, 1, 16)
        args["cache"] = PagedCache(*(t.to(DEVICE) for t in cache.tensors))
        out = paged_decode(**args, backend="triton")
        assert torch.equal(out[:, 0].float().cpu(), get_format("nvfp4").dequantize(blocks))


def _blocks(codes: torch.Tensor) -> Any:
    from tracefp4.formats import QuantizedBlocks

    scales = torch.full((codes.shape[0], codes.shape[1] // 8), 0x38, dtype=torch.uint8)  # 1.0
    return QuantizedBlocks(codes, scales, torch.tensor(1.0), "nvfp4", (codes.shape[0], codes.shape[1] * 2))


@pytest.mark.parametrize(("pack", "codes_of"), [(k_words, codes_from_k_words), (v_words, codes_from_v_words)])
def test_words_hold_codes_losslessly(pack: Any, codes_of: Any) -> None:
    codes = torch.randint(0, 256, (512, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    words = pack(codes)
    assert words.dtype == torch.int32
    assert words.shape == (512, 8)
    assert torch.equal(codes_of(words), codes)


@pytest.mark.parametrize("fp4", [True, False])
def test_slots_and_pages_convert_both_ways(fp4: bool) -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (2, 96, 2 * 32), generator=g, dtype=torch.uint8)
    scales = torch.randint(0, 127, (2, 96, 2 * 4), generator=g, dtype=torch.uint8) if fp4 else None
    rows = rows if fp4 else rows.bfloat16()
    cache = PagedCache.from_slots(rows, scales, 2, 32)
    back, back_scales = cache.to_slots()
    assert torch.equal(back, rows)
    assert scales is None or (back_scales is not None and torch.equal(back_scales, scales))
    assert cache.bytes_per_token == (2 * 2 * 64 * 9 // 16 if fp4 else 2 * 2 * 32 * 2)


def test_bad_operands_are_refused_by_name() -> None:
    args = problem([5], 8, 2, 128, 16, fp4=False)
    with pytest.raises(KernelError, match="int32"):
        paged_decode(**args | {"lengths_B": args["lengths_B"].long()}, backend="triton")
    with pytest.raises(KernelError, match="multiple of 2"):
        paged_decode(**args | {"q_BHD": args["q_BHD"][:, :5].contiguous()}, backend="triton")
    with pytest.raises(KernelError, match="cuda"):
        paged_decode(**args, backend="cuda")
    with pytest.raises(KernelError, match="head_dim"):
        paged_decode(**problem([5], 8, 2, 32, 16, fp4=False), backend="triton")
