"""Evaluation of one policy on held-out problems, in several numeric forms of the same weights."""

from typing import TYPE_CHECKING

from tracefp4.lazy import on_first_use

if TYPE_CHECKING:
    from tracefp4.evaluate.api import *  # noqa: F403

__getattr__ = on_first_use(__name__)
