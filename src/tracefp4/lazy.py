"""Packages whose names are imported on first use (PEP 562).

Reading a recipe needs the settings of every part and none of its code; torch and transformers take seconds that a
misspelt key, `--help` or a list of methods should not cost. In the package's ``__init__``:

    if TYPE_CHECKING:
        from tracefp4.loop.api import *
    __getattr__ = on_first_use(__name__)

Its module ``api`` imports what the package exports, all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def on_first_use(package: str) -> Callable[[str], Any]:
    """The package's ``__getattr__``."""

    def get(name: str) -> Any:
        if not name.startswith("__") or name == "__all__":  # Python and tools ask any module for others of these
            api = import_module(f"{package}.api")
            if hasattr(api, name):
                return getattr(api, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
