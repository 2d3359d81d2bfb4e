"""Device functions that turn cache words and scale bytes into FP16 operands of the tensor core.

E2M1 * E4M3 has at most six significant bits and is a multiple of 2^-10, so times 2^-14 it is a multiple of FP16's
smallest step, 2^-24, and at most 2^-2.6: every product is exact, and the factor costs nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

VALUE_EXPONENT = 14
"""Operands are E2M1 * SF * 2^-VALUE_EXPONENT."""


def _unpack_ptx() -> str:
    """Two neighbouring words, $8 and $9, and their pair of scales, $10 -> eight registers of FP16 pairs.

    A byte (`cache.PagedCache`) keeps code a's sign and magnitude where a FP16's upper byte has them, and code b's
    elsewhere. `b` gathers the latter of all four bytes at once: (x >> 3 within the magnitudes' mask) | x << 7.
    """
    body = ["{", ".reg .b32 b, t;"]
    for word in (0, 1):
        out = [f"mul.f16x2 ${4 * word + j}, t, $10;" for j in range(4)]
        mask = "and.b32 t, t, 0x8E008E00;"
        body += [f"and.b32 t, ${8 + word}, 0x8E008E00;", out[0]]
        body += [f"shl.b32 t, ${8 + word}, 8;", mask, out[1]]
        body += [f"shr.u32 b, ${8 + word}, 3;", f"shl.b32 t, ${8 + word}, 7;"]
        body += ["lop3.b32 b, b, 0x0E0E0E0E, t, 0xE2;"]  # (b & mask) | (t & ~mask)
        body += ["and.b32 t, b, 0x8E008E00;", out[2]]
        body += ["shl.b32 t, b, 8;", mask, out[3]]
    return "\n".join([*body, "}"])


# "&": outputs are written while inputs are still to be read.
_PTX = tl.constexpr(_unpack_ptx())
_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 3))
# Both elements of a register hold the same two bytes.
_PTX_SCALES = tl.constexpr("{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, a;}")


@triton.jit
def scales(pairs, A: tl.constexpr, B: tl.constexpr, ASM: tl.constexpr):
    """int16 [A, B/2], two E4M3 bytes in one -> all scales, FP16 [A, B].

    No `tl.join`: behind one Triton would give dots another operand layout.
    """
    x = tl.reshape(tl.broadcast_to(pairs[:, :, None], (A, B // 2, 2)), (A, B))
    if ASM:
        return tl.inline_asm_elementwise(_PTX_SCALES, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)
    else:
        byte = (x.to(tl.int32) >> (tl.arange(0, B) % 2 * 8)[None, :]) & 0xFF
        # A byte shifted by 7 is a FP16 worth SF * 2^-8, subnormal scales too.
        return (byte << 7).to(tl.uint16).to(tl.float16, bitcast=True) * 256.0


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
def unpack(words, scale, ASM: tl.constexpr):
    """int32 [A, B] words, FP16 [A, B] scales -> eight FP16 [A, B], value j of every unit; units are paired along B."""
    if ASM:
        return tl.inline_asm_elementwise(
            _PTX, _CONSTRAINTS, [words, scale],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        A: tl.constexpr = words.shape[0]
        B: tl.constexpr = words.shape[1]
        even, odd = tl.split(tl.reshape(words, (A, B // 2, 2)))
        return (
            _value(even, odd, scale, 0, A, B), _value(even, odd, scale, 1, A, B),
            _value(even, odd, scale, 2, A, B), _value(even, odd, scale, 3, A, B),
            _value(even, odd, scale, 4, A, B), _value(even, odd, scale, 5, A, B),
            _value(even, odd, scale, 6, A, B), _value(even, odd, scale, 7, A, B),
        )  # fmt: skip


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
