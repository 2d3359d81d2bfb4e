"""Compact guidance: recording which FP4 slot the rollout picked and rounding to it in the trainer."""

from typing import TYPE_CHECKING

from tracefp4.lazy import on_first_use

if TYPE_CHECKING:
    from tracefp4.guidance.api import *  # noqa: F403

__getattr__ = on_first_use(__name__)
