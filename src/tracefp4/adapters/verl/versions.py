"""Which verl this adapter runs under. Its seams are internals of verl, so other versions are refused by name."""

from __future__ import annotations

import re

from tracefp4.errors import TracefpError

OLDEST, BELOW = (0, 9, 1), (0, 10, 0)
TESTED = "verl 0.9.1"
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)(.*)")


def check_verl_version(version: str) -> None:
    """Raises TracefpError unless ``version`` is a release from OLDEST up to but excluding BELOW."""
    match = _RELEASE.fullmatch(version.strip())
    release = tuple(int(part) for part in match.groups()[:3]) if match else None
    if match is None or release is None or match[4].partition("+")[0] or not OLDEST <= release < BELOW:
        raise TracefpError(
            f"tracefp4.adapters.verl supports releases of verl from {_dotted(OLDEST)} up to, not including, "
            f"{_dotted(BELOW)} (tested: {TESTED}), and verl {version} is installed; install verl==0.9.1"
        )


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
