"""Where the final answer of a response stands.

Four spellings are in use; a task says which one it asks for:

==============  =============================================  ==========
``hashes``      what follows the last ``####`` on its line     GSM8K
``answer_tag``  the last ``<answer>...</answer>``              DeepSeek-R1
``boxed``       the last ``\\boxed{...}``, braces balanced      MATH
``last_line``   the last line that is not blank
==============  =============================================  ==========

``auto`` takes the first of them that the response has, in this order; ``last_line`` is its last resort.
"""

from __future__ import annotations

from typing import Literal

AnswerFormat = Literal["auto", "hashes", "answer_tag", "boxed", "last_line"]

INSTRUCTIONS: dict[str, str] = {
    "auto": "End with #### and then the final answer alone.",
    "hashes": "End with #### and then the final answer alone.",
    "answer_tag": "Write the final answer, and nothing else, between <answer> and </answer>.",
    "boxed": "Write the final answer within \\boxed{}.",
    "last_line": "Write the final answer alone on the last line.",
}
"""The sentence that asks the policy for each format."""


def extract_answer(text: str, answer_format: AnswerFormat = "auto", lines: bool = False) -> str | None:
    """The final answer within ``text``, stripped; None where it has none in that format. Never raises.

    lines: an answer may have several lines, such as a grid: then all that follows ``####`` belongs to it.

    >>> extract_answer("12 + 30 = 42\\n#### 42")
    '42'
    """
    order = ("hashes", "answer_tag", "boxed", "last_line") if answer_format == "auto" else (answer_format,)
    for name in order:
        answer = _hashes(text, lines) if name == "hashes" else _FINDERS[name](text)
        if answer is not None:
            return answer
    return None


def _hashes(text: str, lines: bool) -> str | None:
    _, marker, after = text.rpartition("####")
    answer = (after if lines else after.split("\n", 1)[0]).strip()
    return answer if marker and answer else None


def _answer_tag(text: str) -> str | None:
    # The opening tag nearest to the last closing one: an earlier, unclosed one is thinking aloud.
    body, closed, _ = text.rpartition("</answer>")
    _, opened, answer = body.rpartition("<answer>")
    return (answer.strip() or None) if closed and opened else None


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start:end].strip() or None
    return None


def _last_line(text: str) -> str | None:
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), None)


_FINDERS = {"answer_tag": _answer_tag, "boxed": _boxed, "last_line": _last_line}
