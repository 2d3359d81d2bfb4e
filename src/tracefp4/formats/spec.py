"""What a number format is: frozen data with a name, and the registry of names.

A format is never inferred from a dtype: the same uint8 codes mean different values under different rules, so
every tensor of codes carries its format's name.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tracefp4.formats.e2m1 import E2M1_VALUES, decode_packed, encode_e2m1, pack_codes, unpack_codes
from tracefp4.formats.names import ELEMENT_BITS, FormatError, element_bits

FLT_MAX = torch.finfo(torch.float32).max
DEFAULT = "default"
"""Value of `encode_scale` that means "row" for NVFP4 formats and None for MX formats."""

EncodeScale = str | float | Tensor | None


@dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """A tensor in a block format.

    Attributes:
        codes: uint8 [..., K/2], two E2M1 codes a byte, element 2i in the low nibble; uint8 [..., K] in a format of
            eight-bit elements.
        scales: uint8 [..., K/B], row-major, E4M3 bytes (NVFP4) or E8M0 bytes (MX).
        encode_scale: S, f32 [] or broadcastable [..., 1]; None for MX formats.
        format: name of the format, a key of the registry.
        shape: the unpacked shape (..., K).

    Raises:
        FormatError: codes and scales do not fit shape, or are not uint8.

    Example: x bf16 [5, 64] in "nvfp4" with encode_scale="row" gives codes [5, 32], scales [5, 4],
    encode_scale [5, 1], shape (5, 64).
    """

    codes: Tensor
    scales: Tensor
    encode_scale: Tensor | None
    format: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.scales.dtype != torch.uint8:
            raise FormatError(f"codes and scales must be uint8, got {self.codes.dtype}, {self.scales.dtype}")
        lead, length = tuple(self.shape[:-1]), self.shape[-1]
        blocks = self.scales.shape[-1]
        stored = length * self.element_bits // 8
        if tuple(self.codes.shape) != (*lead, stored) or tuple(self.scales.shape[:-1]) != lead:
            raise FormatError(
                f"codes {tuple(self.codes.shape)} and scales {tuple(self.scales.shape)} "
                f"do not fit shape {tuple(self.shape)}"
            )
        if blocks == 0 or length % blocks:
            raise FormatError(f"{blocks} scales a row do not divide a last dimension of {length}")

    @property
    def block_size(self) -> int:
        """Elements that share one scale byte."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def element_bits(self) -> int:
        """Bits of a code: 4, or 8 in an MXFP8 format."""
        return ELEMENT_BITS.get(self.format, 4)

    def unpacked_codes(self) -> Tensor:
        """uint8 [..., K], one code per element, 0..15 in a four-bit format."""
        return unpack_codes(self.codes) if self.element_bits == 4 else self.codes.clone()

    def rows(self, index: Any) -> QuantizedBlocks:
        """The same quantization restricted to some rows.

        Args:
            index: anything that indexes the leading dimensions (int, slice, mask, tensor, tuple of these).

        Returns:
            QuantizedBlocks over `x[index]`; a per-row encode scale is indexed along, a 0-d one is kept.
        """
        codes, scales = self.codes[index], self.scales[index]
        if codes.shape[-1:] != self.codes.shape[-1:] or scales.shape[-1:] != self.scales.shape[-1:]:
            raise FormatError("rows() indexes leading dimensions only: blocks cannot be cut")
        encode_scale = self.encode_scale
        if encode_scale is not None and encode_scale.ndim:
            encode_scale = encode_scale.expand(*self.shape[:-1], 1)[index]
        return QuantizedBlocks(codes, scales, encode_scale, self.format, (*codes.shape[:-1], self.shape[-1]))

    def to(self, device: torch.device | str) -> QuantizedBlocks:
        """The same blocks with all tensors on a device."""
        encode_scale = None if self.encode_scale is None else self.encode_scale.to(device)
        return QuantizedBlocks(self.codes.to(device), self.scales.to(device), encode_scale, self.format, self.shape)


