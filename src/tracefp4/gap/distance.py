"""The distance of two forms token by token: log-probs of the same tokens under both.

An answer of one form is scored by the other, teacher-forced: its tokens are given, and the other form says how likely
each was. Where no form can score, the tokens count that both wrote alike before their first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tracefp4.gap.answers import Answer

FORCED, ALIKE = "each form scored the other's answers", "the tokens that both wrote alike, up to the first difference"


def aligned(
    answer: Answer, encode_text: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]
) -> tuple[list[int], list[float]] | None:
    """(token ids, log-probs) of an answer in the vocabulary of a form with these functions; None where they differ.

    Ids are taken where the answer has them and they spell its text. Else its pieces must be the tokens that the form's
    own tokenizer makes of the text; an end token that the server lists after them is left out.
    """
    if answer.logprobs is None:
        return None
    try:
        if answer.token_ids is not None:
            same = (
                len(answer.token_ids) == len(answer.logprobs)
                and decode(answer.token_ids).strip() == answer.text.strip()
            )
            return (answer.token_ids, answer.logprobs) if same and answer.token_ids else None
        ids = encode_text(answer.text)
        pieces = [decode([token]) for token in ids]
    except (IndexError, OverflowError, ValueError, TypeError):  # ids beyond the vocabulary
        return None
    spelt = answer.pieces or []
    extra = len(spelt) - len(ids)
    if not ids or extra not in (0, 1) or [p.strip() for p in spelt[: len(ids)]] != [p.strip() for p in pieces]:
        return None
    return ids, answer.logprobs[: len(ids)]


def alike(train: Answer, serve: Answer) -> tuple[list[float], list[float]]:
    """Log-probs of the tokens that both answers begin with, under the training and the serving form."""
    a, b = train.token_ids or train.pieces or [], serve.token_ids or serve.pieces or []
    same = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        same += 1
    return (train.logprobs or [])[:same], (serve.logprobs or [])[:same]


def distance_figures(deltas: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Figures of log p(serve) - log p(train), one list an answer: mean, 99th percentile and maximum of its magnitude,
    and the share of tokens whose probability differs by more than a factor of 2."""
    flat = np.array([value for one in deltas for value in one], dtype=np.float64)
    if not flat.size:
        return {"answers": 0, "tokens": 0}
    size = np.abs(flat)
    return {
        "answers": len(deltas),
        "tokens": int(flat.size),
        "mean": float(flat.mean()),
        "mean_abs": float(size.mean()),
        "p99_abs": float(np.quantile(size, 0.99)),
        "max_abs": float(size.max()),
        "share_beyond_factor_2": float((size > np.log(2)).mean()),
    }
