"""Attention over a paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.formats import get_format
from tracefp4.formats.e2m1 import decode_packed
from tracefp4.kernels.backend import kernel_module
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.paged_attention.cache import PagedCache, codes_from_k_words, codes_from_v_words
from tracefp4.kernels.paged_attention.ref import paged_attention

__all__ = ["PagedCache", "paged_attention", "paged_decode"]


def paged_decode(
    q_BHD: Tensor,
    cache: PagedCache,
    block_tables_BP: Tensor,
    lengths_B: Tensor,
    scaling: float,
    *,
    backend: str,
    max_length: int | None = None,
) -> Tensor:
    """Attention of one new token per sequence over its whole context, itself included; [B, H, D] in q's dtype.

    Args:
        q_BHD: BF16, contiguous (the torch backend takes FP32 too); H is a multiple of the cache's heads.
        cache: one layer's K and V.
        block_tables_BP: int32 [B, pages]: pages of each sequence in order; entries past its length are not read.
        lengths_B: int32 [B]: tokens of context; a sequence of 0 tokens gets an output of 0.
        scaling: factor on the scores, usually D^-0.5; the cache's own epilogues come on top.
        backend: "torch" or "triton".
        max_length: an upper bound of the lengths known on the host; by default what the block tables can hold.

    Raises:
        KernelError: shapes or dtypes that do not fit, or a head_dim the kernel does not take (64, 128, 256).
    """
    _check(q_BHD, cache, block_tables_BP, lengths_B)
    kernel = kernel_module(backend, "paged_attention", q_BHD, cache.k, block_tables_BP, lengths_B)
    if kernel is None:
        return _reference(q_BHD, cache, block_tables_BP, lengths_B, scaling)
    if q_BHD.dtype is not torch.bfloat16 or cache.k.dtype not in (torch.int32, torch.bfloat16):
        raise KernelError(f"the triton backend attends in BF16, got q {q_BHD.dtype}, cache {cache.k.dtype}")
    if cache.head_dim not in (64, 128, 256):
        raise KernelError(f"the triton backend takes head_dim 64, 128 or 256, got {cache.head_dim}")
    longest = block_tables_BP.shape[1] * cache.page_size
    return kernel.paged_decode(
        q_BHD, cache, block_tables_BP, lengths_B, scaling, longest if max_length is None else min(max_length, longest)
    )


def _check(q: Tensor, cache: PagedCache, tables: Tensor, lengths: Tensor) -> None:
    if q.ndim != 3 or q.shape[1] % cache.heads or q.shape[2] != cache.head_dim or not q.is_contiguous():
        raise KernelError(
            f"q must be contiguous [B, H, {cache.head_dim}] with H a multiple of {cache.heads}, got {tuple(q.shape)}"
        )
    B = q.shape[0]
    if tables.dtype != torch.int32 or tables.ndim != 2 or tables.shape[0] != B or tables.stride(1) != 1:
        raise KernelError(f"block tables must be int32 [{B}, pages], got {tables.dtype} {tuple(tables.shape)}")
    if lengths.dtype != torch.int32 or lengths.shape != (B,):
        raise KernelError(f"lengths must be int32 [{B}], got {lengths.dtype} {tuple(lengths.shape)}")


def _reference(q: Tensor, cache: PagedCache, tables: Tensor, lengths: Tensor, scaling: float) -> Tensor:
    """Gathers every sequence's pages and attends with `ref.paged_attention`."""
    pages = tables.long().clamp(0, cache.k.shape[0] - 1)  # B P
    if cache.k_scales is not None and cache.v_scales is not None:
        k = _values(codes_from_k_words(cache.k[pages]), cache.k_scales[pages])
        v_codes = codes_from_v_words(cache.v[pages].transpose(-1, -2))
        v = _values(v_codes, cache.v_scales[pages].transpose(-1, -2))
    else:
        k, v = cache.k[pages], cache.v[pages]  # B P G S C
    k, v = (x.transpose(2, 3).flatten(1, 2) for x in (k, v))  # B T G D
    positions = (lengths - 1).long()[:, None]
    out = paged_attention(
        q[:, None], k, v, positions, scaling, k_epilogue=cache.k_epilogue, v_epilogue=cache.v_epilogue
    )
    return out[:, 0]


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """Operands E2M1 * SF in FP32, [..., D]."""
    sf = get_format("nvfp4").effective_scale(scales.contiguous(), None)
    return (decode_packed(codes).unflatten(-1, (-1, 16)) * sf.unsqueeze(-1)).flatten(-2)
