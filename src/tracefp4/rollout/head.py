"""The rollout's likeliest tokens at every sampled position, for losses that compare whole distributions."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from tracefp4.rollout.sampler import SamplingTensors, row_blocks
from tracefp4.rollout.sequence import Sequence
from tracefp4.types import TokenHead

HEAD_BYTES = 1 << 27
"""Most bytes that the temporaries of ``likeliest`` take, however many rows there are (one row's at least). Less than a
draw's: captured steps keep theirs, and launch for little."""
HEAD_LOGIT_BYTES = 12
"""Of these, at the peak, for each logit of a block: three of FP32, as logits become log-probs."""


def likeliest(logits_BV: Tensor, temperature_B: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids int64, log-probs f32) [B, k], likeliest first. Asks the host nothing.

    temperature: 1 where greedy. Log-probs are those that ``sampler.sample`` gives, up to the order of a sum: under the
    temperature-scaled distribution before top-p. In blocks of rows, whose temporaries stay within HEAD_BYTES.
    """
    B, V = logits_BV.shape
    blocks = row_blocks(B, V, HEAD_LOGIT_BYTES, HEAD_BYTES)
    found = [_likeliest(logits_BV[at], temperature_B[at], k) for at in blocks]
    if len(found) == 1:
        return found[0]
    ids, logprobs = (torch.cat(parts) for parts in zip(*found, strict=True))
    return ids, logprobs


def _likeliest(logits_BV: Tensor, temperature_B: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As ``likeliest``, all rows at once; HEAD_LOGIT_BYTES counts what is alive here."""
    logits = logits_BV.float()
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature_B[:, None]
    logprobs, ids = torch.log_softmax(scaled, dim=-1).topk(k, dim=-1)
    return ids, logprobs


def keep_heads(seqs: Seq[Sequence], logits_BV: Tensor) -> None:
    """Appends the head of each sequence's next token where its request asks for one. logits: a row a sequence."""
    k = min(max(s.request.sampling.top_logprobs for s in seqs), logits_BV.shape[-1])
    if not k:
        return
    settings = SamplingTensors.of([s.request.sampling for s in seqs])
    ids, logprobs = (t.cpu() for t in likeliest(logits_BV, settings.temperature.to(logits_BV.device), k))
    for i, seq in enumerate(seqs):
        append_head(seq, ids[i : i + 1], logprobs[i : i + 1])


def append_head(seq: Sequence, ids_NK: Tensor, logprobs_NK: Tensor) -> None:
    """Takes the heads of N sampled tokens, as wide as its request asks for; none where it asks for none."""
    if own := seq.request.sampling.top_logprobs:
        seq.head.append((ids_NK[:, :own].to(torch.int32), logprobs_NK[:, :own].float()))


def take_head(seq: Sequence) -> TokenHead | None:
    """The heads of a sequence's response, [R, k]; None where it asked for none or sampled nothing."""
    if not seq.head:
        return None
    sampled = torch.tensor(seq.sampled)
    own_ids, own_logprobs = (torch.cat(parts) for parts in zip(*seq.head, strict=True))
    ids = torch.zeros(len(sampled), own_ids.shape[1], dtype=torch.int32)
    logprobs = torch.full(ids.shape, -torch.inf)
    ids[sampled], logprobs[sampled] = own_ids, own_logprobs
    return TokenHead(ids, logprobs)
