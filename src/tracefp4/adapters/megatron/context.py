"""The guidance context under Megatron's schedules, which hold several micro-batches between forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from tracefp4.guidance import GuidanceError
from tracefp4.nn import GuidanceContext, MicroBatch
from tracefp4.nn.observe import SiteObserver


@dataclass
class LocalMicroBatch(MicroBatch):
    """A MicroBatch whose rows are those that one rank computes, in Megatron's order.

    tokens: int64 [b, s], what the embedding of this rank must be given; -1 on padding. None: not checked.
    probed_by_site: int64 [n] for each site, since K and V may have other rows here than the experts.
    """

    tokens: Tensor | None = None
    probed_by_site: dict[str, Tensor] = field(default_factory=dict)

    def probed(self, site: str) -> Tensor:
        return self.probed_by_site[site]


class ScheduledContext(GuidanceContext):
    """Armed for a forward as its base class is; a backward pass finds the micro-batch of its own forward again.

    Activation recomputation repeats layers inside a backward pass, and under pipeline parallelism other micro-batches
    have gone forward in between. So the output of each block of layers remembers the micro-batch it was computed with:
    its gradient is the first thing that a backward pass through the block touches.
    """

    _resumed = False

    @contextmanager
    def armed(self, micro_batch: MicroBatch, observer: SiteObserver | None = None) -> Iterator[dict[str, int]]:
        self.rest()
        with super().armed(micro_batch, observer) as kwargs:
            yield kwargs

    def rest(self) -> None:
        """Ends the backward pass of whichever micro-batch was last resumed."""
        if self._resumed:
            self._current, self._resumed = None, False

    def follow(self, block: nn.Module) -> None:
        """Hooks a block of layers (``GPTModel.decoder``), before its first forward."""
        block.register_forward_pre_hook(self._before)
        block.register_forward_hook(self._after)

    def check_tokens_of(self, model: nn.Module) -> None:
        """Hooks a model whose first stage must be given the armed micro-batch's tokens."""
        model.register_forward_pre_hook(self._check_tokens, with_kwargs=True)

    def _before(self, block: nn.Module, args: Any) -> None:
        self.rest()

    def _after(self, block: nn.Module, args: Any, output: Tensor) -> None:
        if self._current is not None and output.requires_grad:
            output.register_hook(partial(self._resume, self._current))

    def _resume(self, micro_batch: MicroBatch, grad: Tensor) -> None:
        self._current, self._resumed = micro_batch, True

    def _check_tokens(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        micro_batch = self._current
        if not isinstance(micro_batch, LocalMicroBatch) or micro_batch.tokens is None:
            return
        given = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        wanted = micro_batch.tokens
        if given.shape != wanted.shape or bool(((given != wanted) & (wanted >= 0)).any()):
            raise GuidanceError(
                f"micro-batch {micro_batch.key}: the tokens that Megatron lays out on this rank ({list(given.shape)}) "
                f"are not those that the guidance was laid out for ({list(wanted.shape)})"
            )
