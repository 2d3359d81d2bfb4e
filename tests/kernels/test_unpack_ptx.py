"""The PTX that unpacks FP4 words, run line by line in numpy: every code in every place, every scale byte.

The interpreter takes the plain form instead, and a GPU is not at hand everywhere; this reads what a GPU would be given.
"""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tracefp4.formats.e2m1 import pack_codes
from tracefp4.kernels.paged_attention.cache import k_words, v_words

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")

U32 = np.uint32
Registers = dict[str, np.ndarray]


def halves(x: np.ndarray) -> np.ndarray:
    """uint32 [N] -> FP16 [N, 2], the lower half first."""
    return np.stack((x & U32(0xFFFF), x >> U32(16)), axis=-1).astype(np.uint16).view(np.float16)


def joined(x: np.ndarray) -> np.ndarray:
    """FP16 or uint16 [N, 2] -> uint32 [N]."""
    bits = x.view(np.uint16).astype(U32)
    return bits[:, 0] | bits[:, 1] << U32(16)


def e4m3(x: np.ndarray) -> np.ndarray:
    """Two bytes of the lower half -> FP16 pairs."""
    pair = np.stack((x & U32(0xFF), x >> U32(8) & U32(0xFF)), axis=-1).astype(np.uint8)
    return joined(torch.from_numpy(pair).view(torch.float8_e4m3fn).half().numpy())


def lut(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Bit i of the table is the result where bits of a, b, c are those of i, a's the highest."""
    found = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "cvt.u16.u32": lambda a: a & U32(0xFFFF),
    "cvt.rn.f16x2.e4m3x2": e4m3,
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "lop3.b32": lambda a, b, c, table: lut(a, b, c, int(table)),
    "mul.f16x2": lambda a, b: joined(halves(a) * halves(b)),
}


def run(ptx: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Registers $0 to $7 after the block, of operands $8 and on."""
    known: Registers = {f"${8 + i}": x for i, x in enumerate(inputs)}

    def value(name: str) -> np.ndarray:
        if name.startswith("{"):
            low, high = (known[part.strip()] for part in name.strip("{}").split(","))
            return low | high << U32(16)
        return np.asarray(int(name, 0), U32) if name[0].isdigit() else known[name]

    for statement in ptx.strip().removeprefix("{").removesuffix("}").split(";"):
        text = statement.strip()
        if not text or text.startswith(".reg"):
            continue
        operation, rest = text.split(None, 1)
        target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        result = OPERATIONS[operation](*map(value, sources))
        if target.startswith("{"):
            low, high = (part.strip() for part in target.strip("{}").split(","))
            known[low], known[high] = result & U32(0xFFFF), result >> U32(16)
        else:
            known[target] = result
    return [known[f"${i}"] for i in range(8)]


@pytest.mark.parametrize("tokens", [True, False], ids=["V", "K"])
def test_every_code_and_scale_in_every_place(tokens: bool) -> None:
    """Equal bits: E2M1 * SF * 2^-14 of both units of a pair, value by value."""
    from tracefp4.kernels.triton_unpack import VALUE_EXPONENT, _unpack_ptx

    N, bytes_ = 16 * 127, np.arange(127)
    g = torch.Generator().manual_seed(0)
    # Codes of a pair of units: of one row's two blocks (K: unit 4p and its neighbour), or of two tokens (V).
    codes = torch.randint(0, 16, (N, 2, 32), generator=g, dtype=torch.uint8)
    packed = pack_codes(codes)
    words = v_words(packed) if tokens else k_words(packed)
    first, second = (words[:, 0, 0], words[:, 1, 0]) if tokens else (words[:, 0, 0], words[:, 0, 1])
    low, high = bytes_[np.arange(N) % 127], bytes_[np.arange(N) // 16]
    pair = (low | high << 8).astype(U32)
    found = run(_unpack_ptx(not tokens), [first.numpy().view(U32), second.numpy().view(U32), pair, pair])
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate((magnitude, -magnitude)) * 2.0**-VALUE_EXPONENT
    sf = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    c = codes.numpy()
    for j in range(8):
        if tokens:  # value j of a row's first unit, of the even and of the odd token
            want = np.stack((table[c[:, 0, j]] * sf[low], table[c[:, 1, j]] * sf[high]), axis=-1)
        else:  # values 4p + j of block 0 below 4, of block 1 from 4 on; of units p = 0 and 1
            at = [j % 4 + 16 * (j // 4) + 4 * unit for unit in (0, 1)]
            want = np.stack([table[c[:, 0, i]] for i in at], axis=-1) * (sf[high] if j >= 4 else sf[low])[:, None]
        assert np.array_equal(joined(want.astype(np.float16)), found[j]), j
