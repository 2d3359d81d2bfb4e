"""Device functions shared by the kernels: E2M1 and E4M3 with the bits of `tracefp4.formats`.

Integer arithmetic and IEEE operations only, so that the interpreter, every GPU and the reference agree bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
IEEE = {"enable_fp_fusion": False}
"""Launch option: a product that flows into a sum is rounded on its own, as the reference rounds it."""
FLT_MAX = tl.constexpr(3.4028234663852886e38)
RECIPROCAL_6 = tl.constexpr(0.1666666716337204)  # 1/6 rounded to FP32


_dependent_launch = False


def use_dependent_launch(on: bool) -> None:
    """Whether kernels are launched before the one ahead of them has ended (SM90 and later); off, unless measured."""
    global _dependent_launch
    _dependent_launch = on


def following() -> dict[str, bool]:
    """Constants and options of a launch that `follow` belongs to."""
    return {"PDL": True, "launch_pdl": True} if _dependent_launch else {"PDL": False}


@triton.jit
def follow(PDL: tl.constexpr):
    """First in a kernel that was launched with `launch_pdl`: waits for all work before it, then lets the next begin."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def from_bf16(x):
    """BF16 -> f32 of the same value, subnormals and NaN included."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_f32(pointers, mask):
    """BF16, FP16 or FP32 -> f32 of the same value; 0 where masked."""
    x = tl.load(pointers, mask=mask, other=0.0)
    if x.dtype == tl.bfloat16:
        return from_bf16(x)
    else:
        return x.to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """acc + a b, BF16 or FP16 operands and FP32 sums; the interpreter, which takes BF16 for integers, gets FP32."""
    if INTERPRETED:
        if a.dtype == tl.bfloat16:
            return tl.dot(from_bf16(a), from_bf16(b), acc)
        else:
            return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def settled(acc):
    """acc, f32, unchanged; last in a turn of a loop whose dots take their first operand from registers.

    Hopper's tensor core reads such registers while the program goes on. Triton 3.6 lets the last dot of a turn run on
    into the next one, and the assembler it comes with (CUDA before 13.3) takes registers for free that the dot has yet
    to read: the next turn's operand then lands in this turn's product, where the tensor core is late (docs/LOG.md).
    An operation on the sum, though it does nothing, makes Triton wait for it here.
    """
    if INTERPRETED:
        return acc
    else:
        return tl.inline_asm_elementwise("// $0", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def to_bf16(x):
    """f32 -> BF16, nearest even; NaN stays NaN. The interpreter's own cast is spelled out in integers."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def encode_e2m1(z):
    """f32 -> int32 code 0..15: nearest, ties to even, saturating; NaN gives 7, the sign of zero is kept."""
    bits = z.to(tl.int32, bitcast=True)
    a = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 6.0)  # NaN becomes 6
    a_bits = a.to(tl.int32, bitcast=True)
    # Below 1 the step is 0.5, the last significand bit of this sum; from 1 on, bit 22 of the number itself.
    low = (a + 6291456.0).to(tl.int32, bitcast=True) & 3
    high = ((a_bits + 0x1FFFFF + ((a_bits >> 22) & 1)) >> 22) - 252
    m = tl.where(a_bits < 0x3F800000, low, high)
    return tl.where(z == z, m | ((bits >> 28) & 8), 7)


@triton.jit
def round_e2m1(z):
    """f32 -> the f32 value of `encode_e2m1`'s code, in fewer instructions; needs IEEE sums."""
    a = tl.where(tl.abs(z) < 6.0, tl.abs(z), 6.0)  # NaN becomes 6
    # The last significand bit of a sum with 1.5 * 2^22 times a's power of two, but at least 1, is the step there.
    power = (tl.maximum(a, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = power * 6291456.0
    value = ((a + magic) - magic).to(tl.int32, bitcast=True)
    sign = z.to(tl.int32, bitcast=True) & -2147483648
    return (value | tl.where(z == z, sign, 0)).to(tl.float32, bitcast=True)


@triton.jit
def code_of_e2m1(value):
    """The code of an f32 that is an E2M1 value: the inverse of `decode_e2m1`."""
    scaled = (value * 1.1754943508222875e-38).to(tl.int32, bitcast=True)  # 2^-126: see there
    return ((scaled >> 22) & 7) | ((scaled >> 28) & 8)


@triton.jit
def decode_e2m1(code):
    """int32 code 0..15 -> f32."""
    # As an FP32 the three magnitude bits at exponent and mantissa give value * 2^-126, zero and 0.5 included.
    magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    signed = magnitude.to(tl.int32, bitcast=True) | ((code & 8) << 28)
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(u):
    """f32, not negative and not NaN -> int32 byte: nearest even, saturating at 448 (0x7E), subnormals kept."""
    bits = u.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # The sum's last significand bit is worth 2^-9, E4M3's smallest step, so the addition rounds to nearest even.
    subnormal = (u + 24576.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(bits < 0x3C800000, subnormal, normal)  # below 2^-6
    return tl.where(bits >= 0x43E00000, 0x7E, code)  # from 448 on


@triton.jit
def decode_e4m3(byte):
    """int32 byte 0..0x7E -> f32."""
    return (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def encode_scale_of(amax, ENCODE_MAX: tl.constexpr, POW2: tl.constexpr):
    """S = ENCODE_MAX / amax, at most FLT_MAX; 1 where amax is 0 or Inf; POW2: rounded down to a power of two."""
    safe = tl.where(amax == 0.0, 1.0, amax)
    s = tl.minimum(tl.div_rn(tl.zeros_like(amax) + ENCODE_MAX, safe), FLT_MAX)
    s = tl.where((amax == 0.0) | (amax == float("inf")), 1.0, s)
    if POW2:
        s = (s.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return s


@triton.jit
def unrounded_scale(amax, s, EXACT: tl.constexpr):
    """Block scale before its rounding to E4M3, by the engine rule or the exact one."""
    if EXACT:
        return amax * (s * RECIPROCAL_6)
    else:
        return s * (amax * RECIPROCAL_6)


@triton.jit
def multiplier(byte, s, EXACT: tl.constexpr):
    """Factor on x before rounding to E2M1: 1 / (SF * (1/S)); both reciprocals divide once, correctly rounded."""
    one = tl.zeros_like(s) + 1.0
    effective = decode_e4m3(byte) * tl.div_rn(one, s)
    inverse = tl.div_rn(tl.zeros_like(effective) + 1.0, effective)
    if EXACT:
        return tl.minimum(inverse, FLT_MAX)
    else:
        return tl.where(byte == 0, 0.0, inverse)


@triton.jit
def block_amax(blocks):
    """f32 [..., B] -> f32 [...]: largest magnitude, NaN counting as 0."""
    m = tl.max(tl.abs(blocks), axis=-1)  # ignores NaN unless there is nothing else
    return tl.where(m == m, m, 0.0)
