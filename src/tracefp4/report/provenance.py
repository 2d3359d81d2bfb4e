"""What a published number needs beside it: commit, versions, hardware, command line."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """Commit, versions, hardware and command line of this process; no dates, so equal runs say the same."""
    return {
        "command": command_line(),
        "commit": commit(),
        "hardware": {"cpu": cpu_model(), "cores": usable_cores(), "gpu": gpu_model()},
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("tracefp4", "torch", "transformers")},
        },
    }


def command_line() -> str:
    """The command as a user would type it: the interpreter's path and the script's folder say nothing."""
    name = "tracefp4" if Path(sys.argv[0]).name == "__main__.py" else Path(sys.argv[0]).name
    return shlex.join([name, *sys.argv[1:]])


def commit() -> str | None:
    """The commit of the checkout this runs from, with "-dirty" if tracked files differ; None outside one."""
    root = Path(__file__).resolve().parents[3]
    try:
        # An installed copy may lie inside some other project's checkout, whose commit says nothing about us.
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        if project != "tracefp4":
            return None
        head = _git(root, "rev-parse", "HEAD")
        return head + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, KeyError, tomllib.TOMLDecodeError, subprocess.SubprocessError):
        return None


def usable_cores() -> int:
    """The cores this process may run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpu_model() -> str | None:
    """The first accelerator's name, or None."""
    import torch  # heavy, and most of this module does without

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
