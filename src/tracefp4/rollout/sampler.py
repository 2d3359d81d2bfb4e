"""From logits to tokens, reproducibly for each request whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.kernels.sampling import draw_tokens
from tracefp4.kernels.sampling.ref import invert, scaled_logprobs
from tracefp4.types import SamplingParams

DRAW_BYTES = 1 << 29
"""Most bytes that the temporaries of a draw by top-p take, however many rows there are (one row's at least)."""
DRAW_LOGIT_BYTES = 28 + 40
"""Of these, at the peak, for each logit of a block, in the sort: FP32 log-probs (4), FP64 probabilities (8), the same
sorted (8), their order (8); and what torch's stable sort takes beside its results on a GPU, where fewer than 128 rows
take most: row and column twice (16), sorted keys (8), a second buffer of the radix sort's keys and values (16). That
is read from its source, the rest is counted by a test.
"""

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer


def _shift_right(z: Tensor, n: int) -> Tensor:
    """Logical shift of int64 (torch shifts arithmetically)."""
    return (z >> n) & ((1 << (64 - n)) - 1)


def counter_uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """f64 in [0, 1), a pure function of (seed, counter), both int64 of one shape.

    Two rounds of the splitmix64 finalizer (Steele et al. 2014); 53 bits. A token thus depends on its request's
    seed and its position alone: neither on batch composition nor on preemption.
    """
    z = counters
    for key in (seeds, seeds * _GOLDEN):
        z = z * _GOLDEN + key
        z = (z ^ _shift_right(z, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
        z = (z ^ _shift_right(z, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
        z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).double() * 2.0**-53


def sample(
    logits_BV: Tensor, params: Sequence[SamplingParams], positions: Tensor, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """One token per row: (ids int64 [B], log-probs f32 [B]).

    positions int64 [B]: absolute position that the new token takes. The log-prob is taken under the
    temperature-scaled distribution before top-p (greedy: temperature 1). Raises FloatingPointError when a row has
    a NaN, +Inf or no finite logit: sampling on would only hide a broken forward.
    """
    settings = SamplingTensors.of(params).to(logits_BV.device)
    ids, logprobs, finite = draw(logits_BV, settings, positions, any(p.top_p < 1 for p in params), backend)
    if not bool(finite.all()):
        raise not_finite()
    return ids, logprobs


def not_finite() -> FloatingPointError:
    """A new error every time: one that is kept keeps the frames it was raised through, and their tensors, alive."""
    return FloatingPointError("the rollout's logits are not finite; check the weights of the last update")


@dataclass(frozen=True)
class SamplingTensors:
    """Settings of B rows: temperature f32 (1 where greedy), top_p f64, seeds int64, greedy bool, each [B]."""

    temperature: Tensor
    top_p: Tensor
    seeds: Tensor
    greedy: Tensor

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> SamplingTensors:
        # However small the temperature, the largest scaled logit is 0 and the others are at worst -Inf.
        least = torch.finfo(torch.float32).tiny
        return SamplingTensors(
            torch.tensor([max(p.temperature or 1.0, least) for p in params]),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
            torch.tensor([p.seed for p in params], dtype=torch.int64),
            torch.tensor([p.temperature == 0 for p in params]),
        )

    def to(self, device: torch.device) -> SamplingTensors:
        return SamplingTensors(*(t.to(device) for t in (self.temperature, self.top_p, self.seeds, self.greedy)))

    def pinned(self) -> SamplingTensors:
        return SamplingTensors(*(t.pin_memory() for t in (self.temperature, self.top_p, self.seeds, self.greedy)))

    def rows(self, at: slice) -> SamplingTensors:
        """Views of some rows."""
        return SamplingTensors(self.temperature[at], self.top_p[at], self.seeds[at], self.greedy[at])


def row_blocks(B: int, V: int, logit_bytes: int, most: int) -> list[slice]:
    """Cuts B rows of V logits into as few blocks as have at most ``most // (V * logit_bytes)`` rows each, or one.

    The blocks are of equal size but for the last: a long one would take as much memory, a short one as many launches.
    No rows are one empty block.
    """
    count = max(1, -(-B // max(1, most // (V * logit_bytes))))
    rows = max(1, -(-B // count))
    return [slice(first, min(first + rows, B)) for first in range(0, max(B, 1), rows)]


def draw(
    logits_BV: Tensor, settings: SamplingTensors, positions: Tensor, nucleus: bool, backend: str = "torch"
) -> tuple[Tensor, Tensor, Tensor]:
    """``sample`` without asking the host anything: (ids, log-probs, bool [B]: whether the row's logits are finite).

    nucleus: whether any row cuts its distribution at top-p; always drawn by torch, in blocks of rows whose temporaries
    stay within DRAW_BYTES. Of rows that are not finite the rest means nothing.

    No row's result depends on its block, but for the last bits of FP64 sums on a GPU, whose order torch lets depend on
    the number of rows, in blocks as in batches.
    """
    uniform = counter_uniform(settings.seeds, positions)
    if not nucleus:
        return draw_tokens(logits_BV, settings.temperature, settings.greedy, uniform, backend=backend)
    B, V = logits_BV.shape
    blocks = row_blocks(B, V, DRAW_LOGIT_BYTES, DRAW_BYTES)
    drawn = [_draw_by_top_p(logits_BV[at], settings.rows(at), uniform[at]) for at in blocks]
    if len(drawn) == 1:
        return drawn[0]
    ids, logprobs, finite = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return ids, logprobs, finite


def _draw_by_top_p(logits_BV: Tensor, settings: SamplingTensors, uniform_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``draw``, all rows at once; DRAW_LOGIT_BYTES counts what is alive here."""
    logits, logprobs, finite = scaled_logprobs(logits_BV, settings.temperature)
    likeliest = logits.argmax(-1)
    del logits
    drawn = invert(_nucleus(logprobs.double().exp_(), settings.top_p), uniform_B)
    ids = torch.where(settings.greedy, likeliest, drawn)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0], finite


def _nucleus(probs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Keeps the smallest set of likeliest tokens whose mass reaches top_p (at least one); all of them at 1."""
    ordered, index = probs_BV.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1).sub_(ordered)
    # At 1 nothing is cut, though rounding may bring the mass before a rare token to 1 already.
    kept = (before < top_p_B[:, None]) | (top_p_B[:, None] >= 1)
    del before
    return torch.empty_like(probs_BV).scatter_(-1, index, ordered.masked_fill_(~kept, 0.0))
