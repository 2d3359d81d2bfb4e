"""A look at what Triton compiled: PTX that takes two elements at a time means two certain ones.

Which two the compiler hands it follows from the layout that it chose, and Triton promises none. So every compiled
kernel is looked at once, and one with another layout is refused instead of computing nonsense.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from tracefp4.kernels.errors import KernelError

_OPERATION = re.compile(
    r'elementwise_inline_asm "(?P<ptx>[^"]*)".*?packed_element = 2 .*? : tensor<(?P<type>.*)$', re.M
)
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
