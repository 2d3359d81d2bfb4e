"""The RL loop: wires a Rollout and a Trainer, which know nothing of each other.

``RunConfig`` is a recipe, ``preflight`` what it is made of, ``TrainingRun`` its parts and its step, ``run_training`` a
whole run with its folder.
"""

from typing import TYPE_CHECKING

from tracefp4.lazy import on_first_use

if TYPE_CHECKING:
    from tracefp4.loop.api import *  # noqa: F403

__getattr__ = on_first_use(__name__)
