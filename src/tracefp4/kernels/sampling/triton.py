"""Two passes over the logits: maxima and sums of chunks, then the chunk and the token in it.

Legend: B rows, V tokens, C chunks of CHUNK tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.triton_layout import Checked
from tracefp4.kernels.triton_math import from_bf16

CHUNK = 4096


@Checked
@triton.jit
def _draw_chunks(logits, temperature, maxima, sums, V: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr):
    """maxima f32 [B, C], NaN where the chunk holds one; sums f64 [B, C] of exponentials relative to them."""
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = c * CHUNK + tl.arange(0, CHUNK)
    x = from_bf16(tl.load(logits + b * V + v, mask=v < V, other=0.0))
    x = tl.where(v < V, x, float("-inf"))
    broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
    m = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    reference = tl.where(m == float("-inf"), 0.0, m)
    e = tl.exp((x - reference) / tl.load(temperature + b))
    tl.store(maxima + b * C + c, tl.where(broken, float("nan"), m))
    tl.store(sums + b * C + c, tl.sum(e.to(tl.float64), axis=0))


@Checked
@triton.jit
def _draw_token(
    logits, temperature, greedy, uniform, maxima, sums, ids, logprobs, finite,
    V: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c, i = tl.arange(0, CP), tl.arange(0, CHUNK)
    t = tl.load(temperature + b)
    m = tl.load(maxima + b * C + c, mask=c < C, other=float("-inf"))
    broken = tl.sum((m != m).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(m == m, m, float("-inf")), axis=0)
    good = (top > float("-inf")) & (top < float("inf")) & (broken == 0)
    top = tl.where(good, top, 0.0)
    share = tl.load(sums + b * C + c, mask=c < C, other=0.0)
    share = tl.where(m > float("-inf"), share * tl.exp((m - top) / t).to(tl.float64), 0.0)
    share = tl.where(share == share, share, 0.0)
    total = tl.sum(share, axis=0)
    target = tl.load(uniform + b) * total
    # The chunk: the first whose end lies beyond the number; rounding may say none, then the last that has any mass.
    chunk = tl.sum((tl.cumsum(share, axis=0) <= target).to(tl.int32), axis=0)
    chunk = tl.minimum(chunk, tl.max(tl.where(share > 0, c, 0), axis=0))
    first_top = tl.min(tl.where(m == top, c, C), axis=0)
    is_greedy = tl.load(greedy + b) != 0
    chunk = tl.where(is_greedy, tl.minimum(first_top, C - 1), chunk)
    before = tl.sum(tl.where(c < chunk, share, 0.0), axis=0)
    v = chunk * CHUNK + i
    x = from_bf16(tl.load(logits + b * V + v, mask=v < V, other=0.0))
    x = tl.where(v < V, x, float("-inf"))
    e = tl.exp((x - top) / t).to(tl.float64)
    drawn = tl.sum((before + tl.cumsum(e, axis=0) <= target).to(tl.int32), axis=0)
    drawn = tl.minimum(drawn, tl.max(tl.where(e > 0, i, 0), axis=0))
    likeliest = tl.min(tl.where(x == top, i, CHUNK - 1), axis=0)
    drawn = tl.where(is_greedy, likeliest, drawn)
    token = tl.minimum(chunk * CHUNK + drawn, V - 1)
    tl.store(ids + b, token.to(tl.int64))
    own = tl.sum(tl.where(i == drawn, x, 0.0), axis=0)
    tl.store(logprobs + b, (own - top) / t - tl.log(total.to(tl.float32)))
    tl.store(finite + b, good.to(tl.int8))


def draw_tokens(logits: Tensor, temperature: Tensor, greedy: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, V = logits.shape
    chunk = min(CHUNK, triton.next_power_of_2(V))
    C, device = triton.cdiv(V, chunk), logits.device
    maxima = torch.empty(B, C, dtype=torch.float32, device=device)
    sums = torch.empty(B, C, dtype=torch.float64, device=device)
    ids = torch.empty(B, dtype=torch.int64, device=device)
    logprobs = torch.empty(B, dtype=torch.float32, device=device)
    finite = torch.empty(B, dtype=torch.int8, device=device)
    if B:
        _draw_chunks[(B, C)](logits, temperature, maxima, sums, V=V, C=C, CHUNK=chunk, num_warps=4)
        _draw_token[(B,)](
            logits, temperature, greedy.view(torch.uint8), uniform, maxima, sums, ids, logprobs, finite,
            V=V, C=C, CP=triton.next_power_of_2(C), CHUNK=chunk, num_warps=4,
        )  # fmt: skip
    return ids, logprobs, finite.bool()
