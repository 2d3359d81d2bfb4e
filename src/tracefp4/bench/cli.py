"""`tracefp4 bench {kernels, rollout, train}`: which suite runs; each reads its own options."""

from __future__ import annotations

import importlib
import importlib.util

from tracefp4.config import ConfigError, did_you_mean
from tracefp4.errors import TracefpError

SUITES = {
    "kernels": "single operations against their references and the device's measured limits",
    "rollout": "decoding a model with its cache in BF16 and in FP4",
    "train": "a training step in BF16, rounded to nearest, and guided",
}
HELP = "usage: tracefp4 bench SUITE [OPTION]...\n\n" + "\n".join(f"  {name:<9}{what}" for name, what in SUITES.items())
HELP += "\n\ntracefp4 bench SUITE --help shows a suite's options. No time is printed for what failed its check.\n"


def run(arguments: list[str]) -> int:
    """Runs a suite with the rest of the arguments; 0, or 1 where a check or a case failed.

    Raises ConfigError for an unknown suite, option or case.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        print(HELP, end="")
        return 0
    suite, *options = arguments
    if suite not in SUITES:
        raise ConfigError(f"unknown suite {suite!r} of tracefp4 bench{did_you_mean(suite, list(SUITES))}")
    name = f"tracefp4.bench.{suite}"
    if importlib.util.find_spec(name) is None:
        raise TracefpError(f"this version of tracefp4 has no suite {suite}")
    code: int = importlib.import_module(name).main(options)
    return code
