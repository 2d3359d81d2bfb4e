"""The names of all formats and the bits of their elements: what settings are checked against, without torch."""

from __future__ import annotations

import difflib

from tracefp4.errors import TracefpError

E8M0_MODES = ("floor", "even", "rceil", "ceil")

ELEMENT_BITS = {
    **dict.fromkeys(("nvfp4", "nvfp4-exact"), 4),
    **dict.fromkeys(("nvfp4-4over6", "nvfp4-4over6-mae", "nvfp4-4over6-448-mse", "nvfp4-4over6-448-mae"), 4),
    **{f"mxfp4-{mode}": 4 for mode in E8M0_MODES},
    **{f"mxfp8-{mode}": 8 for mode in E8M0_MODES},
}


class FormatError(TracefpError, ValueError):
    """A name, shape, dtype or encode scale that the format does not take."""


def element_bits(name: str) -> int:
    """Bits of an element: 4, or 8 in an MXFP8 format. Raises FormatError, with the nearest name, for an unknown one."""
    if name in ELEMENT_BITS:
        return ELEMENT_BITS[name]
    nearest = difflib.get_close_matches(str(name), ELEMENT_BITS, n=1, cutoff=0.0)
    raise FormatError(f"unknown format {name!r}; did you mean {nearest[0]!r}? Known: {', '.join(ELEMENT_BITS)}")
