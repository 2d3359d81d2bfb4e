"""Device functions that turn cache words and scale bytes into FP16 operands of the tensor core.

E2M1 * E4M3 has at most six significant bits and is a multiple of 2^-10, so times 2^-14 it is a multiple of FP16's
smallest step, 2^-24, and at most 2^-2.6: every product is exact, and the factor costs nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

VALUE_EXPONENT = 14
"""Operands are E2M1 * SF * 2^-VALUE_EXPONENT."""


def _unpack_ptx(one_token: bool) -> str:
    """Two paired words, $8 and $9, and $10, whose lower half is two scales -> eight registers of FP16 pairs.

    one_token: the scales are those of the words; else of the two units. A byte (`cache.PagedCache`) keeps code a's sign
    and magnitude where a FP16's upper byte has them, and code b's elsewhere. `b` gathers the latter of all four bytes
    at once: (x >> 3 within the magnitudes' mask) | x << 7.
    """
    body = ["{", ".reg .b32 b, t, s, s0, s1;", ".reg .b16 h, s_low, s_high;"]
    body += ["cvt.u16.u32 h, $10;", "cvt.rn.f16x2.e4m3x2 s, h;"]  # the lower byte's value lands in the lower half
    # Moves, not permutations: the assembler makes a choice of halves within the product of a repeated half.
    body += ["mov.b32 {s_low, s_high}, s;"]
    for word in (0, 1):
        half = ("s_low", "s_high")[word]
        body += [f"mov.b32 s{word}, {{{half}, {half}}};" if one_token else f"mov.b32 s{word}, s;"]
        out = [f"mul.f16x2 ${4 * word + j}, t, s{word};" for j in range(4)]
        mask = "and.b32 t, t, 0x8E008E00;"
        body += [f"and.b32 t, ${8 + word}, 0x8E008E00;", out[0]]
        body += [f"shl.b32 t, ${8 + word}, 8;", mask, out[1]]
        body += [f"shr.u32 b, ${8 + word}, 3;", f"shl.b32 t, ${8 + word}, 7;"]
        body += ["lop3.b32 b, b, 0x0E0E0E0E, t, 0xE2;"]  # (b & mask) | (t & ~mask)
        body += ["and.b32 t, b, 0x8E008E00;", out[2]]
        body += ["shl.b32 t, b, 8;", mask, out[3]]
    return "\n".join([*body, "}"])


# "&": outputs are written while inputs are still to be read.
_PTX_BLOCKS = tl.constexpr(_unpack_ptx(True))
_PTX_TOKENS = tl.constexpr(_unpack_ptx(False))
_CONSTRAINTS_TOKENS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 3))
_CONSTRAINTS_BLOCKS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))  # $11: the same scales again


@triton.jit
def _scale(byte):
    """int16 E4M3 byte -> FP16: shifted by 7 it is a FP16 worth SF * 2^-8, subnormal scales too."""
    return ((byte & 0xFF) << 7).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _value(even, odd, scale, J: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Value J of every unit, from the even and odd words int32 [A, B/2]; FP16 [A, B]. The plain form of the PTX."""
    word = even if J < 4 else odd
    x = tl.join(word & 0xFFFF, (word >> 16) & 0xFFFF)
    x = tl.reshape(x, (A, B))
    if J % 2 == 1:
        x = x << 8
    if J % 4 >= 2:
        x = ((x >> 3) & 0x0E00) | ((x << 7) & 0x8000)
    return (x & 0x8E00).to(tl.uint16).to(tl.float16, bitcast=True) * scale


@triton.jit
def unpack(words, pairs, TOKENS: tl.constexpr, ASM: tl.constexpr):
    """int32 [A, B] words, int16 [A, B] pairs of scale bytes -> eight FP16 [A, B], value j of every unit.

    Units are paired along B; both places of a pair hold the same two scales: the even and the odd unit's if TOKENS,
    else those of values 0 to 3 and of 4 to 7. The PTX takes two neighbours along B at a time, which is what a thread
    holds side by side of an operand of the tensor core. Loads and views alone may lead to `words` and `pairs`, no
    index and no `tl.join`: else Triton unpacks elsewhere and carries eight operands through shared memory.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            _PTX_TOKENS if TOKENS else _PTX_BLOCKS, _CONSTRAINTS_TOKENS if TOKENS else _CONSTRAINTS_BLOCKS,
            [words, pairs if TOKENS else pairs.to(tl.int32)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        A: tl.constexpr = words.shape[0]
        B: tl.constexpr = words.shape[1]
        even, odd = tl.split(tl.reshape(words, (A, B // 2, 2)))
        if TOKENS:
            s0 = _scale(tl.where((tl.arange(0, B) % 2 == 0)[None, :], pairs, pairs >> 8))
            s1 = s0
        else:
            s0, s1 = _scale(pairs), _scale(pairs >> 8)
        return (
            _value(even, odd, s0, 0, A, B), _value(even, odd, s0, 1, A, B),
            _value(even, odd, s0, 2, A, B), _value(even, odd, s0, 3, A, B),
            _value(even, odd, s1, 4, A, B), _value(even, odd, s1, 5, A, B),
            _value(even, odd, s1, 6, A, B), _value(even, odd, s1, 7, A, B),
        )  # fmt: skip


@triton.jit
def block_scales(pairs, A: tl.constexpr, B: tl.constexpr, SPREAD: tl.constexpr):
    """int16 [A, B/4], the scales of two blocks in one -> [A, B] beside K's words, or beside their `spread_columns`."""
    if SPREAD:
        x = tl.reshape(pairs, (A, B // 16, 4))[:, :, None, :, None]
        x = tl.broadcast_to(x, (A, B // 16, 2, 4, 2))
    else:
        x = tl.broadcast_to(pairs[:, :, None], (A, B // 4, 4))
    return tl.reshape(x, (A, B))


@triton.jit
def token_scales(pairs, A: tl.constexpr, B: tl.constexpr, SPREAD: tl.constexpr):
    """int16 [A/2, B/2], a block's scales of two tokens in one -> [A, B] beside V's words, two rows a block.

    SPREAD: beside their `spread_columns` of `block_rows`.
    """
    if SPREAD:
        pairs = tl.permute(tl.reshape(pairs, (A // 2, B // 16, 4, 2)), (0, 1, 3, 2))
        pairs = tl.reshape(pairs, (A // 2, B // 2))
    x = tl.reshape(tl.broadcast_to(pairs[:, :, None], (A // 2, B // 2, 2)), (A // 2, B))
    if SPREAD:
        return tl.reshape(tl.broadcast_to(tl.reshape(x, (A // 16, 1, 8, B)), (A // 16, 2, 8, B)), (A, B))
    return tl.reshape(tl.broadcast_to(x[:, None, :], (A // 2, 2, B)), (A, B))


@triton.jit
def spread(i):
    """Place in memory of tensor core row or column i: bits e, c1 c0, h of i mod 16 = h c1 c0 e become c1 c0 h e.

    A thread of the tensor core holds 2c, 2c + 1, 2c + 8, 2c + 9 of 16; in memory they are neighbours, 16 bytes.
    """
    return (i & ~15) | ((i & 6) << 1) | ((i & 8) >> 2) | (i & 1)


@triton.jit
def spread_columns(x, A: tl.constexpr, B: tl.constexpr):
    """[A, B] -> [A, B] whose column i is column spread(i) of x."""
    x = tl.permute(tl.reshape(x, (A, B // 16, 4, 2, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(x, (A, B))


@triton.jit
def spread_rows(x, A: tl.constexpr, B: tl.constexpr):
    """[A, B] -> [A, B] whose row i is row spread(i) of x."""
    x = tl.permute(tl.reshape(x, (A // 16, 4, 2, 2, B)), (0, 2, 1, 3, 4))
    return tl.reshape(x, (A, B))


@triton.jit
def block_rows(x, A: tl.constexpr, B: tl.constexpr):
    """[A, B] -> [A, B] whose rows g and g + 8 of 16 are rows 2g and 2g + 1 of x.

    A thread of the tensor core has rows g and g + 8: of V's words now two of one block, which share their scales.
    """
    return tl.reshape(tl.permute(tl.reshape(x, (A // 16, 8, 2, B)), (0, 2, 1, 3)), (A, B))
