"""Which Megatron-core the layers here stand on: they override stages of its classes, so others are refused by name."""

from __future__ import annotations

import re

from tracefp4.errors import TracefpError

OLDEST, BELOW = (0, 18, 0), (0, 19, 0)
TESTED = "megatron-core 0.18.0"
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def check_megatron_version(version: str) -> None:
    """Raises TracefpError unless ``version`` is from OLDEST up to but excluding BELOW; a commit's suffix is fine."""
    match = _RELEASE.match(version.strip())
    release = tuple(int(part) for part in match.groups()) if match else None
    if release is None or not OLDEST <= release < BELOW:
        raise TracefpError(
            f"tracefp4.adapters.megatron supports megatron-core from {_dotted(OLDEST)} up to, not including, "
            f"{_dotted(BELOW)} (tested: {TESTED}), and {version} is installed; install megatron-core==0.18.0"
        )


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
