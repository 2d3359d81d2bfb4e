"""A look at what Triton compiled, once for every compiled kernel: one that would compute nonsense is refused instead.

PTX that takes two elements at a time means two certain ones; which two the compiler hands it follows from the layout
that it chose, and Triton promises none. And Triton 3.6 sums over wrong lanes where a reduced axis is spread over lanes
that are not neighbours (docs/LOG.md): it exchanges values over as many lanes in a row, whichever those are. And it lets
a dot of Hopper's tensor core, where its first operand is in registers, run on into a loop's next turn, which writes
those registers anew (`triton_math.settled`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from tracefp4.kernels.errors import KernelError

_OPERATION = re.compile(
    r'elementwise_inline_asm "(?P<ptx>[^"]*)".*?packed_element = 2 .*? : tensor<(?P<type>.*)$', re.M
)
_REDUCTION = re.compile(r'"tt\.reduce"\(.*?\) <\{axis = (?P<axis>\d+) : i32\}> .*?\}\) : \((?P<types>[^)]*)\) ->', re.S)
_LINEAR = re.compile(r"#ttg\.linear<\{.*?lane = \[(?P<lanes>.*?)\], warp = ")
_SLICE = re.compile(r"#ttg\.slice<\{dim = (?P<dim>\d+), parent = (?P<parent>#\w+|#ttg\..*\}>)\}>$")
_NAMED = re.compile(r"^(#\w+) = (#ttg\..*)$", re.M)
_ENCODING = re.compile(r", (#ttg\.\w+<\{.*?\}>|#\w+)>")
# Two neighbours of a row lie side by side in a thread: as a first operand, or in a layout whose lowest bit is theirs.
_ROW_PAIRS = re.compile(
    r"#ttg\.dot_op<\{opIdx = 0, parent = #\w+, kWidth = [248]\}>"
    r"|#ttg\.linear<\{register = \[\[0, 1\]"
    r"|#ttg\.blocked<\{sizePerThread = \[1, [2-9]\d*\].* order = \[1, 0\]"
)
# One warp's results of a product, 16 x 8 at a time, rows of 8 x 8 as `movmatrix` has them.
_RESULT = re.compile(r"#ttg\.nvidia_mma<\{versionMajor = 2, .*warpsPerCTA = \[1, 1\], instrShape = \[16, 8\]")

# A dot of a warp group whose first operand is in registers, a wait for all dots, and where a turn of a loop ends.
_DOTS = re.compile(
    r" = ttng\.warp_group_dot %[^\n]*?\} : tensor<(?P<operand>[^ ,]*)"
    r"| = ttng\.warp_group_dot_wait [^\n]*\{pendings = 0 : i32\}"
    r"|^ *scf\.(?P<turn>yield)\b",
    re.M,
)


@cache
def require_pairs(kernel: Any) -> None:
    """Raises KernelError if a compiled kernel's PTX takes other pairs than it means; None (interpreter) passes."""
    if kernel is None:
        return
    text = kernel.asm["ttgir"]
    named = dict(_NAMED.findall(text))
    for operation in _OPERATION.finditer(text):
        found = _ENCODING.search(operation["type"])
        encoding = "" if found is None else str(named.get(found[1], found[1]))
        wanted = _RESULT if operation["ptx"].startswith("movmatrix") else _ROW_PAIRS
        if not wanted.match(encoding):
            raise KernelError(
                f"this version of Triton lays operands out as the kernel's PTX does not expect them ({encoding}); "
                "choose backend 'torch', or Triton 3.6"
            )


@cache
def require_reductions(kernel: Any) -> None:
    """Raises KernelError if a compiled kernel reduces over lanes that are not neighbours; None (interpreter) passes."""
    if kernel is None:
        return
    text = kernel.asm["ttgir"]
    named = dict(_NAMED.findall(text))
    for reduction in _REDUCTION.finditer(text):
        for operand in re.findall(r"tensor<[^#]*, (#.*?)>(?=, tensor|$)", reduction["types"]):
            moved = [steps[int(reduction["axis"])] != 0 for steps in _lanes(operand, named)]
            if True in moved:
                first, last = moved.index(True), len(moved) - moved[::-1].index(True)
                if not all(moved[first:last]):
                    raise KernelError(
                        f"this version of Triton reduces over lanes that are not neighbours ({operand}), which it gets "
                        "wrong; choose backend 'torch', or another number of warps"
                    )


@cache
def require_settled(kernel: Any) -> None:
    """Raises KernelError if a dot that reads registers may still read them in a loop's next turn; None (interpreter)
    passes."""
    if kernel is None:
        return
    running = ""
    for found in _DOTS.finditer(kernel.asm["ttgir"]):
        if found["operand"]:
            running = found["operand"]
        elif found["turn"] and running:
            raise KernelError(
                f"this version of Triton has a dot of registers ({running}) run on while the next turn of its loop "
                "writes them; choose backend 'torch'"
            )
        elif not found["turn"]:
            running = ""


def _lanes(encoding: str, named: dict[str, str]) -> list[list[int]]:
    """How each bit of the lane moves along the dimensions, of a linear layout or a slice of one; [] of another layout,
    whose lanes along a dimension are neighbours."""
    encoding = named.get(encoding, encoding)
    if (linear := _LINEAR.match(encoding)) is not None:
        return [[int(step) for step in lane.split(",")] for lane in re.findall(r"\[([^\]]*)\]", linear["lanes"])]
    if (part := _SLICE.match(encoding)) is not None:
        dim = int(part["dim"])
        return [steps[:dim] + steps[dim + 1 :] for steps in _lanes(part["parent"], named)]
    return []


class Checked:
    """Decorates a kernel that is launched: what was compiled for a launch is looked at by ``require_reductions`` and
    ``require_settled``."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """The launch, which returns the compiled kernel, as Triton's does."""
        launch = self.function[grid]

        def run(*operands: Any, **options: Any) -> Any:
            kernel = launch(*operands, **options)
            require_reductions(kernel)
            require_settled(kernel)
            return kernel

        return run
