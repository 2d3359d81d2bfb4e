"""What a published number needs beside it: commit, versions, hardware, command line."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("tracefp4", "torch", "transformers", "numpy", "safetensors", "reasoning-gym", "math-verify")
MIB = 1 << 20


def provenance() -> dict[str, Any]:
    """Commit, versions, hardware and command line of this process; no dates, so equal runs say the same."""
    return {
        "command": command_line(),
        "commit": commit(),
        "hardware": {"cpu": cpu_model(), "cores": usable_cores(), "gpu": gpu_model()},
        "os": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """'commit 1a2b3c -> 4d5e6f, torch 2.12.0 -> 2.13.0': what ``provenance`` says otherwise now; '' if nothing.

    Only what can change a run's numbers: commit, versions, the processor and the device.
    """
    pairs = [("commit", _short(then.get("commit")), _short(now.get("commit")))]
    old, new = then.get("versions", {}), now.get("versions", {})
    pairs += [(name, old.get(name), new.get(name)) for name in new if name in old]
    pairs.append(("processor", then.get("hardware", {}).get("cpu"), now.get("hardware", {}).get("cpu")))
    if "device" in then and "device" in now:
        pairs.append(("device", then["device"], now["device"]))
    return ", ".join(f"{name} {a} -> {b}" for name, a, b in pairs if a != b)


def append_resume(facts: dict[str, Any], now: Mapping[str, Any], **more: Any) -> str:
    """Adds {**more, **now} to the "resumes" of a run's facts; returns what differs from the process before."""
    resumes = facts.setdefault("resumes", [])
    changed = differences([facts, *resumes][-1], now)
    resumes.append({**more, **now})
    return changed


def checkpoint_fingerprint(directory: Path, whole_up_to: int = 2 << 30) -> dict[str, Any]:
    """SHA-256 that names the weights of a Hugging Face directory: {"sha256", "kind", "bytes"}.

    Up to ``whole_up_to`` bytes it covers all content. Beyond, reading takes minutes: it then covers of each file its
    name, size, header and the first and last MiB of data, and "kind" says so.
    """
    files = sorted(directory.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    whole = total <= whole_up_to
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if whole:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
                continue
            header = 8 + int.from_bytes(stream.read(8), "little")
            stream.seek(0)
            digest.update(stream.read(min(size, header + MIB)))
            stream.seek(max(0, size - MIB))
            digest.update(stream.read())
    kind = "all bytes" if whole else "names, sizes, headers, first and last MiB"
    return {"sha256": digest.hexdigest(), "kind": kind, "bytes": total}


def command_line() -> str:
    """The command as a user would type it: the interpreter's path and the script's folder say nothing."""
    name = "tracefp4" if Path(sys.argv[0]).name == "__main__.py" else Path(sys.argv[0]).name
    return shlex.join([name, *sys.argv[1:]])


def commit() -> str | None:
    """The commit of the checkout this runs from, with "-dirty" if tracked files differ; None outside one.

    TRACEFP4_COMMIT, where set, says it instead: of a copy without its history, or with another's, as in an image.
    """
    if said := os.environ.get("TRACEFP4_COMMIT"):
        return said
    root = Path(__file__).resolve().parents[3]
    try:
        # An installed copy may lie inside some other project's checkout, whose commit says nothing about us.
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        if project == "tracefp4":
            head = _git(root, "rev-parse", "HEAD")
            return head + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, KeyError, tomllib.TOMLDecodeError, subprocess.SubprocessError):
        pass  # no checkout
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


def _short(commit: str | None) -> str | None:
    """The first 12 digits, with "-dirty" kept."""
    if commit is None:
        return None
    head, dash, dirty = commit.partition("-")
    return head[:12] + dash + dirty
