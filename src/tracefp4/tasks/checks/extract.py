"""Where in a response its answer is."""

from __future__ import annotations

import re

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def last_line(text: str) -> str | None:
    """The last line that is not blank."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def after_marker(text: str, marker: str) -> str | None:
    """What follows the last ``marker`` on its line."""
    _, found, rest = text.rpartition(marker)
    if not found:
        return None
    lines = rest.strip().splitlines()
    return lines[0].strip() if lines else ""


def answer_tag(text: str) -> str | None:
    r"""The content of the last ``<answer>...</answer>``."""
    start = text.lower().rfind("<answer>")
    found = _TAG.match(text, start) if start >= 0 else None
    return found.group(1).strip() if found else None


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, braces matched; also ``\fbox`` and ``\boxed 3``."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not rest.lstrip().startswith("{"):
        words = rest.split()
        return words[0].strip("$.,") if words and rest[:1].isspace() else None
    rest = rest.lstrip()
    depth, position = 0, 0
    while position < len(rest):
        if rest[position] == "\\":
            position += 1  # an escaped brace is no brace
        elif rest[position] == "{":
            depth += 1
        elif rest[position] == "}":
            depth -= 1
            if depth == 0:
                return rest[1:position].strip()
        position += 1
    return None


def extract(text: str, where: str, marker: str) -> str | None:
    """The answer at ``where``, None where there is none.

    ``where`` is a value of ``CheckConfig.extract`` but "auto", which each kind reads in its own way.
    """
    if where == "whole":
        return text
    if where == "last_line":
        return last_line(text)
    if where == "marker":
        return after_marker(text, marker)
    return answer_tag(text) if where == "answer_tag" else boxed(text)


def first_of(text: str, marker: str) -> str | None:
    r"""What "auto" means for numbers and formulas: ``\boxed``, else the marker, else ``<answer>``, else None."""
    for where in ("boxed", "marker", "answer_tag"):
        found = extract(text, where, marker)
        if found is not None:
            return found
    return None
