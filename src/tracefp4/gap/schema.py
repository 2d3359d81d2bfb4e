"""The function behind checks of kind ``json_schema``; runs in the workers of kind ``python``."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from jsonschema.validators import validator_for
from referencing import Registry

_FENCE = re.compile(r"```[ \t]*(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def json_in(response: str) -> Any:
    """The JSON value that a response is, or that its last fenced block holds. Raises ValueError where there is none."""
    try:
        return json.loads(response, parse_constant=_refuse)
    except ValueError:
        blocks = _FENCE.findall(response)
        if not blocks:
            raise
        return json.loads(blocks[-1], parse_constant=_refuse)


def score(prompt: dict[str, Any], response: str) -> float:
    """1.0 where the response is JSON, bare or in a fence, and valid under ``prompt["metadata"]["schema"]``."""
    try:
        value = json_in(response)
    except (ValueError, RecursionError):
        return 0.0
    return float(_validator(json.dumps(prompt["metadata"]["schema"])).is_valid(value))


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    schema = json.loads(text)
    # An empty registry: a $ref to elsewhere fails instead of being fetched.
    return validator_for(schema)(schema, registry=Registry())


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
