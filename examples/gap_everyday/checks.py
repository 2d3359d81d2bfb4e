"""Checks of inquiries that ask for a form: each function says whether an answer has it."""

from __future__ import annotations

import re
from typing import Any

Prompt = dict[str, Any]


def three_items(prompt: Prompt, response: str) -> bool:
    """Three comma-separated items of one or two words each; "and" before the last is fine."""
    items = [re.sub(r"(?i)^and\s+", "", item.strip()) for item in response.strip().rstrip(".").split(",")]
    return len(items) == 3 and all(re.fullmatch(r"[\w-]+( [\w-]+)?", item) for item in items)


def one_thanking_sentence(prompt: Prompt, response: str) -> bool:
    """One finished sentence of up to 20 words that says thank you."""
    finished = response.strip().rstrip('"').endswith((".", "!"))
    return finished and len(_sentences(response)) == 1 and len(response.split()) <= 20 and "thank" in response.lower()


def at_most_twelve_words(prompt: Prompt, response: str) -> bool:
    """One sentence of one to twelve words."""
    return len(_sentences(response)) == 1 and len(response.split()) <= 12


def numbered_list_of_two(prompt: Prompt, response: str) -> bool:
    """Lines that start with 1. and 2. and have text, no line with another number; an introduction is fine."""
    numbers = re.findall(r"(?m)^\s*(\d+)[.)]\s+\S", response)
    return numbers == ["1", "2"]


def names_in_order(prompt: Prompt, response: str) -> bool:
    """Adam, Mia and Zoe once each, in this order."""
    return re.findall(r"\b(Adam|Mia|Zoe)\b", response) == ["Adam", "Mia", "Zoe"]


def _sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]
