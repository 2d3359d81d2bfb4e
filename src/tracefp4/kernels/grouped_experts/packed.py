"""Expert weights as the grouped kernels read them.

Legend: E experts, O output and I input features, T = I/128 tiles along the sum.

    words     int32 [E, T, O, 16]   sixteen units of eight codes: 128 consecutive inputs of one output feature
    scales    uint8 [E, T, O, 8]    their E4M3 block scales
    epilogue  f32 [E]               1/S of each expert

Units, pairs and bits of a word are those of K in the paged cache (`paged_attention.cache`). A program reads some rows
of one tile at a time: 64 bytes of codes and 8 of scales a row, one row behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, decode_e4m3
from tracefp4.formats.e2m1 import decode_packed
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.paged_attention.cache import codes_from_k_words, k_words

TILE = 128
"""Inputs of a tile."""


@dataclass(frozen=True)
class PackedExperts:
    """One stacked projection of all experts; fields and layout: see the module. Raises KernelError if they do not fit.

    format: "nvfp4" or "nvfp4-exact", the one that the weights were quantized by; their values do not depend on it.
    """

    words: Tensor
    scales: Tensor
    epilogue: Tensor
    format: str = "nvfp4"

    def __post_init__(self) -> None:
        if self.words.dtype != torch.int32 or self.words.ndim != 4 or self.words.shape[3] != 16:
            raise KernelError(f"words must be int32 [E, I/128, O, 16], got {self.words.dtype} {self.words.shape}")
        E, T, O, _ = self.words.shape
        if self.scales.dtype != torch.uint8 or tuple(self.scales.shape) != (E, T, O, 8):
            raise KernelError(f"scales must be uint8 [{E}, {T}, {O}, 8], got {self.scales.dtype} {self.scales.shape}")
        if self.epilogue.dtype != torch.float32 or tuple(self.epilogue.shape) != (E,):
            raise KernelError(f"the epilogue must be f32 [{E}], got {self.epilogue.dtype} {self.epilogue.shape}")
        if not all(t.is_contiguous() for t in (self.words, self.scales, self.epilogue)):
            raise KernelError("the tensors of packed experts must be contiguous")

    @property
    def experts(self) -> int:
        return self.words.shape[0]

    @property
    def outputs(self) -> int:
        return self.words.shape[2]

    @property
    def inputs(self) -> int:
        return self.words.shape[1] * TILE

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes + self.epilogue.nbytes

    @staticmethod
    def pack(blocks: QuantizedBlocks) -> PackedExperts:
        """From quantized weights [E, O, I] in an NVFP4 format with one encode scale for all or for each expert."""
        if blocks.format not in ("nvfp4", "nvfp4-exact") or len(blocks.shape) != 3 or blocks.shape[2] % TILE:
            raise KernelError(
                f"packed experts are NVFP4 [E, O, I] with I a multiple of {TILE}, got {blocks.format} "
                f"{list(blocks.shape)}; choose backend 'torch'"
            )
        assert blocks.encode_scale is not None
        E = blocks.shape[0]
        if blocks.encode_scale.numel() not in (1, E):
            raise KernelError(f"an encode scale for each of {E} experts is wanted, got {blocks.encode_scale.shape}")
        words = k_words(blocks.codes).unflatten(-1, (-1, 16)).transpose(1, 2).contiguous()
        scales = blocks.scales.unflatten(-1, (-1, 8)).transpose(1, 2).contiguous()
        epilogue = blocks.encode_scale.float().reshape(-1).reciprocal().expand(E).contiguous()
        return PackedExperts(words, scales, epilogue, blocks.format)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """(codes uint8 [E, O, I/2], scale bytes uint8 [E, O, I/16]) as `QuantizedBlocks` keeps them."""
        codes = codes_from_k_words(self.words.transpose(1, 2).flatten(2))
        return codes, self.scales.transpose(1, 2).flatten(2).contiguous()

    def operands(self) -> Tensor:
        """E2M1 * SF in FP32, [E, O, I]: what the reference multiplies."""
        codes, scales = self.unpack()
        return (decode_packed(codes).unflatten(-1, (-1, 16)) * decode_e4m3(scales).unsqueeze(-1)).flatten(-2)
