"""Okapi BM25 over a list of passages, in memory."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

K1, B = 1.2, 0.75

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


class BM25:
    """score(query, d) = sum over the query's words w of idf(w) * tf * (K1 + 1) / (tf + K1 * (1 - B + B * |d| / mean))

    with tf the count of w in passage d and idf(w) = ln(1 + (N - n + .5) / (n + .5)), n of N passages holding w.
    """

    def __init__(self, passages: Sequence[str]) -> None:
        counts = [Counter(words(passage)) for passage in passages]
        lengths = [count.total() for count in counts]
        mean = max(1.0, sum(lengths) / max(1, len(lengths)))
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for index, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, tf in count.items():
                weight = tf * (K1 + 1) / (tf + K1 * (1 - B + B * length / mean))
                self._postings[word].append((index, weight))
        total = len(passages)
        self._idf = {w: math.log(1 + (total - len(p) + 0.5) / (len(p) + 0.5)) for w, p in self._postings.items()}

    def top(self, query: str, k: int) -> list[int]:
        """Indices of the best ``k`` passages that share a word with the query; ties in the order of the passages."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(words(query)) & self._idf.keys():
            for index, weight in self._postings[word]:
                scores[index] += self._idf[word] * weight
        return sorted(scores, key=lambda index: (-scores[index], index))[:k]
