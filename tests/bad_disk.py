"""A disk that refuses writes, for tests that run as root: permissions and small file systems need more.

In a test: ``from bad_disk import BadDisk``.
"""

from __future__ import annotations

import builtins
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from tracefp4.train import checkpoint


class BadDisk:
    """Refuses writes to paths that match a pattern, once ``skip`` of them have gone through, until ``mend``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pattern: re.Pattern[str] | None = None
        for module, name in ((builtins, "open"), (io, "open"), (os, "open")):
            monkeypatch.setattr(module, name, self._guarded_open(getattr(module, name)))
        for name, argument in (("mkdir", 0), ("replace", 1), ("rename", 1)):
            monkeypatch.setattr(os, name, self._guarded(getattr(os, name), argument))
        monkeypatch.setattr(checkpoint, "save_file", self._guarded_save(checkpoint.save_file))

    def fail(self, pattern: str, number: int, skip: int = 0) -> None:
        self.pattern, self.number, self.skip = re.compile(pattern), number, skip

    def mend(self) -> None:
        self.pattern = None

    def check(self, path: Any) -> None:
        if self.pattern is not None and isinstance(path, str | Path) and self.pattern.search(str(path)):
            self.skip -= 1
            if self.skip < 0:
                raise OSError(self.number, os.strerror(self.number), str(path))

    def _guarded(self, call: Callable[..., Any], argument: int) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.check(args[argument])
            return call(*args, **kwargs)

        return guarded

    def _guarded_open(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if mode & (os.O_WRONLY | os.O_RDWR) if isinstance(mode, int) else set(mode) & set("wax+"):
                self.check(file)
            return call(file, mode, *args, **kwargs)

        return guarded

    def _guarded_save(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(tensors: Any, path: Any) -> Any:
            try:
                self.check(path)
            except OSError as error:  # in the words of safetensors
                text = f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
                raise SafetensorError(text) from None
            return call(tensors, path)

        return guarded
