"""Checks of the inquiries that ask for a form; a row's field ``form`` names one of them."""

from __future__ import annotations

import re
from typing import Any


def has_form(prompt: dict[str, Any], response: str) -> bool:
    """What the file's checks of kind python call."""
    return FORMS[prompt["metadata"]["form"]](response.strip())


def three_items(text: str) -> bool:
    """Three items of one or two words, by commas; "and" before the last is fine."""
    items = [re.sub(r"(?i)^and\s+", "", item.strip()) for item in text.rstrip(".").split(",")]
    return len(items) == 3 and all(re.fullmatch(r"[\w-]+( [\w-]+)?", item) for item in items)


def thanking_sentence(text: str) -> bool:
    """One finished sentence of at most 20 words that says thank you."""
    finished = text.rstrip('"').endswith((".", "!"))
    return finished and _sentences(text) == 1 and len(text.split()) <= 20 and "thank" in text.lower()


def twelve_words(text: str) -> bool:
    """One sentence of at most twelve words."""
    return _sentences(text) == 1 and len(text.split()) <= 12


def numbered_pair(text: str) -> bool:
    """Lines that start with 1. and 2. and have text, and none with another number; an introduction is fine."""
    return re.findall(r"(?m)^\s*(\d+)[.)]\s+\S", text) == ["1", "2"]


def names_in_order(text: str) -> bool:
    """Adam, Mia and Zoe once each, in this order."""
    return re.findall(r"\b(Adam|Mia|Zoe)\b", text) == ["Adam", "Mia", "Zoe"]


def _sentences(text: str) -> int:
    return len([part for part in re.split(r"(?<=[.!?])\s+", text) if part])


FORMS = {f.__name__: f for f in (three_items, thanking_sentence, twelve_words, numbered_pair, names_in_order)}
