"""The paged KV cache: packed FP4 codes and scales, or dense values in the compute dtype.

Legend: N rows of a step, B sequences, T context, G KV heads, D head_dim, S slots (pages * page_size).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tracefp4.errors import TracefpError
from tracefp4.formats import E2M1_VALUES, Format, QuantizedBlocks, decode_e4m3, get_format


def _byte_pairs() -> Tensor:
    """f32 [256, 2]: the two E2M1 values of a packed byte, low nibble first."""
    byte = torch.arange(256)
    return torch.stack([E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]], dim=-1).contiguous()


class KVPool:
    """K and V of every layer, by slot. ``write`` and ``gather`` are all that attention needs.

    epilogue: 1/S, to be applied to scores (K) and outputs (V) in FP32; 1.0 in a dense pool.
    """

    epilogue: float = 1.0
    bytes_per_token_layer: float

    def write(self, layer: int, slots: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> dict[str, QuantizedBlocks]:
        raise NotImplementedError

    def gather(self, layer: int, slots_BT: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class DenseKVPool(KVPool):
    """BF16 or FP32 cache."""

    def __init__(self, layers: int, slots: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        self._kv = torch.zeros(layers, 2, slots, heads, head_dim, dtype=dtype, device=device)
        self.bytes_per_token_layer = 2 * heads * head_dim * self._kv.element_size()

    def write(self, layer: int, slots: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> dict[str, QuantizedBlocks]:
        self._kv[layer, 0].index_copy_(0, slots, k_NGD)
        self._kv[layer, 1].index_copy_(0, slots, v_NGD)
        return {}

    def gather(self, layer: int, slots_BT: Tensor) -> tuple[Tensor, Tensor]:
        flat = slots_BT.reshape(-1)
        shape = (*slots_BT.shape, *self._kv.shape[-2:])
        return self._kv[layer, 0, flat].view(shape), self._kv[layer, 1, flat].view(shape)


class QuantizedKVPool(KVPool):
    """FP4 cache: per slot and layer G*D/2 bytes of codes and G*D/block of scales, for K and for V.

    Blocks run along head_dim. S is static (``encode_scale``), so a token's codes never depend on its batch.
    Raises TracefpError where head_dim is no multiple of the block.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        head_dim: int,
        format_name: str,
        encode_scale: float | None,
        device: str,
    ) -> None:
        self.format: Format = get_format(format_name)
        if head_dim % self.format.block_size:
            raise TracefpError(
                f"head_dim {head_dim} is not a multiple of the {format_name} block of {self.format.block_size}; "
                'set quant.kv="none" for this model'
            )
        self.heads, self.head_dim = heads, head_dim
        width = heads * head_dim
        self.encode_scale = None if encode_scale is None else torch.tensor(float(encode_scale))
        self.epilogue = 1.0 if encode_scale is None else 1.0 / float(encode_scale)
        self.codes = torch.zeros(layers, 2, slots, width // 2, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(layers, 2, slots, width // self.format.block_size, dtype=torch.uint8, device=device)
        self.bytes_per_token_layer = 2 * (self.codes.shape[-1] + self.scales.shape[-1])
        self._pairs = _byte_pairs().to(device)
        bytes_ = torch.arange(256, dtype=torch.uint8)
        is_e4m3 = self.format.scale_kind == "e4m3"
        self._scale_values = (decode_e4m3(bytes_) if is_e4m3 else self.format.effective_scale(bytes_, None)).to(device)

    def write(self, layer: int, slots: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> dict[str, QuantizedBlocks]:
        """Quantizes and stores N rows; returns their blocks, shape [N, G*D], for the record."""
        written = {}
        for i, (site, x) in enumerate((("key", k_NGD), ("value", v_NGD))):
            blocks = self.format.quantize(x.reshape(x.shape[0], -1), encode_scale=self.encode_scale)
            self.codes[layer, i].index_copy_(0, slots, blocks.codes)
            self.scales[layer, i].index_copy_(0, slots, blocks.scales)
            written[site] = blocks
        return written

    def gather(self, layer: int, slots_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Operands E2M1 * SF of the context in FP32 (exact in BF16), [B, T, G, D] each."""
        flat = slots_BT.reshape(-1)
        shape = (*slots_BT.shape, self.heads, self.head_dim)
        out = []
        for i in range(2):
            codes = self.codes[layer, i].index_select(0, flat).int()
            scales = self.scales[layer, i].index_select(0, flat).int()
            values = self._pairs.index_select(0, codes.view(-1)).view(scales.shape[0], scales.shape[1], -1)
            scaled = values.mul_(self._scale_values.index_select(0, scales.view(-1)).view(*scales.shape, 1))
            out.append(scaled.view(shape))
        return out[0], out[1]


def make_kv_pool(
    layers: int,
    slots: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    format_name: str | None,
    encode_scale: float | None,
    device: str,
) -> KVPool:
    if format_name is None:
        return DenseKVPool(layers, slots, heads, head_dim, dtype, device)
    if encode_scale is not None and not math.isfinite(encode_scale):
        raise TracefpError(f"kv_encode_scale must be finite, got {encode_scale}")
    return QuantizedKVPool(layers, slots, heads, head_dim, format_name, encode_scale, device)
