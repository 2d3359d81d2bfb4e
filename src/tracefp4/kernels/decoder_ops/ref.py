"""Reference of a decoder layer's small operations, in plain torch.

Legend: N rows, I features, H query heads, G KV heads, D head_dim, E experts, K experts per row, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.formats import decode_e4m3
from tracefp4.formats.e2m1 import decode_packed
from tracefp4.kernels.paged_attention.cache import PagedCache, codes_from_half_words, codes_from_k_words


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight in FP32, rounded once to x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def rotate(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """Rotary embedding (half-split layout) with FP32 tables [N, D/2]."""
    x1, x2 = x_NHD.float().chunk(2, dim=-1)
    cos, sin = cos_ND[:, None], sin_ND[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x_NHD.dtype)


def add_norm(
    x_NI: Tensor, y: Tensor | None, weight_I: Tensor, eps: float, gates_NK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if gates_NK is not None:
        assert y is not None
        y = (y.float() * gates_NK[..., None]).sum(1).to(y.dtype)
    total = x_NI if y is None else x_NI + y
    return total, rms_norm(total, weight_I, eps)


def norm_rotate(
    qkv_NX: Tensor,
    q_norm_D: Tensor,
    k_norm_D: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions_N: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    N, D = qkv_NX.shape[0], q_norm_D.shape[0]
    at = positions_N.clamp_min(0)
    q, k, _ = qkv_NX.view(N, heads + 2 * kv_heads, D).split([heads, kv_heads, kv_heads], dim=1)
    return (
        rotate(rms_norm(q, q_norm_D, eps), cos[at], sin[at]),
        rotate(rms_norm(k, k_norm_D, eps), cos[at], sin[at]),
    )


def choose_experts(logits_NE: Tensor, K: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    probs = torch.softmax(logits_NE, dim=-1, dtype=torch.float32)
    # Stable: of equal ones the lowest number first.
    gates, chosen = probs.sort(dim=-1, descending=True, stable=True)
    gates, chosen = gates[:, :K], chosen[:, :K].contiguous()
    if renormalize:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates.contiguous(), chosen


def write_dense(k_NGD: Tensor, v_NGD: Tensor, cache: PagedCache, slots_N: Tensor) -> None:
    page, place = slots_N // cache.page_size, slots_N % cache.page_size
    cache.k[page, :, place] = k_NGD
    cache.v[page, :, place] = v_NGD


def read_rows(cache: PagedCache, slots_T: Tensor) -> tuple[Tensor, Tensor]:
    page, place = slots_T // cache.page_size, slots_T % cache.page_size
    if cache.k_scales is None or cache.v_scales is None:
        return cache.k[page, :, place], cache.v[page, :, place]
    halves = cache.v.view(torch.int16).unflatten(-1, (-1, 2, 2))  # P G D/8 S/2 half token
    v_codes = codes_from_half_words(halves[page, :, :, place // 2, :, place % 2].int() & 0xFFFF)
    k = _values(codes_from_k_words(cache.k[page, :, place]), cache.k_scales[page, :, place])
    return k, _values(v_codes, cache.v_scales[page, :, :, place])


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    values = decode_packed(codes).unflatten(-1, (-1, 16)) * decode_e4m3(scales.contiguous()).unsqueeze(-1)
    return values.flatten(-2).bfloat16()
