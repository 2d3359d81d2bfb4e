"""The rollout's likeliest tokens at every sampled position, for losses that compare whole distributions."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from tracefp4.rollout.sequence import Sequence
from tracefp4.types import TokenHead


def keep_heads(seqs: Seq[Sequence], logits_BV: Tensor) -> None:
    """Appends the head of each sequence's next token where its request asks for one. logits: a row a sequence.

    Log-probs are those that ``sampler.sample`` gives: under the temperature-scaled distribution before top-p.
    """
    rows = [i for i, s in enumerate(seqs) if s.request.sampling.top_logprobs]
    if not rows:
        return
    logits = logits_BV[rows].float()
    temperature = [seqs[i].request.sampling.temperature or 1.0 for i in rows]
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.tensor(temperature, device=logits.device)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    k = min(max(seqs[i].request.sampling.top_logprobs for i in rows), logits.shape[-1])
    top, ids = (t.cpu() for t in logprobs.topk(k, dim=-1))
    for row, i in enumerate(rows):
        own = seqs[i].request.sampling.top_logprobs
        seqs[i].head.append((ids[row, :own].to(torch.int32), top[row, :own]))


def take_head(seq: Sequence) -> TokenHead | None:
    """The heads of a sequence's response, [R, k]; None where it asked for none or sampled nothing."""
    if not seq.head:
        return None
    k = seq.head[0][0].shape[0]
    ids = torch.zeros(len(seq.sampled), k, dtype=torch.int32)
    logprobs = torch.full((len(seq.sampled), k), -torch.inf)
    sampled = torch.tensor(seq.sampled)
    ids[sampled] = torch.stack([i for i, _ in seq.head])
    logprobs[sampled] = torch.stack([p for _, p in seq.head])
    return TokenHead(ids, logprobs)
