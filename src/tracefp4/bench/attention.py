"""Cases of paged decode attention: FP4 against BF16 at the same shapes, and torch's own attention beside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.bench.registry import Case, Inputs
from tracefp4.kernels.paged_attention import PagedCache, paged_decode

Shape = tuple[list[int], int, int, int, int]
"""(context lengths, query heads, KV heads, head_dim, page size)"""


def make(shape: Shape, kind: str, device: torch.device) -> Inputs:
    """Random q, cache and tables. Pages lie in random order, as after hours of serving."""
    lengths, H, G, D, page = shape
    g = torch.Generator(device).manual_seed(1)
    counts = [-(-n // page) for n in lengths]
    pages = sum(counts)
    order = torch.randperm(pages, generator=g, device=device).int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
    start = 0
    for b, count in enumerate(counts):
        tables[b, :count] = order[start : start + count]
        start += count
    if kind == "fp4":
        cache = PagedCache.empty(pages, page, G, D, "nvfp4", device)
        for t in cache.tensors:
            if t.dtype == torch.int32:
                t.view(torch.uint8).random_(0, 256, generator=g)  # any bits are codes
            else:
                t.random_(0x20, 0x30, generator=g)  # E4M3 .125 to .5: values of magnitude up to 3
    else:
        k, v = (torch.empty(pages, G, page, D, dtype=torch.bfloat16, device=device) for _ in range(2))
        cache = PagedCache(k.normal_(generator=g), v.normal_(generator=g))
    q = torch.randn(len(lengths), H, D, generator=g, device=device).bfloat16()
    return {
        "q_BHD": q,
        "cache": cache,
        "block_tables_BP": tables,
        "lengths_B": torch.tensor(lengths, dtype=torch.int32, device=device),
        "scaling": D**-0.5,
        "max_length": max(lengths),
    }


def run(inputs: Inputs, config: Any = None) -> Tensor:
    if config is None:
        return paged_decode(**inputs, backend="triton")
    from tracefp4.kernels.paged_attention import triton as kernel

    i = inputs
    return kernel.paged_decode(
        i["q_BHD"], i["cache"], i["block_tables_BP"], i["lengths_B"], i["scaling"], i["max_length"], config
    )


def check(inputs: Inputs, config: Any = None) -> str:
    """Against the torch reference in FP32, sequence by sequence; bounds: 3 * 2^-9 max|v| as in the tests, and 2^-7 of
    a head's norm, which long contexts need: their outputs are far smaller than v."""
    inputs["q_BHD"].normal_()
    out = run(inputs, config).float()
    worst, relative = 0.0, 0.0
    for b in sorted({0, len(out) // 2, len(out) - 1}):
        n = int(inputs["lengths_B"][b])
        pages = -(-n // inputs["cache"].page_size)
        one = {k: v[b : b + 1] if k in ("q_BHD", "block_tables_BP", "lengths_B") else v for k, v in inputs.items()}
        one["block_tables_BP"] = one["block_tables_BP"][:, :pages]
        exact = paged_decode(**one | {"q_BHD": one["q_BHD"].float()}, backend="torch")
        error = (out[b : b + 1] - exact).nan_to_num(torch.inf)
        worst = max(worst, float(error.abs().max()))
        relative = max(relative, float((error.norm(dim=-1) / exact.norm(dim=-1)).max()))
    bound = 3 * 2.0**-9 * 6  # |v| <= 3 in FP4; a normal value above 6 is one in 10^9
    assert worst <= bound, f"off by {worst:.3g}, allowed {bound:.3g}"
    assert relative <= 2.0**-7, f"a head is off by {relative:.3g} of its norm"
    return f"off by {worst:.1e}, {relative:.1e} of a head's norm"


def check_unpacking(inputs: Inputs) -> str:
    """Contexts of one token, whose output is the value row itself: equal bits over all codes, places and scales."""
    cache = inputs["cache"]
    cache.v_scales.random_(0, 0x7F)
    out = run(inputs)
    exact = paged_decode(**inputs, backend="torch")
    assert torch.equal(out, exact), f"{int((out != exact).sum())} of {out.numel()} values differ"
    return "equal bits"


def sdpa_inputs(shape: Shape, device: torch.device) -> Inputs:
    lengths, H, G, D, _ = shape
    q = torch.randn(len(lengths), H, 1, D, device=device).bfloat16()
    k, v = (
        torch.empty(len(lengths), G, lengths[0], D, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)
    )
    return {"query": q, "key": k, "value": v}


def _bytes(shape: Shape, kind: str) -> int:
    lengths, H, G, D, _ = shape
    per_token = 2 * G * D * (9 / 16 if kind == "fp4" else 2)
    return int(sum(lengths) * per_token + 2 * len(lengths) * H * D * 2)


def _case(label: str, shape: Shape, kind: str, config: Any = None, config_name: str = "", **extra: Any) -> Case:
    return Case(
        op="paged_attention",
        name=f"{label}, {kind}{config_name}",
        bytes_moved=_bytes(shape, kind),
        operations=4 * sum(shape[0]) * shape[1] * shape[3],
        make=lambda device: make(shape, kind, device),
        run=lambda inputs: run(inputs, config),
        check=lambda inputs: check(inputs, config),
        group=label,
        baseline=kind == "bf16",
        **extra,
    )


def _sdpa(label: str, shape: Shape) -> Case:
    return Case(
        op="paged_attention",
        name=f"{label}, torch SDPA, not paged",
        bytes_moved=_bytes(shape, "bf16"),
        operations=4 * sum(shape[0]) * shape[1] * shape[3],
        make=lambda device: sdpa_inputs(shape, device),
        run=lambda i: F.scaled_dot_product_attention(**i, enable_gqa=True),
        check=None,
        group=label,
    )


def cases(small: bool, sweep: bool) -> list[Case]:
    """small: shapes for the interpreter. sweep: only several cuts of the work at two shapes."""
    if small:
        shape: Shape = ([70, 33], 8, 2, 128, 16)
        return [_case("small", shape, kind) for kind in ("fp4", "bf16")] + [_unpacking(([1] * 3, 8, 2, 128, 16))]
    shapes: dict[str, Shape] = {
        "8 x 128K, 32/4 heads of 128": ([131072] * 8, 32, 4, 128, 64),
        "64 x 8K, 32/4 heads of 128": ([8192] * 64, 32, 4, 128, 64),
        "1 x 128K, 32/4 heads of 128": ([131072], 32, 4, 128, 64),
        "64 of 1K to 64K, 32/4 heads of 128": ([1024 * (i + 1) - 3 for i in range(64)], 32, 4, 128, 64),
        "8 x 128K, 16/2 heads of 256": ([131072] * 8, 16, 2, 256, 64),
        "48 x 128K, 32/4 heads of 128": ([131072] * 48, 32, 4, 128, 64),
        "48 x 128K, 16/2 heads of 256": ([131072] * 48, 16, 2, 256, 64),
        "16 x 64K, 32/8 heads of 64": ([65536] * 16, 32, 8, 64, 64),
        "8 x 128K, 32/4 heads of 128, pages of 16": ([131072] * 8, 32, 4, 128, 16),
    }
    if sweep:
        found = [_configured(label, shapes[label], kind, c) for label, kind, settings in SWEEP for c in settings]
        return [*found, _configured(MAIN, shapes[MAIN], "fp4", (64, 1, 2, 12), move=False)]
    found = [_unpacking(([1] * 4096, 4, 4, D, 16)) for D in (64, 128, 256)]
    for label, shape in shapes.items():
        found += [_case(label, shape, "bf16"), _case(label, shape, "fp4")]
        if label in (MAIN, SHORT, WIDE, FULL, WIDE_FULL):
            found.append(_sdpa(label, shape))
    return found


def _unpacking(shape: Shape) -> Case:
    return Case(
        op="paged_attention",
        name=f"unpacking, head_dim {shape[3]}",
        bytes_moved=_bytes(shape, "fp4"),
        operations=4 * sum(shape[0]) * shape[1] * shape[3],
        make=lambda device: make(shape, "fp4", device),
        run=run,
        check=check_unpacking,
    )


Setting = tuple[int, int, int, int]
"""Tile, warps, stages, programs per multiprocessor."""


def _configured(label: str, shape: Shape, kind: str, setting: Setting, move: bool = True) -> Case:
    from tracefp4.kernels.paged_attention.triton import AttentionConfig

    tile, warps, stages, per_sm = setting
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    config = AttentionConfig(tile, warps, stages, per_sm * sms, move=move)
    name = f", tile {tile}, {warps} warps, {stages} stages, {per_sm} per SM"
    return _case(label, shape, kind, config, name if move else name + ", shuffles")


MAIN, WIDE = "8 x 128K, 32/4 heads of 128", "8 x 128K, 16/2 heads of 256"
FULL, WIDE_FULL = "48 x 128K, 32/4 heads of 128", "48 x 128K, 16/2 heads of 256"
SHORT = "64 x 8K, 32/4 heads of 128"
RAGGED = "64 of 1K to 64K, 32/4 heads of 128"

# What came within a few percent of the default or beat it; the defaults themselves are cases of their own.
SWEEP: list[tuple[str, str, list[Setting]]] = [
    (WIDE_FULL, "bf16", [(64, 8, 2, 4), (64, 8, 2, 6)]),
    (WIDE, "bf16", [(64, 8, 2, 6)]),
    (FULL, "bf16", [(64, 4, 3, 6)]),
    (FULL, "fp4", [(64, 1, 2, 24)]),
    (RAGGED, "fp4", [(64, 1, 2, 24), (64, 1, 2, 48)]),
    (RAGGED, "bf16", [(64, 4, 2, 8), (64, 4, 2, 16)]),
]
