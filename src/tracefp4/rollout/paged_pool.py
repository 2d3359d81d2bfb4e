"""The KV cache in the layout that the GPU kernels read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.kernels.decoder_ops import read_rows, write_dense
from tracefp4.kernels.paged_attention import PagedCache
from tracefp4.kernels.quantize_record import TRITON_FORMATS, RecordTarget, write_kv
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.model import ModelShape


def slot_bytes(shape: ModelShape, recipe: QuantRecipe, dtype: torch.dtype) -> int:
    """Bytes of K and V of one token in all layers."""
    values = 2 * shape.kv_heads * shape.head_dim * shape.layers
    return values * 9 // 16 if recipe.kv in TRITON_FORMATS else values * dtype.itemsize


class PagedPool:
    """K and V of every layer in pages of words, and one page more, ``scratch_page``, that padding rows write to.

    backend: of the kernels, "torch" or "triton".
    """

    def __init__(
        self, shape: ModelShape, recipe: QuantRecipe, num_pages: int, page_size: int, device: str, backend: str
    ) -> None:
        self.format, self.backend, self.page_size, self.scratch_page = recipe.kv, backend, page_size, num_pages
        self.encode_scale = recipe.kv_encode_scale
        # Values of MX formats, which have no encode scale, are exact in BF16: such a cache is quantized and kept dense.
        self.packed = recipe.kv in TRITON_FORMATS
        kind = "nvfp4" if self.packed else torch.bfloat16
        self.layers = [
            PagedCache.empty(num_pages + 1, page_size, shape.kv_heads, shape.head_dim, kind, device)
            for _ in range(shape.layers)
        ]
        if self.packed:
            epilogue = 1.0 / self.encode_scale
            self.layers = [replace(c, k_epilogue=epilogue, v_epilogue=epilogue) for c in self.layers]

    def write(
        self,
        layer: int,
        slots_N: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        records: tuple[RecordTarget, RecordTarget] | None,
    ) -> tuple[QuantizedBlocks | None, QuantizedBlocks | None]:
        """Writes a step's K and V, quantized and recorded in the same pass where the cache is packed. Returns their
        blocks where it is quantized and dense; such a cache takes no records."""
        cache = self.layers[layer]
        if self.format is None:
            write_dense(k_NGD, v_NGD, cache, slots_N, backend=self.backend)
            return None, None
        if not self.packed:
            assert records is None
            fmt = get_format(self.format)
            k, v = (fmt.quantize(x.flatten(1)) for x in (k_NGD, v_NGD))
            dense = [fmt.dequantize(blocks, torch.bfloat16).view(k_NGD.shape) for blocks in (k, v)]
            write_dense(dense[0], dense[1], cache, slots_N, backend=self.backend)
            return k, v
        scales = (self.encode_scale, self.encode_scale)
        write_kv(
            k_NGD,
            v_NGD,
            cache,
            slots_N,
            backend=self.backend,
            format=self.format,
            encode_scales=scales,
            records=records,
        )
        return None, None

    def read(self, layer: int, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of some slots, BF16 [T, G, D], without the epilogues."""
        return read_rows(self.layers[layer], slots_T, backend=self.backend)
