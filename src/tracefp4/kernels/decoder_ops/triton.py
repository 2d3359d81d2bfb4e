"""One program a row, or a row's head: see `tracefp4.kernels.decoder_ops`, where operands are checked."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.paged_attention.cache import PagedCache
from tracefp4.kernels.triton_layout import Checked
from tracefp4.kernels.triton_math import IEEE, decode_e2m1, decode_e4m3, follow, following, from_bf16, to_bf16


@triton.jit
def _inverse_rms(total, I: tl.constexpr, eps):
    """f32 [1] sum of squares -> 1 / sqrt(mean + eps), each operation rounded correctly as torch's is on the CPU."""
    mean = tl.div_rn(total, tl.zeros_like(total) + I)
    return tl.div_rn(tl.zeros_like(total) + 1.0, tl.sqrt_rn(mean + eps))


@Checked
@triton.jit
def _add_norm(
    x, y, gates, weight, total_out, out, eps, I: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """K: y has so many rows for each of x, which are weighted by gates, added in order and rounded first; or 0."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    real = i < I
    v = from_bf16(tl.load(x + row * I + i, mask=real, other=0.0))
    if ADD:
        if K > 0:
            added = tl.zeros([BLOCK], tl.float32)
            for k in tl.static_range(K):
                part = from_bf16(tl.load(y + (row * K + k) * I + i, mask=real, other=0.0))
                added += part * tl.load(gates + row * K + k)
            added = from_bf16(to_bf16(added))
        else:
            added = from_bf16(tl.load(y + row * I + i, mask=real, other=0.0))
        rounded = to_bf16(v + added)
        tl.store(total_out + row * I + i, rounded, mask=real)
        v = from_bf16(rounded)
    inverse = _inverse_rms(tl.sum(v * v, axis=0, keep_dims=True), I, eps)
    w = from_bf16(tl.load(weight + i, mask=real, other=0.0))
    tl.store(out + row * I + i, to_bf16(v * inverse * w), mask=real)


@Checked
@triton.jit
def _norm_rotate(
    qkv, q_norm, k_norm, cos, sin, positions, q_out, k_out, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head): query heads first, then those of K."""
    follow(PDL)
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_k = h >= H
    d = tl.arange(0, D // 2)
    source = qkv + row * ((H + 2 * G) * D) + h * D
    x1, x2 = from_bf16(tl.load(source + d)), from_bf16(tl.load(source + D // 2 + d))
    inverse = _inverse_rms(tl.sum(x1 * x1 + x2 * x2, axis=0, keep_dims=True), D, eps)
    weight = k_norm if is_k else q_norm
    x1 = from_bf16(to_bf16(x1 * inverse * from_bf16(tl.load(weight + d))))
    x2 = from_bf16(to_bf16(x2 * inverse * from_bf16(tl.load(weight + D // 2 + d))))
    at = tl.maximum(tl.load(positions + row), 0) * (D // 2)
    c, s = tl.load(cos + at + d), tl.load(sin + at + d)
    target = (k_out + (row * G + h - H) * D) if is_k else (q_out + (row * H + h) * D)
    tl.store(target + d, to_bf16(x1 * c - x2 * s))
    tl.store(target + D // 2 + d, to_bf16(x2 * c + x1 * s))


@Checked
@triton.jit
def _choose_experts(
    logits, gates, chosen, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, EP), tl.arange(0, KP)
    x = from_bf16(tl.load(logits + row * E + e, mask=e < E, other=0.0))
    x = tl.where(e < E, x, float("-inf"))
    p = tl.exp(x - tl.max(x, axis=0))
    p = tl.where(e < E, p / tl.sum(p, axis=0), -1.0)
    best = tl.zeros([KP], tl.float32)
    number = tl.zeros([KP], tl.int32)
    for n in tl.static_range(K):
        largest = tl.max(p, axis=0)
        which = tl.min(tl.where(p == largest, e, EP), axis=0)
        which = tl.minimum(which, E - 1)  # NaN equals nothing: some expert is named all the same
        best = tl.where(k == n, largest, best)
        number = tl.where(k == n, which, number)
        p = tl.where(e == which, -1.0, p)
    if NORM:
        best = best / tl.sum(best, axis=0)
    tl.store(gates + row * K + k, best, mask=k < K)
    tl.store(chosen + row * K + k, number.to(tl.int64), mask=k < K)


@Checked
@triton.jit
def _write_dense(k, v, k_out, v_out, slots, k_stride, v_stride, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    row, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    d = tl.arange(0, D)
    at = ((slot // PAGE * G + g) * PAGE + slot % PAGE) * D + d
    tl.store(k_out + at, tl.load(k + row * k_stride + g * D + d))
    tl.store(v_out + at, tl.load(v + row * v_stride + g * D + d))


@triton.jit
def _half_word_code(half, i):
    """Code of value i of a half word: the inverse of `quantize_record`'s placing."""
    byte = tl.where(i % 2 == 0, half >> 8, half) & 0xFF
    a = ((byte >> 4) & 8) | ((byte >> 1) & 7)
    b = ((byte & 1) << 3) | ((byte >> 4) & 7)
    return tl.where(i < 2, a, b)


@Checked
@triton.jit
def _read_rows(
    k, v, k_scales, v_scales, slots, k_out, v_out, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Program (row, head): both K and V. k, v: the cache's words seen as int16."""
    row, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    base, place = slot // PAGE * G + g, slot % PAGE
    d = tl.arange(0, D)
    h, block = d // 4, d // 16
    unit = h // 8 * 4 + h % 4
    k_half = tl.load(k + (base * PAGE + place) * (D // 4) + unit // 2 * 4 + h // 4 % 2 * 2 + unit % 2).to(tl.int32)
    k_byte = tl.load(k_scales + (base * PAGE + place) * (D // 16) + block).to(tl.int32)
    v_at = (base * (D // 8) + h // 2) * (2 * PAGE) + place // 2 * 4 + h % 2 * 2 + place % 2
    v_half = tl.load(v + v_at).to(tl.int32)
    v_byte = tl.load(v_scales + (base * (D // 16) + block) * PAGE + place).to(tl.int32)
    out = (row * G + g) * D + d
    tl.store(k_out + out, to_bf16(decode_e2m1(_half_word_code(k_half, d % 4)) * decode_e4m3(k_byte)))
    tl.store(v_out + out, to_bf16(decode_e2m1(_half_word_code(v_half, d % 4)) * decode_e4m3(v_byte)))


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, gates: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    N, I = x.shape
    out = torch.empty_like(x)
    total = x if y is None else torch.empty_like(x)
    block = triton.next_power_of_2(I)
    if N:
        _add_norm[(N,)](
            x, x if y is None else y, gates, weight, total, out, eps, I=I, BLOCK=block, ADD=y is not None,
            K=0 if gates is None else gates.shape[1], num_warps=min(8, max(1, block // 512)), **IEEE, **following(),
        )  # fmt: skip
    return total, out


def norm_rotate(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, H: int, G: int, eps: float
) -> tuple[Tensor, Tensor]:
    N, D = qkv.shape[0], q_norm.shape[0]
    q = torch.empty(N, H, D, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(N, G, D, dtype=qkv.dtype, device=qkv.device)
    if N:
        _norm_rotate[(N, H + G)](
            qkv, q_norm, k_norm, cos, sin, positions, q, k, eps, H=H, G=G, D=D, num_warps=1, **IEEE, **following()
        )
    return q, k


def choose_experts(logits: Tensor, K: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    N, E = logits.shape
    gates = torch.empty(N, K, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(N, K, dtype=torch.int64, device=logits.device)
    if N:
        _choose_experts[(N,)](
            logits, gates, chosen, E=E, EP=triton.next_power_of_2(E), K=K, KP=triton.next_power_of_2(K),
            NORM=renormalize, num_warps=1, **IEEE, **following(),
        )  # fmt: skip
    return gates, chosen


def write_dense(k: Tensor, v: Tensor, cache: PagedCache, slots: Tensor) -> None:
    N, G, D = k.shape
    if N:
        _write_dense[(N, G)](
            k, v, cache.k, cache.v, slots, k.stride(0), v.stride(0), G=G, D=D, PAGE=cache.page_size, num_warps=1
        )


def read_rows(cache: PagedCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    T, G, D = slots.shape[0], cache.heads, cache.head_dim
    k, v = (torch.empty(T, G, D, dtype=torch.bfloat16, device=slots.device) for _ in range(2))
    if T:
        _read_rows[(T, G)](
            cache.k.view(torch.int16), cache.v.view(torch.int16), cache.k_scales, cache.v_scales, slots, k, v,
            G=G, D=D, PAGE=cache.page_size, num_warps=1,
        )  # fmt: skip
    return k, v
