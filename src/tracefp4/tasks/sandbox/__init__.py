"""Runs a program that nobody has read, such as a policy's answer, and keeps it from doing harm.

``run_program`` runs Python source as a script with text on its standard input. ``run_tests`` runs it beside test
code in two processes, so that the program cannot fake the verdict. ``sandbox_support`` says whether this machine
can isolate programs; without that nothing runs unless weak isolation is asked for by name.

What is isolated and how: ``launcher.py`` (namespaces, root file system, limits), ``seccomp.py`` (system calls),
``harness.py`` (tests against the program). The threat model is in docs/checks.md.

A run costs two starts of Python, or three with test code: on two busy cores of an Intel Xeon (load 3.5), where a bare
start takes 13 ms, the median run took 83 ms, the fastest 40; with test code 159 ms and 79.
"""

from tracefp4.tasks.sandbox.run import (
    ProgramResult,
    SandboxError,
    SandboxLimits,
    SandboxSupport,
    require_sandbox,
    run_program,
    run_tests,
    sandbox_support,
)

__all__ = [
    "ProgramResult",
    "SandboxError",
    "SandboxLimits",
    "SandboxSupport",
    "require_sandbox",
    "run_program",
    "run_tests",
    "sandbox_support",
]
