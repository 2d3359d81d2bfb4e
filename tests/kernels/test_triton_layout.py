"""The look at compiled kernels: pairs of a row and results of one warp pass, everything else is refused by name."""

from types import SimpleNamespace

import pytest

from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.triton_layout import require_pairs

LAYOUTS = """
#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [2, 16], warpsPerCTA = [1, 1], order = [1, 0]}>
#tall = #ttg.blocked<{sizePerThread = [4, 1], threadsPerWarp = [2, 16], warpsPerCTA = [1, 1], order = [0, 1]}>
#row = #ttg.linear<{register = [[0, 1], [8, 0]], lane = [[0, 2], [0, 4], [1, 0]], warp = [], block = []}>
#column = #ttg.linear<{register = [[8, 0], [0, 1]], lane = [[0, 2], [0, 4], [1, 0]], warp = [], block = []}>
#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [1, 1], instrShape = [16, 8]}>
"""
FIRST = "#ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 2}>"
SECOND = "#ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = 2}>"


def compiled(ptx: str, encoding: str) -> SimpleNamespace:
    line = (
        f'    %1 = tt.elementwise_inline_asm "{ptx} $0, $1;" {{constraints = "=r,r", packed_element = 2 : i32, '
        f"pure = true}} %x, %y : tensor<64x8xi32, {encoding}>, tensor<64x8xi16, {encoding}> -> tensor<64x8xf16> loc(#1)"
    )
    return _Kernel(asm={"ttgir": LAYOUTS + line + "\n"})


class _Kernel(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("ptx", "encoding", "passes"),
    [
        ("and.b32", "#row", True),
        ("and.b32", FIRST, True),
        ("and.b32", "#blocked", True),
        ("and.b32", "#column", False),
        ("and.b32", "#tall", False),
        ("and.b32", SECOND, False),
        ("movmatrix.sync", "#mma", True),
        ("movmatrix.sync", "#row", False),
    ],
)
def test_only_layouts_that_the_ptx_means_pass(ptx: str, encoding: str, passes: bool) -> None:
    if passes:
        require_pairs(compiled(ptx, encoding))
    else:
        with pytest.raises(KernelError, match=r"Triton 3\.6"):
            require_pairs(compiled(ptx, encoding))


def test_the_interpreter_compiles_nothing() -> None:
    require_pairs(None)
