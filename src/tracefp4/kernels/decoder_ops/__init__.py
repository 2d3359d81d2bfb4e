"""The small operations between the large ones of a decoder layer, each in one pass on a GPU.

Normalisation, rotation and the router's choice are FP32 inside and rounded where a model that stores its activations
rounds them; sums of squares add up in another order than torch's, so an output may differ by its last bit.

Legend: N rows, I features, H query heads, G KV heads, D head_dim, E experts, K experts per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.kernels.backend import kernel_module
from tracefp4.kernels.decoder_ops import ref
from tracefp4.kernels.decoder_ops.ref import rms_norm, rotate
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.paged_attention.cache import PagedCache

__all__ = ["add_norm", "choose_experts", "norm_rotate", "read_rows", "rms_norm", "rotate", "write_dense"]


def add_norm(
    x_NI: Tensor, y: Tensor | None, weight_I: Tensor, eps: float, gates_NK: Tensor | None = None, *, backend: str
) -> tuple[Tensor, Tensor]:
    """(x + y, RMS norm of it times weight), both BF16 [N, I].

    y: [N, I]; with gates (f32 [N, K], contiguous) [N, K, I]: its sum over k weighted by them, FP32, in order of k and
    rounded once; None: x itself comes back with its norm.

    Raises KernelError: operands of other shapes, or not contiguous BF16 (triton).
    """
    (N, I), K = x_NI.shape if x_NI.ndim == 2 else (0, 0), () if gates_NK is None else tuple(gates_NK.shape[1:])
    if y is not None and tuple(y.shape) != (N, *K, I):
        raise KernelError(f"y must be {(N, *K, I)}, got {tuple(y.shape)}")
    if gates_NK is not None and (y is None or len(K) != 1 or gates_NK.shape[0] != N or gates_NK.dtype != torch.float32):
        raise KernelError(f"gates must be f32 [{N}, K] for a y, got {gates_NK.dtype} {tuple(gates_NK.shape)}")
    if x_NI.ndim != 2 or tuple(weight_I.shape) != (x_NI.shape[1],):
        raise KernelError(f"x must be [N, I] and its weight [I], got {tuple(x_NI.shape)} and {tuple(weight_I.shape)}")
    kernel = kernel_module(backend, "decoder_ops", x_NI, weight_I)
    if kernel is None:
        return ref.add_norm(x_NI, y, weight_I, eps, gates_NK)
    _bf16(x=x_NI, weight=weight_I, **({} if y is None else {"y": y}))
    gates = None if gates_NK is None else gates_NK.contiguous()
    out: tuple[Tensor, Tensor] = kernel.add_norm(x_NI, y, weight_I, eps, gates)
    return out


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
    *,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Q and K of a fused QKV product, each head normalised and rotated: BF16 [N, H, D] and [N, G, D].

    Args:
        qkv_NX: BF16 [N, (H + 2G) * D].
        q_norm_D, k_norm_D: weights of the norms.
        cos, sin: f32 [positions, D/2].
        positions_N: int64; below 0 (a padding row) counts as 0.
        backend: "torch" or "triton".
    """
    D = q_norm_D.shape[0]
    if qkv_NX.ndim != 2 or qkv_NX.shape[1] != (heads + 2 * kv_heads) * D or D & (D - 1):
        raise KernelError(f"qkv must be [N, ({heads} + 2 * {kv_heads}) * {D}], {D} a power of two: {qkv_NX.shape}")
    kernel = kernel_module(backend, "decoder_ops", qkv_NX, positions_N, cos)
    if kernel is None:
        return ref.norm_rotate(qkv_NX, q_norm_D, k_norm_D, cos, sin, positions_N, heads, kv_heads, eps)
    _bf16(qkv=qkv_NX, q_norm=q_norm_D, k_norm=k_norm_D)
    out: tuple[Tensor, Tensor] = kernel.norm_rotate(
        qkv_NX, q_norm_D, k_norm_D, cos, sin, positions_N, heads, kv_heads, eps
    )
    return out


def choose_experts(logits_NE: Tensor, K: int, renormalize: bool, *, backend: str) -> tuple[Tensor, Tensor]:
    """The K likeliest experts of each row: (gates f32 [N, K], numbers int64 [N, K]), of equal ones the lowest first.

    renormalize: gates are divided by their sum.
    """
    if logits_NE.ndim != 2 or not 1 <= K <= logits_NE.shape[1]:
        raise KernelError(f"logits must be [N, E] with E >= {K}, got {tuple(logits_NE.shape)}")
    kernel = kernel_module(backend, "decoder_ops", logits_NE)
    if kernel is None:
        return ref.choose_experts(logits_NE, K, renormalize)
    _bf16(logits=logits_NE)
    out: tuple[Tensor, Tensor] = kernel.choose_experts(logits_NE, K, renormalize)
    return out


def write_dense(k_NGD: Tensor, v_NGD: Tensor, cache: PagedCache, slots_N: Tensor, *, backend: str) -> None:
    """BF16 K and V [N, G, D] (rows may be strided) into a dense cache's slots int64 [N], none of them negative."""
    if cache.fp4:
        raise KernelError("write_dense takes a dense cache; quantize_record.write_kv writes a packed one")
    kernel = kernel_module(backend, "decoder_ops", k_NGD, v_NGD, slots_N)
    (ref if kernel is None else kernel).write_dense(k_NGD, v_NGD, cache, slots_N)


def read_rows(cache: PagedCache, slots_T: Tensor, *, backend: str) -> tuple[Tensor, Tensor]:
    """K and V of some slots int64 [T] as BF16 [T, G, D]: values of a dense cache, E2M1 * SF of a packed one (exact).

    The epilogues 1/S are left to the caller.
    """
    kernel = kernel_module(backend, "decoder_ops", slots_T, cache.k)
    if kernel is None or not cache.fp4:
        return ref.read_rows(cache, slots_T)
    out: tuple[Tensor, Tensor] = kernel.read_rows(cache, slots_T)
    return out


def _bf16(**tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.dtype != torch.bfloat16 or not t.is_contiguous():
            raise KernelError(f"{name} must be contiguous BF16 for the triton backend, got {t.dtype}")
