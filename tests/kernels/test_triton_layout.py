"""The look at compiled kernels: pairs of a row and results of one warp pass, everything else is refused by name."""

from types import SimpleNamespace

import pytest

from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.triton_layout import Checked, require_pairs, require_reductions, require_settled

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


REDUCED = """
#rows = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [2, 16], warpsPerCTA = [8, 1], order = [1, 0]}>
#near = #ttg.linear<{register = [], lane = [[4, 0], [0, 1], [0, 2], [2, 0], [1, 0]], warp = [[0, 4]], block = []}>
#far = #ttg.linear<{register = [], lane = [[0, 4], [2, 0], [4, 0], [0, 8], [0, 1]], warp = [[0, 0]], block = []}>
#cube = #ttg.linear<{register = [], lane = [[0, 1, 0], [0, 0, 1], [0, 2, 0], [1, 0, 0]], warp = [], block = []}>
"""
SUM = """
    %m = "tt.reduce"(%x) <{axis = AXIS : i32}> ({
    ^bb0(%a: f32 loc("a"), %b: f32 loc("b")):
      %c = arith.addf %a, %b : f32 loc(#loc)
      tt.reduce.return %c : f32 loc(#loc)
    }) : (tensor<TYPE>) -> tensor<8xf32, #ttg.slice<{dim = 1, parent = #rows}>> loc(#loc)
"""


def reducing(*sums: tuple[str, int]) -> SimpleNamespace:
    text = "".join(SUM.replace("TYPE", kind).replace("AXIS", str(axis)) for kind, axis in sums)
    return _Kernel(asm={"ttgir": REDUCED + text})


@pytest.mark.parametrize(
    ("kind", "axis", "passes"),
    [
        ("8x16xf32, #rows", 1, True),
        ("8x16xf32, #near", 0, False),
        ("8x16xf32, #near", 1, True),
        ("8x16xf32, #far", 0, True),
        ("8x16xf32, #far", 1, False),
        ("2x2xf32, #ttg.slice<{dim = 1, parent = #cube}>", 0, True),
        ("4x2xf32, #ttg.slice<{dim = 0, parent = #cube}>", 0, False),
        ("8x16xf32, #rows>, tensor<8x16xi32, #far", 1, False),
    ],
)
def test_only_sums_over_neighbouring_lanes_pass(kind: str, axis: int, passes: bool) -> None:
    """#far is what Triton 3.6 laid out and summed wrongly: lanes 0, 3 and 4 along the axis."""
    if passes:
        require_reductions(reducing(("8x16xf32, #rows", 1), (kind, axis)))
    else:
        with pytest.raises(KernelError, match=r"lanes that are not neighbours"):
            require_reductions(reducing(("8x16xf32, #rows", 1), (kind, axis)))


def test_a_checked_kernel_is_looked_at_when_it_is_launched() -> None:
    launched: list[object] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(*operands: int, **options: int) -> object:
                launched.append((grid, operands, options))
                return reducing(("8x16xf32, #far", options["axis"]))

            return launch

    kernel = Checked(Kernel())
    assert kernel[(3,)](1, 2, axis=0).asm
    with pytest.raises(KernelError, match="another number of warps"):
        kernel[(4,)](5, axis=1)
    assert launched == [((3,), (1, 2), {"axis": 0}), ((4,), (5,), {"axis": 1})]


DOT = (
    "      %N = ttng.warp_group_dot %a, %b, %c {inputPrecision = 0 : i32, isAsync = true} : FIRST * "
    "!ttg.memdesc<64x16xf16, #shared, #smem, mutable> -> tensor<128x16xf32, #mma> loc(#loc)\n"
)
REGISTERS, SHARED = "tensor<128x64xf16, #first>", "!ttg.memdesc<128x64xf16, #shared, #smem, mutable>"
WAIT = "      %w:2 = ttng.warp_group_dot_wait %N, %b {pendings = LEFT : i32} : tensor<128x16xf32, #mma> loc(#loc)\n"


def turning(*steps: str) -> SimpleNamespace:
    """A loop of dots ("registers", "shared") and waits for all but so many of them."""
    named = {"registers": DOT.replace("FIRST", REGISTERS), "shared": DOT.replace("FIRST", SHARED)}
    body = "".join(named.get(step) or WAIT.replace("LEFT", step) for step in steps)
    after = WAIT.replace("LEFT", "0")
    return _Kernel(asm={"ttgir": f"    %r = scf.for %i = %x to %y {{\n{body}      scf.yield %N : f32\n    }}\n{after}"})


@pytest.mark.parametrize(
    ("steps", "passes"),
    [
        (("registers", "0", "registers", "0"), True),
        (("registers", "0", "registers"), False),  # what Triton 3.6 makes of the experts' products
        (("registers", "registers", "0"), True),
        (("registers", "7"), False),
        (("shared", "1"), True),
        (("registers", "0", "shared"), True),
    ],
)
def test_only_loops_that_wait_for_dots_of_registers_pass(steps: tuple[str, ...], passes: bool) -> None:
    if passes:
        require_settled(turning(*steps))
    else:
        with pytest.raises(KernelError, match=r"128x64xf16.* run on"):
            require_settled(turning(*steps))


def test_the_interpreter_compiles_nothing() -> None:
    require_pairs(None)
    require_reductions(None)
    require_settled(None)
