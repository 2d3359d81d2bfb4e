"""The paged cache as the GPU kernels read it, and its conversion from and to the slot layout of the CPU pool.

Legend: P pages of S slots each, G KV heads, D head_dim. A slot's number is page * S + place within the page.

Of one layer, with C = D/8 words or D/16 scales of a row:

    dense    k, v      [P, G, S, D]
    FP4      k         int32 [P, G, S, D/8]   eight codes a word      k_scales  uint8 [P, G, S, D/16]  E4M3 bytes
             v         int32 [P, G, D/8, S]                           v_scales  uint8 [P, G, D/16, S]

FP4 values lie transposed within their page because the second product sums over tokens: a thread reads the words of
neighbouring tokens in one load and need not exchange any.

A unit is eight values, two half words of four consecutive ones. Of V they are neighbours in a row; of K the half words
lie in neighbouring blocks: unit 4p + i is half word i of block 2p and half word i of block 2p + 1, so that two scales,
read as one, serve the whole unit. Two units are paired, K's neighbours in a row, V's in neighbouring tokens (2t and
2t + 1); the first word of a pair holds the first half word of both, the second word the second. So one word holds four
pairs of values, and the tensor core takes its operands in just such pairs.

Bits of a half word. Its upper byte holds values 0 and 2, its lower byte 1 and 3, the former of each (a) and the latter
(b) as: sign of a, magnitude of b, magnitude of a, sign of b. A FP16 keeps its sign in bit 15 and its lowest exponent
bits and first mantissa bit in bits 11, 10, 9; so does value 0 of a half word, and a mask makes a FP16 of it, worth
2^-14 times the E2M1 value, zero and 0.5 included (they are subnormal). Value 1 takes a shift more, 2 and 3 together
two shifts and a select.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.formats.e2m1 import pack_codes, unpack_codes
from tracefp4.kernels.errors import KernelError


def half_words(codes: Tensor) -> Tensor:
    """Packed E2M1 codes uint8 [..., D/2] (low nibble first) -> half words int32 [..., D/8, 2], of four codes each."""
    c = unpack_codes(codes).to(torch.int32).unflatten(-1, (-1, 2, 2, 2))  # unit, half, a or b, upper or lower byte
    a, b = c[..., 0, :], c[..., 1, :]
    byte = ((a & 8) << 4) | ((b & 7) << 4) | ((a & 7) << 1) | (b >> 3)
    return (byte[..., 0] << 8) | byte[..., 1]


def codes_from_half_words(halves: Tensor) -> Tensor:
    """Inverse of `half_words`: int32 [..., D/8, 2] -> uint8 [..., D/2]."""
    byte = torch.stack(((halves >> 8) & 0xFF, halves & 0xFF), dim=-1)
    a = ((byte >> 4) & 8) | ((byte >> 1) & 7)
    b = ((byte & 1) << 3) | ((byte >> 4) & 7)
    return pack_codes(torch.stack((a, b), dim=-2).flatten(-4).to(torch.uint8))


def _words(halves: Tensor) -> Tensor:
    """Half words int32 [..., 2] of two units in turn [..., 2 units, 2 halves] -> words [..., 2]: one of each half."""
    return halves[..., 0, :] | (halves[..., 1, :] << 16)


def _halves(words: Tensor) -> Tensor:
    return torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), dim=-2)


def k_words(codes: Tensor) -> Tensor:
    """Packed codes uint8 [..., D/2] -> words of K int32 [..., D/8]: units of a row are paired; D a multiple of 32."""
    blocks = half_words(codes).flatten(-2).unflatten(-1, (-1, 2, 4))
    units = blocks.transpose(-2, -1).flatten(-3, -2)
    return _words(units.unflatten(-2, (-1, 2))).flatten(-2)


def codes_from_k_words(words: Tensor) -> Tensor:
    units = _halves(words.unflatten(-1, (-1, 2))).flatten(-3, -2)
    blocks = units.unflatten(-2, (-1, 4)).transpose(-2, -1)
    return codes_from_half_words(blocks.flatten(-3).unflatten(-1, (-1, 2)))


def v_words(codes: Tensor) -> Tensor:
    """Packed codes uint8 [..., S, D/2] -> words of V int32 [..., S, D/8]: units of neighbouring tokens are paired."""
    halves = half_words(codes).unflatten(-3, (-1, 2)).transpose(-3, -2)  # ... S/2 D/8 2 2
    return _words(halves).transpose(-2, -1).flatten(-3, -2)


def codes_from_v_words(words: Tensor) -> Tensor:
    halves = _halves(words.unflatten(-2, (-1, 2)).transpose(-2, -1))
    return codes_from_half_words(halves.transpose(-3, -2).flatten(-4, -3))


def _paged(rows_NC: Tensor, heads: int, page_size: int, transposed: bool = False) -> Tensor:
    """[slots, G*C] -> contiguous [P, G, S, C], or [P, G, C, S]."""
    slots = rows_NC.shape[0]
    if slots % page_size:
        raise KernelError(f"{slots} slots are not a whole number of pages of {page_size}")
    x = rows_NC.reshape(slots // page_size, page_size, heads, -1)
    return x.permute(0, 2, 3, 1).contiguous() if transposed else x.transpose(1, 2).contiguous()


def _by_slot(pages: Tensor, transposed: bool = False) -> Tensor:
    """Inverse of `_paged`."""
    x = pages.permute(0, 3, 1, 2) if transposed else pages.transpose(1, 2)
    return x.flatten(2).flatten(0, 1)


@dataclass(frozen=True)
class PagedCache:
    """One layer's K and V, as the module's docstring lays them out; epilogues: 1/S of K and of V, 1.0 if dense.

    Raises KernelError for tensors that do not fit one another.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    k_epilogue: float = 1.0
    v_epilogue: float = 1.0

    def __post_init__(self) -> None:
        if self.k.ndim != 4 or self.k.shape[2] % 16:
            raise KernelError(
                f"k must be [pages, G, page size, width], the size a multiple of 16: {tuple(self.k.shape)}"
            )
        if self.fp4 != (self.k_scales is not None) or self.fp4 != (self.v_scales is not None):
            raise KernelError("int32 words come with scales, dense values without")
        p, g, s, c = self.k.shape
        expected = [("v", self.v, self.k.dtype, (p, g, c, s) if self.fp4 else (p, g, s, c))]
        if self.k_scales is not None and self.v_scales is not None:
            expected += [("k_scales", self.k_scales, torch.uint8, (p, g, s, c // 2))]
            expected += [("v_scales", self.v_scales, torch.uint8, (p, g, c // 2, s))]
        for name, tensor, dtype, shape in expected:
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise KernelError(f"{name} must be {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        if not all(t.is_contiguous() for t in self.tensors):
            raise KernelError("the tensors of a paged cache must be contiguous")

    @property
    def fp4(self) -> bool:
        return self.k.dtype == torch.int32

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.k, self.v, self.k_scales, self.v_scales) if t is not None]

    @property
    def heads(self) -> int:
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * (8 if self.fp4 else 1)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in this layer."""
        return sum(t.nbytes for t in self.tensors) // (self.k.shape[0] * self.page_size)

    @staticmethod
    def empty(
        pages: int, page_size: int, heads: int, head_dim: int, dtype: torch.dtype | str, device: torch.device | str
    ) -> PagedCache:
        """A zeroed layer; dtype: a floating dtype, or "nvfp4"."""
        if isinstance(dtype, torch.dtype):
            k, v = (torch.zeros(pages, heads, page_size, head_dim, dtype=dtype, device=device) for _ in range(2))
            return PagedCache(k, v)
        if dtype != "nvfp4" or head_dim % 32:
            raise KernelError(f"an FP4 cache is 'nvfp4' with head_dim a multiple of 32, got {dtype!r} and {head_dim}")
        words, scales = head_dim // 8, head_dim // 16
        return PagedCache(
            torch.zeros(pages, heads, page_size, words, dtype=torch.int32, device=device),
            torch.zeros(pages, heads, words, page_size, dtype=torch.int32, device=device),
            torch.zeros(pages, heads, page_size, scales, dtype=torch.uint8, device=device),
            torch.zeros(pages, heads, scales, page_size, dtype=torch.uint8, device=device),
        )

    @staticmethod
    def from_slots(
        rows: Tensor,
        scales: Tensor | None,
        heads: int,
        page_size: int,
        k_epilogue: float = 1.0,
        v_epilogue: float = 1.0,
    ) -> PagedCache:
        """From the CPU pool's layer: dense [2, slots, G*D], or codes uint8 [2, slots, G*D/2] and their scales."""
        if scales is None:
            return PagedCache(_paged(rows[0], heads, page_size), _paged(rows[1], heads, page_size))
        return PagedCache(
            _paged(k_words(rows[0]), heads, page_size),
            _paged(v_words(rows[1]), heads, page_size, transposed=True),
            _paged(scales[0], heads, page_size),
            _paged(scales[1], heads, page_size, transposed=True),
            k_epilogue,
            v_epilogue,
        )

    def to_slots(self) -> tuple[Tensor, Tensor | None]:
        """Inverse of `from_slots`: (rows, scales or None)."""
        if self.k_scales is None or self.v_scales is None:
            return torch.stack((_by_slot(self.k), _by_slot(self.v))), None
        codes = torch.stack(
            (codes_from_k_words(_by_slot(self.k)), codes_from_v_words(_by_slot(self.v, transposed=True)))
        )
        return codes, torch.stack((_by_slot(self.k_scales), _by_slot(self.v_scales, transposed=True)))