@dataclass(frozen=True)
class Format(abc.ABC):
    """Base of all block formats.

    Notation: x is [..., K]; a block is B = `block_size` consecutive elements of the last dimension; m is a
    block's largest magnitude, S the encode scale, D = 1/S, SF a block scale read from its byte.

    Attributes:
        name: registry key.
        block_size: 16 (NVFP4) or 32 (MX).
        scale_kind: "e4m3" or "e8m0".
        encode_max: largest value that S maps a tensor's amax to (S = encode_max / amax); 0 for MX formats.
        element_bits, element_max: of an element: 4 and 6 (E2M1), or 8 and 448 (E4M3).
    """

    name: str
    block_size: int
    scale_kind: str
    encode_max: float
    element_bits: ClassVar[int] = 4
    element_max: ClassVar[float] = 6.0

    # Elements: E2M1 unless a format overrides these.

    def encode_elements(self, z: Tensor) -> Tensor:
        """Nearest element codes of f32 [...], one a byte, ties to the even code, saturating."""
        return encode_e2m1(z)

    def decode_elements(self, codes: Tensor) -> Tensor:
        """f32 [..., K] of codes as ``QuantizedBlocks`` stores them (four-bit ones packed)."""
        return decode_packed(codes)

    def pack(self, codes: Tensor) -> Tensor:
        """Codes, one a byte [..., K], as ``QuantizedBlocks`` stores them."""
        return pack_codes(codes) if self.element_bits == 4 else codes

    def magnitudes(self, device: torch.device) -> Tensor:
        """f32, ascending: the value of every code without its sign bit, NaN left out; the code is the index."""
        return E2M1_VALUES[:8].to(device)

    # Whole operations.

    def quantize(self, x: Tensor, encode_scale: EncodeScale = DEFAULT) -> QuantizedBlocks:
        """Quantize to nearest by the format's own rule.

        Args:
            x: floating [..., K], K a multiple of the block size; computed in FP32.
            encode_scale: see `resolve_encode_scale`.

        Returns:
            QuantizedBlocks of x's shape.

        Raises:
            FormatError: x is not floating, its last dimension is not a positive multiple of the block size,
                or the encode scale is not one the format takes.
        """
        x = self._input(x)
        amax = self._block_amax(x)
        resolved = self._resolve(amax, encode_scale)
        scales, codes = self._round(x, amax, resolved)
        return QuantizedBlocks(self.pack(codes), scales, resolved, self.name, tuple(x.shape))

    def dequantize(self, blocks: QuantizedBlocks, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of quantized blocks, [..., K]: element * (SF * D) in FP32, then cast once to dtype.

        Raises:
            FormatError: the blocks are of another format.
        """
        self._own(blocks)
        scale = self.effective_scale(blocks.scales, blocks.encode_scale)
        return self._times_block(self.decode_elements(blocks.codes), scale).to(dtype)

    def operands(self, blocks: QuantizedBlocks, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor | None]:
        """What an FP4 tensor core multiplies, and what its FP32 epilogue applies.

        Returns:
            (dtype [..., K], f32 broadcastable or None): element * SF, which has at most 6 significant bits and
            so is exact in BF16, and D = 1/S (None for MX formats).

        Raises:
            FormatError: the blocks are of another format.
        """
        self._own(blocks)
        values = self._times_block(self.decode_elements(blocks.codes), self._decode_scale(blocks.scales)).to(dtype)
        return values, None if blocks.encode_scale is None else blocks.encode_scale.reciprocal()

    # Scales.

    def block_amax(self, x: Tensor) -> Tensor:
        """f32 [..., K/B]: largest magnitude of each block, ignoring NaN (0 where a block is all NaN)."""
        return self._block_amax(self._input(x))

    def resolve_encode_scale(self, x: Tensor, encode_scale: EncodeScale = DEFAULT) -> Tensor | None:
        """Encode scale S that `quantize(x, encode_scale)` uses.

        Args:
            x: floating [..., K].
            encode_scale: for NVFP4 formats "row" (the default: one per row of K values), "row-pow2" (the
                same rounded down to a power of two), "tensor" (one over all of x: for weights), a positive
                number or 0-d tensor (static), or a tensor broadcastable to [..., 1]. For MX formats None (the
                default).

        Returns:
            f32 [..., 1] for "row" and "row-pow2", f32 [] for "tensor" and numbers, the given tensor in FP32
            otherwise; None for MX formats. S = encode_max / amax in FP32, at most FLT_MAX; 1 where amax is 0
            or Inf.

        Raises:
            FormatError: anything else. A scale over a batch of tokens is refused because a trainer, which
                sees other batches, cannot compute it again.
        """
        return self._resolve(self._block_amax(self._input(x)), encode_scale)

    @abc.abstractmethod
    def unrounded_scale(self, amax: Tensor, encode_scale: Tensor | None, choice: Tensor | None = None) -> Tensor:
        """Block scale before it is rounded to a byte.

        Args:
            amax: f32 [..., K/B].
            encode_scale: f32 [] or [..., 1]; None for MX formats.
            choice: uint8 or bool [..., K/B], 1 where the block maps its maximum to 4; 4over6 formats only
                (None means 6 everywhere).

        Returns:
            f32 [..., K/B].

        Raises:
            FormatError: a choice for a format that has none.
        """

    @abc.abstractmethod
    def round_scale(self, u: Tensor) -> Tensor:
        """uint8 [..., K/B]: the bytes of `unrounded_scale`."""

    def effective_scale(self, scales: Tensor, encode_scale: Tensor | None) -> Tensor:
        """f32 [..., K/B]: what a code is multiplied by: SF * D, rounded once to FP32 (MX: 2^e)."""
        sf = self._decode_scale(scales)
        return sf if encode_scale is None else sf * encode_scale.reciprocal()

    @abc.abstractmethod
    def multiplier(self, scales: Tensor, encode_scale: Tensor | None) -> Tensor:
        """f32 [..., K/B]: factor on x before rounding to elements, by the format's own rule."""

    # Codes at given scales.

    def scaled(self, x: Tensor, scales: Tensor, encode_scale: Tensor | None) -> Tensor:
        """z = x * multiplier, f32 [..., K], not clipped: the codes are its rounding."""
        return self._times_block(self._input(x), self.multiplier(scales, encode_scale))

    def round_with_scales(self, x: Tensor, scales: Tensor, encode_scale: Tensor | None) -> Tensor:
        """Nearest codes of x at given scales, unpacked: uint8 [..., K]."""
        return self.encode_elements(self.scaled(x, scales, encode_scale))

    def choice(self, blocks: QuantizedBlocks) -> Tensor | None:
        """uint8 [..., K/B], 1 where a 4over6 block maps its maximum to 4; None for all other formats."""
        return None

    # Internals.

    @abc.abstractmethod
    def _decode_scale(self, scales: Tensor) -> Tensor:
        """f32 [..., K/B]: SF."""

    def _round(self, x: Tensor, amax: Tensor, encode_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """(scale bytes [..., K/B], unpacked codes [..., K]) of checked FP32 x."""
        scales = self.round_scale(self.unrounded_scale(amax, encode_scale))
        return scales, self.round_with_scales(x, scales, encode_scale)

    def _input(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise FormatError(f"{self.name} quantizes floating tensors, got {x.dtype}")
        length = x.shape[-1] if x.ndim else 0
        if length == 0 or length % self.block_size:
            raise FormatError(
                f"{self.name}: last dimension {length} is not a positive multiple of the block size {self.block_size}"
            )
        return x.to(torch.float32)

    def _block_amax(self, x: Tensor) -> Tensor:
        blocks = x.detach().unflatten(-1, (-1, self.block_size))
        return blocks.abs().nan_to_num_(nan=0.0, posinf=math.inf).amax(-1)

    def _times_block(self, values: Tensor, factor: Tensor) -> Tensor:
        """[..., K] times [..., K/B], each factor over its block."""
        return (values.unflatten(-1, (-1, self.block_size)) * factor.unsqueeze(-1)).flatten(-2)

    @abc.abstractmethod
    def _resolve(self, amax: Tensor, encode_scale: EncodeScale) -> Tensor | None:
        """`resolve_encode_scale` from block maxima [..., K/B]."""

    def _own(self, blocks: QuantizedBlocks) -> None:
        if blocks.format != self.name:
            raise FormatError(f"blocks are {blocks.format!r}, not {self.name!r}")


_REGISTRY: dict[str, Format] = {}


def register(fmt: Format) -> Format:
    """Add a format to the registry.

    Raises:
        FormatError: the name is taken, or not in `names`.
    """
    element_bits(fmt.name)
    if fmt.name in _REGISTRY:
        raise FormatError(f"format {fmt.name!r} is registered already")
    _REGISTRY[fmt.name] = fmt
    return fmt


def list_formats() -> list[str]:
    """Names of all registered formats, in order of registration."""
    return list(_REGISTRY)


def get_format(name: str) -> Format:
    """Format of a name.

    Raises:
        FormatError: unknown name; the message gives the nearest valid one.
    """
    element_bits(name)
    return _REGISTRY[name]
