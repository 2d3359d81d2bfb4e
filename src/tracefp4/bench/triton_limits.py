"""Device code of the bandwidth measurements."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy(source, target, COUNT, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < COUNT), mask=i < COUNT)


@triton.jit
def read(source, target, COUNT, PROGRAMS, BLOCK: tl.constexpr):
    """One sum a program: everything is read and almost nothing written."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, COUNT, PROGRAMS.to(tl.int64) * BLOCK):
        total += tl.load(source + start + tl.arange(0, BLOCK))
    tl.store(target + tl.program_id(0), tl.sum(total, axis=0))
