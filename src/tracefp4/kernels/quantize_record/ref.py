"""Reference of quantizing rows and recording their slots, in plain torch.

Legend: N rows, K values of a row, G KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.formats.spec import EncodeScale
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.paged_attention.cache import PagedCache, half_words, k_words

NVFP4_PLANES = {4.5: (4, 8), 1.5: (1, 8), 1.125: (1, 2), 1.0625: (1, 1), 0.5: (0, 8), 0.125: (0, 2)}
"""Bits per value -> (code planes, scale planes) of the guidance record (`tracefp4.guidance.schema`)."""


@dataclass(frozen=True)
class RecordTarget:
    """Where a step's guidance goes: the recorder's buffers of one site and layer.

    payload uint8 [slots, row bytes], written at slots int64 [N] (a negative one is skipped); bits: width of the record;
    encode_scale f32 [slots] takes each row's S, or None where S is static. Both may be columns of a wider row.
    """

    payload: Tensor
    slots: Tensor
    bits: float
    encode_scale: Tensor | None = None


def planes(format: str, bits: float) -> tuple[int, int]:
    """(code planes, scale planes). Raises KernelError for a format or a width that is not recorded here."""
    if format not in ("nvfp4", "nvfp4-exact") or bits not in NVFP4_PLANES:
        raise KernelError(
            f"recording {format!r} at {bits!r} bits is not fused: quantize without a record and pack with "
            "tracefp4.guidance.pack_rows"
        )
    return NVFP4_PLANES[bits]


def payload_rows(blocks: QuantizedBlocks, bits: float) -> Tensor:
    """uint8 [N, row bytes]: the planes of every row, each padded to a byte, lowest bit first."""
    code_planes, scale_planes = planes(blocks.format, bits)
    codes = blocks.unpacked_codes().flatten(0, -2)
    scales = blocks.scales.flatten(0, -2)
    parts = [_plane(codes >> bit) for bit in range(code_planes)] + [
        _plane(scales >> bit) for bit in range(scale_planes)
    ]
    return torch.cat(parts, dim=-1)


def _plane(values: Tensor) -> Tensor:
    bits = torch.nn.functional.pad(values & 1, (0, -values.shape[1] % 8)).unflatten(1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


def record(blocks: QuantizedBlocks, target: RecordTarget) -> None:
    """Writes the rows of quantized blocks to their slots."""
    kept = target.slots >= 0
    slots = target.slots[kept]
    target.payload[slots] = payload_rows(blocks, target.bits)[kept]
    if target.encode_scale is not None:
        assert blocks.encode_scale is not None
        target.encode_scale[slots] = blocks.encode_scale.expand(*blocks.shape[:-1], 1).reshape(-1)[kept]


def quantize_record(
    x_NK: Tensor, format: str, encode_scale: EncodeScale, target: RecordTarget | None
) -> QuantizedBlocks:
    """`Format.quantize`, and the record of what it chose."""
    blocks = get_format(format).quantize(x_NK, encode_scale=encode_scale)
    if target is not None:
        record(blocks, target)
    return blocks


def write_kv(
    k_NGD: Tensor,
    v_NGD: Tensor,
    cache: PagedCache,
    slots_N: Tensor,
    format: str,
    encode_scales: tuple[float, float],
    targets: tuple[RecordTarget, RecordTarget] | None,
) -> None:
    """K and V into the cache's slots, a negative slot skipped; quantized first where the cache is FP4."""
    kept = slots_N >= 0
    page, place = slots_N[kept] // cache.page_size, slots_N[kept] % cache.page_size
    if cache.k_scales is None or cache.v_scales is None:
        cache.k[page, :, place] = k_NGD[kept]
        cache.v[page, :, place] = v_NGD[kept]
        return
    heads = cache.heads
    for i, (x, scale) in enumerate(zip((k_NGD, v_NGD), encode_scales, strict=True)):
        blocks = get_format(format).quantize(x.flatten(1), encode_scale=scale)
        scales = blocks.scales[kept].unflatten(1, (heads, -1))
        if i == 0:
            cache.k[page, :, place] = k_words(blocks.codes)[kept].unflatten(1, (heads, -1))
            cache.k_scales[page, :, place] = scales
        else:
            pairs = cache.v.view(torch.int16).unflatten(-1, (-1, 2, 2))  # P G D/8 S/2 half token
            pairs[page, :, :, place // 2, :, place % 2] = (
                half_words(blocks.codes)[kept].unflatten(1, (heads, -1)).to(torch.int16)
            )
            cache.v_scales[page, :, :, place] = scales
        if targets is not None:
            record(blocks, targets[i])
