"""Checks: what turns a response into a reward. See docs/checks.md for the kinds and their keys."""

from __future__ import annotations

from tracefp4.tasks.checks.base import Check, CheckError
from tracefp4.tasks.checks.config import CheckConfig

__all__ = ["Check", "CheckConfig", "CheckError", "make_check"]


def make_check(config: CheckConfig) -> Check:
    """The check that ``config.kind`` names, started: its workers run and a user's function is imported.

    Raises:
        TracefpError: the check cannot start here: a function that cannot be imported, a pattern that does not
            compile, a machine that cannot isolate programs.
    """
    # Imported by need: a rule on the last line should not wait for the sandbox or for workers.
    if config.kind == "exact":
        from tracefp4.tasks.checks.exact import ExactCheck

        return ExactCheck(config)
    if config.kind == "numeric":
        from tracefp4.tasks.checks.numeric import NumericCheck

        return NumericCheck(config)
    if config.kind == "math":
        from tracefp4.tasks.checks.symbolic import MathCheck

        return MathCheck(config)
    if config.kind == "regex":
        from tracefp4.tasks.checks.pattern import RegexCheck

        return RegexCheck(config)
    if config.kind == "python":
        from tracefp4.tasks.checks.function import FunctionCheck

        return FunctionCheck(config)
    from tracefp4.tasks.checks.program import ProgramCheck

    return ProgramCheck(config)
