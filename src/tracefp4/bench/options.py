"""Options that all suites share, and refusals of one sentence that name the nearest option or case."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import torch

from tracefp4.config import ConfigError, did_you_mean
from tracefp4.device import resolve_device
from tracefp4.errors import TracefpError


class BenchParser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would exit."""

    def parse_args(self, args: list[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        found, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            name = word.partition("=")[0]
            known = [s for action in self._actions for s in action.option_strings if s.startswith("--")]
            raise ConfigError(f"{self.prog} has no option {name}{did_you_mean(name, known)}")
        return found

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def bench_parser(suite: str, description: str) -> BenchParser:
    """The parser of a suite with the options that all have."""
    parser = BenchParser(prog=f"tracefp4 bench {suite}", description=description, allow_abbrev=False)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for results.json and results.md")
    parser.add_argument("--seconds", type=float, default=480, help="no case or round is begun after this long")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--check-only", action="store_true", help="no timing")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/benchmarks.md has it")
    parser.add_argument("--commit", help="commit to write into the results, where there is no git checkout")
    return parser


def bench_device(name: str) -> torch.device:
    """The device of --device. Raises ConfigError for a word that is none, TracefpError where there is no GPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {name} is no device{did_you_mean(name, ['auto', 'cpu', 'cuda'])}")
    return torch.device(resolve_device(name, "--device"))


def refuse_unmatched(only: str, names: Iterable[str]) -> ConfigError:
    """The error for an --only that matches no case."""
    words = sorted({part.strip() for name in names for part in (name, *name.split(","))})
    return ConfigError(f"no case matches --only {only}{did_you_mean(only, words)}")


def run_module(main: Callable[[], int]) -> NoReturn:
    """Runs a suite as `python -m`: a user's error is one sentence and exit code 2, as under `tracefp4 bench`."""
    try:
        code = main()
    except TracefpError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
