"""The trainer's side of the sandbox: starts a launcher, reads bounded output, enforces the time limit."""

from __future__ import annotations

import fcntl
import json
import marshal
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from tracefp4.errors import TracefpError

Isolation = Literal["full", "weak"]
Status = Literal["ok", "error", "timeout", "memory", "output", "killed"]

_FOLDER = Path(__file__).parent
_SETUP_SECONDS = 60.0
_STOP_SECONDS = 0.2
_UNUSED_UIDS = (2_000_000_000, 2_000_000_000 + 2**22)  # launcher.UNUSED_UID plus any process id
# Sets and dicts of strings iterate in one order in every run; one malloc arena, as each reserves address space.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "MALLOC_ARENA_MAX": "1"}
_FLAGS = ["-P", "-s", "-S", "-B"]


class SandboxError(TracefpError):
    """The sandbox could not be set up or broke: nothing the program did, and no verdict on it."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one run may use.

    Fields:
        seconds: wall-clock time from the program's start; each process also gets as much CPU time plus a second.
        memory_mb: MiB of address space of each process, and of resident memory of all processes together. The sum
            is read every 20 ms: it can be overshot by what is written within that time.
        output_kb: KiB of standard output and standard error together.
        processes: processes and threads at one time, the first included.
        file_kb: KiB of files in the scratch folder, which lie in memory and count beside ``memory_mb``.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    output_kb: int = 1024
    processes: int = 16
    file_kb: int = 16384

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "output_kb", "processes", "file_kb"):
            if not getattr(self, name) > 0:
                raise TracefpError(f"the sandbox limit {name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class ProgramResult:
    """How a run ended.

    Fields:
        status: ``ok`` (exit code 0), ``error`` (another exit code), ``timeout``, ``memory`` (the limit of the sum, or
            an uncaught MemoryError), ``output`` (too much of it), ``killed`` (by a signal, e.g. a segfault).
        stdout, stderr: what was written, at most ``output_kb`` in all; bytes that are no UTF-8 become U+FFFD.
        seconds: wall-clock time from the program's start to the end of its last process.
        exit_code: of the program; minus the signal's number; None where a limit stopped it.
    """

    status: Status
    stdout: str
    stderr: str
    seconds: float
    exit_code: int | None


@dataclass(frozen=True)
class SandboxSupport:
    """What this machine cannot isolate: ``missing`` is empty where full isolation works."""

    missing: tuple[str, ...]

    @property
    def full(self) -> bool:
        return not self.missing


@lru_cache(maxsize=1)
def sandbox_support() -> SandboxSupport:
    """Tries it: every namespace alone, then a whole run. The answer is kept for the life of the process."""
    if not sys.platform.startswith("linux"):
        return SandboxSupport((f"Linux (this is {sys.platform})",))
    read, write = os.pipe()
    try:
        command = _launcher_command(f"launcher.probe({write})")
        done = subprocess.run(command, env={}, pass_fds=[write], capture_output=True, stdin=subprocess.DEVNULL)
    finally:
        os.close(write)
    with open(read, encoding="utf-8") as file:
        missing = file.read().splitlines()
    if not missing and done.returncode != 0:
        missing = [_last_line(done.stderr.decode(errors="replace"))]
    if not missing:
        try:
            result = run_program("print(6 * 7)")
            if (result.status, result.stdout) != ("ok", "42\n"):
                missing = [f"a working run (a first program ended with {result.status}: {_last_line(result.stderr)})"]
        except SandboxError as error:
            missing = [str(error)]
    return SandboxSupport(tuple(missing))


def require_sandbox(isolation: Isolation, key: str = "check.isolation") -> None:
    """TracefpError where ``isolation`` is full and this machine cannot do it, or weak and no program can run."""
    if isolation == "full" and not sandbox_support().full:
        raise TracefpError(
            f"programs cannot be isolated on this machine, which lacks: {', '.join(sandbox_support().missing)}; run "
            f'where namespaces are allowed, or accept programs that see this machine with {key} = "weak"'
        )
    if isolation == "weak":
        run_program("pass", isolation="weak")


def run_program(
    code: str,
    stdin: str = "",
    limits: SandboxLimits | None = None,
    isolation: Isolation = "full",
    stop: threading.Event | None = None,
) -> ProgramResult:
    """Runs ``code`` as a Python script of its own process, standard library only, with ``stdin`` on its input.

    Whatever the program does, every process of it is dead and its scratch folder is gone when this returns.
    ``stop`` ends it early, as a timeout, once another thread sets it.

    Raises:
        SandboxError: the sandbox could not be set up; see ``sandbox_support``.
    """
    files = {"/boot.py": _inner("boot.py"), "/main.py": code.encode("utf-8", errors="surrogatepass")}
    return _Run(files, ["/boot.py", "/main.py"], stdin, limits or SandboxLimits(), isolation, stop).result()


def run_tests(
    code: str,
    tests: list[str],
    limits: SandboxLimits | None = None,
    isolation: Isolation = "full",
    stop: threading.Event | None = None,
) -> tuple[ProgramResult, list[bool]]:
    """Runs pieces of test code, each a source text that fails by raising, against the program ``code``.

    The tests run in a process of their own; names that they do not define are looked up in the program's process,
    and only plain values come back from there (docs/checks.md lists what that excludes). A program that ends its
    process, replaces builtins or overrides ``__eq__`` therefore fails its tests.

    Returns:
        How the test process ended, and for each test whether it passed; all False unless the status is ``ok``.

    Raises:
        SandboxError: the sandbox could not be set up.
        TypeError: tests is no list of texts. Where it was let through, every test would fail as if by the program.
    """
    if isinstance(tests, str) or not all(isinstance(test, str) for test in tests):
        raise TypeError("tests must be a list of source texts; for an input and its output take run_program")
    files = {"/harness.py": _inner("harness.py"), "/main.py": code.encode("utf-8", errors="surrogatepass")}
    arguments = ["/harness.py", "tests", "/main.py"]
    run = _Run(files, arguments, json.dumps(tests), limits or SandboxLimits(), isolation, stop)
    result = run.result(verdict=True)
    passed = [False] * len(tests)
    if result.status == "ok":
        verdict = json.loads(run.verdict or b"null")
        if not isinstance(verdict, list) or len(verdict) != len(tests):
            raise SandboxError("the test harness of the sandbox gave no verdict")
        passed = [item is True for item in verdict]
    return result, passed


class _Run:
    """One run, from the launcher's start to its end."""

    def __init__(
        self,
        files: dict[str, bytes],
        arguments: list[str],
        stdin: str,
        limits: SandboxLimits,
        isolation: Isolation,
        stop: threading.Event | None,
    ) -> None:
        self.limits, self.stop, self.stdin = limits, stop, stdin.encode("utf-8", errors="replace")
        self.verdict: bytes | None = None
        python = _interpreter()
        self.spec: dict[str, Any] = {
            "files": files,
            "command": [python, *_FLAGS, *arguments],
            "environment": _ENVIRONMENT,
            "folders": _interpreter_folders(),
            "isolation": isolation,
            "root": _can_use_unused_uids(),
            "seconds": limits.seconds,
            "memory_mb": limits.memory_mb,
            "processes": limits.processes,
            "file_kb": limits.file_kb,
            "inodes": 1024,
            "parent": os.getpid(),
            "verdict_fd": None,
            "scratch": None,
        }

    def result(self, verdict: bool = False) -> ProgramResult:
        if self.spec["isolation"] == "weak":
            self.spec["scratch"] = tempfile.mkdtemp(prefix="tracefp4-program-")
        try:
            return self._run(verdict)
        finally:
            if self.spec["scratch"]:
                shutil.rmtree(self.spec["scratch"], ignore_errors=True)

    def _run(self, verdict: bool) -> ProgramResult:
        pipes = {"status": os.pipe()} | ({"verdict": os.pipe()} if verdict else {})
        if verdict:
            self.spec["verdict_fd"] = pipes["verdict"][1]
            self.spec["command"].append(str(pipes["verdict"][1]))
        spec_fd, stdin_fd = _sealed(marshal.dumps(self.spec)), _sealed(self.stdin)
        writes = [write for _, write in pipes.values()]
        try:
            launcher = subprocess.Popen(
                _launcher_command(f"launcher.main({spec_fd}, {writes[0]})"),
                env={},
                stdin=stdin_fd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[spec_fd, *writes],
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            for read, _ in pipes.values():
                os.close(read)
            raise SandboxError(f"the sandbox could not start a process: {error.strerror}") from None
        finally:
            for fd in (spec_fd, stdin_fd, *writes):
                os.close(fd)
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        reads = {name: read for name, (read, _) in pipes.items()}
        reads |= {"stdout": launcher.stdout.fileno(), "stderr": launcher.stderr.fileno()}
        reader = _Reader(launcher, reads, self.limits, self.stop)
        try:
            reader.read_all()
        finally:
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait()
            launcher.stdout.close()
            launcher.stderr.close()
            for read, _ in pipes.values():
                os.close(read)
        self.verdict = bytes(reader.data.get("verdict", b""))
        return reader.outcome()


@dataclass
class _Reader:
    """Reads all pipes of a run until every writer is gone, and stops the run where it crosses a limit."""

    launcher: subprocess.Popen[bytes]
    reads: dict[str, int]
    limits: SandboxLimits
    stop: threading.Event | None
    data: dict[str, bytearray] = field(default_factory=dict)
    stopped: Status | None = None
    started: float | None = None
    ended: float = 0.0

    def read_all(self) -> None:
        deadline = time.monotonic() + _SETUP_SECONDS
        self.data = {name: bytearray() for name in self.reads}
        with selectors.DefaultSelector() as selector:
            for name, fd in self.reads.items():
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ, name)
            while selector.get_map():
                wait = max(0.0, deadline - time.monotonic())
                for key, _ in selector.select(wait if self.stop is None else min(wait, _STOP_SECONDS)):
                    self._take(selector, key)
                if self.started is None and b"started\n" in self.data["status"]:
                    self.started = time.monotonic()
                    deadline = self.started + self.limits.seconds
                if self.stopped is None and self._output_bytes() > self.limits.output_kb * 1024:
                    deadline = self._kill("output")
                if self.stopped is None and self.started is not None and self.stop is not None and self.stop.is_set():
                    deadline = self._kill("timeout")
                if time.monotonic() >= deadline:
                    if self.started is None or self.stopped is not None:
                        raise SandboxError("the sandbox did not answer; is this machine out of memory or processes?")
                    deadline = self._kill("timeout")
        self.ended = time.monotonic()

    def _take(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        chunk = os.read(key.fd, 65536)
        if not chunk:
            selector.unregister(key.fd)
        elif self.stopped is None:
            self.data[key.data] += chunk

    def _output_bytes(self) -> int:
        return sum(len(data) for name, data in self.data.items() if name != "status")

    def _kill(self, status: Status) -> float:
        """Asks the launcher to kill everything; returns the time until which it may take."""
        self.stopped = status
        self.launcher.send_signal(signal.SIGTERM)
        return time.monotonic() + _SETUP_SECONDS

    def outcome(self) -> ProgramResult:
        lines = self.data["status"].decode(errors="replace").splitlines()
        stderr = self.data["stderr"].decode(errors="replace")
        failed = [line.removeprefix("fail ") for line in lines if line.startswith("fail ")]
        if failed or self.started is None:
            raise SandboxError(f"the sandbox could not be set up: {failed[0] if failed else _last_line(stderr)}")
        status, exit_code = self._status(lines, stderr)
        limit = self.limits.output_kb * 1024
        stdout = self.data["stdout"][:limit]
        stderr = self.data["stderr"][: limit - len(stdout)].decode(errors="replace")
        return ProgramResult(status, stdout.decode(errors="replace"), stderr, self.ended - self.started, exit_code)

    def _status(self, lines: list[str], stderr: str) -> tuple[Status, int | None]:
        if self.stopped is not None:
            return self.stopped, None
        if "memory" in lines:
            return "memory", None
        kind, _, number = lines[-1].partition(" ")
        if kind == "signal":
            timed_out = int(number) == signal.SIGXCPU
            return ("timeout" if timed_out else "killed"), -int(number)
        if kind != "exit":
            return "killed", None  # init itself was killed, e.g. for memory by the kernel
        if int(number) == 0:
            return "ok", 0
        return ("memory" if _last_line(stderr).startswith("MemoryError") else "error"), int(number)


# What does not change between runs


def _launcher_command(call: str) -> list[str]:
    # -E -s -S: nothing of the user's environment or site-packages; starts in a third of the time.
    code = f"import sys; sys.path.insert(0, {str(_FOLDER)!r}); import launcher; {call}"
    return [_interpreter(), "-E", "-s", "-S", "-c", code]


@lru_cache(maxsize=1)
def _interpreter() -> str:
    """The real path of the interpreter below a virtual environment, whose library lies in ``sys.base_prefix``."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@lru_cache(maxsize=1)
def _interpreter_folders() -> list[str]:
    """Where the interpreter's own files are, but for what the launcher binds anyway."""
    prefixes = dict.fromkeys(os.path.realpath(p) for p in (sys.base_prefix, sys.base_exec_prefix))
    return [prefix for prefix in prefixes if prefix not in ("/", "/usr", "/usr/local")]


@lru_cache
def _inner(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def _can_use_unused_uids() -> bool:
    """Whether this process is root over the user ids that runs get: not so in a rootless container."""
    if os.geteuid() != 0:
        return False
    ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= _UNUSED_UIDS[0] and _UNUSED_UIDS[1] <= first + count for first, _, count in ranges)


def _sealed(data: bytes) -> int:
    """A file in memory that holds ``data`` and that nobody can change any more."""
    fd = os.memfd_create("tracefp4", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no message"
