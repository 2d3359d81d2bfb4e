"""Number formats: what the bits mean. Plain torch, any device; frozen data behind a registry of names."""

from typing import TYPE_CHECKING

from tracefp4.lazy import on_first_use

if TYPE_CHECKING:
    from tracefp4.formats.api import *  # noqa: F403

__getattr__ = on_first_use(__name__)
