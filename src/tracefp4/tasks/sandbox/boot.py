"""Runs inside the sandbox, before a script: ``__main__`` as Python would have it, with ``site``'s exit and quit."""

from __future__ import annotations

import builtins
import sys


def _run(path: str) -> None:
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.argv = [path]
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    names = sys.modules["__main__"].__dict__
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    names["__file__"], names["__doc__"] = path, None
    exec(code, names)


_run(sys.argv[1])
