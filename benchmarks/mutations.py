"""Removes the handling of one event after another and checks that the tests named for it fail.

python benchmarks/mutations.py [--only WORD]

The mutations are in mutations.toml; each is applied to a copy of src, whose tests pass before. Exit code 1 where one
survives, where its text is not in its file exactly once, or where pytest ends otherwise than by a failed test: a test
that is gone kills nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS_FAILED = 1  # pytest's exit code; 2 and more are errors of collection and use


@dataclass(frozen=True)
class Mutation:
    """event: a row of the table of events; removes: the handling in words; tests: ids of which one has to fail."""

    event: str
    removes: str
    file: str
    old: str
    new: str
    tests: list[str]

    @property
    def name(self) -> str:
        return f"{self.event}: {self.removes}"

    def apply(self, src: Path) -> None:
        """Raises ValueError where the text is not in the file exactly once."""
        target = src / "tracefp4" / self.file
        text = target.read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"its text is in {self.file} {found} times")
        target.write_text(text.replace(self.old, self.new))


def run_tests(tests: list[str], mutation: Mutation | None = None) -> tuple[int, str]:
    """pytest's exit code and output over a copy of src, mutated or as it is. Raises ValueError as ``apply`` does."""
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder, "src")
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            mutation.apply(src)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{t}" for t in tests)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(src)},
            capture_output=True,
            text=True,
        )
    return run.returncode, (run.stdout + run.stderr)[-2000:]


def outcome(mutation: Mutation) -> str:
    """ "killed", or "SURVIVED" with the reason."""
    try:
        code, output = run_tests(mutation.tests, mutation)
    except ValueError as error:
        return f"SURVIVED: {error}"
    if code == TESTS_FAILED:
        return "killed"
    return "SURVIVED" if code == 0 else f"SURVIVED: pytest ended with {code}\n{output}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the mutations whose name contains this")
    only = parser.parse_args().only
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutation"]
    chosen = [m for m in (Mutation(**row) for row in table) if only in m.name]
    if not chosen:
        parser.error(f"no mutation has {only!r} in its name")
    code, output = run_tests(sorted({t for m in chosen for t in m.tests}))
    if code != 0:
        print(f"the tests fail without any mutation:\n{output}")
        return 1
    killed = 0
    for mutation in chosen:
        result = outcome(mutation)
        killed += result == "killed"
        print(f"{mutation.name:<56} {result}", flush=True)
    print(f"{killed} of {len(chosen)} killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
