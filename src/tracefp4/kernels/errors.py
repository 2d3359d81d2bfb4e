"""What every kernel raises for operands it does not take."""

from __future__ import annotations

from tracefp4.errors import TracefpError


class KernelError(TracefpError, ValueError):
    """Shapes, dtypes or options that a kernel does not take."""
