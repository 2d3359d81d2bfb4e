"""What this device's memory and tensor cores do at best, measured in the run that quotes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tracefp4.bench.triton_limits import copy, read


def ceilings(timer: Callable[..., tuple[float, Any, bool]], device: torch.device) -> dict[str, float]:
    """Limits of this device: bytes a second and FLOP a second, the best of several ways each.

    copy_bytes_per_s: bytes read plus bytes written by a copy of 4 GiB, by torch's copy_ (launched eagerly and as a
    graph's node: the two need not be the same code) or a Triton kernel; read_bytes_per_s: a sum over 4 GiB;
    bf16_flop_per_s: a matrix product of 8192 x 8192 x 8192 on random values.
    """
    count = 1 << 30
    a = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, device=device)
    b = torch.empty_like(a)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    copies = {f"torch, graph {graph}": timer(partial(b.copy_, a), graph=graph)[0] for graph in (False, True)}
    for block, warps in ((1024, 4), (2048, 4), (4096, 8), (8192, 8)):
        b.zero_()
        run = partial(copy[(count // block,)], a, b, count, BLOCK=block, num_warps=warps)
        copies[f"triton {block}"] = timer(run)[0]
        assert torch.equal(a, b)
    sums = torch.empty(64 * sms, dtype=torch.int32, device=device)
    reads = {}
    for per_sm, block, warps in ((8, 2048, 4), (16, 2048, 4), (8, 4096, 8), (32, 1024, 4)):
        n = per_sm * sms
        run = partial(read[(n,)], a, sums, count, n, BLOCK=block, num_warps=warps)
        reads[f"{per_sm} x {block}"] = timer(run)[0]
    print("copies, us:", copies, "reads, us:", reads, flush=True)
    del a, b
    x, y = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(x)
    product = timer(partial(torch.mm, x, y, out=out))[0]
    return {
        "copy_bytes_per_s": 8 * count / min(copies.values()) * 1e6,
        "read_bytes_per_s": 4 * count / min(reads.values()) * 1e6,
        "bf16_flop_per_s": 2 * 8192**3 / product * 1e6,
    }
