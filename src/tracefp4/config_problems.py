"""Turns pydantic's list of errors about a recipe into sentences that name the key, the source and the remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Loc = tuple[int | str, ...]


def did_you_mean(word: str, choices: list[str], prefix: str = "") -> str:
    """'; did you mean A or B?' for the choices near `word`, else all of them when they are few, else ''."""
    near = difflib.get_close_matches(word, choices, n=2, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(prefix + name for name in near)}?"
    return f"; known here: {', '.join(prefix + name for name in choices)}" if 0 < len(choices) <= 24 else ""


_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "a smaller integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "path_type": "a path in quotes",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a table",
    "model_type": "a section with keys of its own",
    "model_attributes_type": "a section with keys of its own",
    "dataclass_type": "a section with keys of its own",
    "none_required": "left out",
}
"""What a value should have been, by pydantic's error type; the rest is made from the error's context."""

_SCALARS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number"}
_MISSING = ("missing", "missing_argument")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_BOUNDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
_BOUND_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


class Explainer:
    """Turns pydantic's list of errors into sentences that name the key, the source and the remedy."""

    def __init__(
        self, path: str, sources: dict[tuple[str, ...], str], data: dict[str, Any], model: type[BaseModel]
    ) -> None:
        self.path = path
        self.sources = sources
        self.data = data
        self.model = model

    def explain(self, error: ValidationError) -> str:
        """One sentence per key, joined by semicolons; the branches of a union share a sentence, and so do the keys
        of a section that belong to another of its models."""
        by_key: dict[Loc, list[ErrorDetails]] = {}
        foreign: dict[Loc, list[Loc]] = {}
        for detail in error.errors(include_url=False):
            loc = self._key_of(detail)
            if detail["type"] in _UNKNOWN and self._owners(loc):
                foreign.setdefault(loc[:-1], []).append(loc)
                loc = foreign[loc[:-1]][0]
            by_key.setdefault(loc, []).append(detail)
        sentences = []
        for loc, details in by_key.items():
            group = foreign.get(loc[:-1], [])
            sentences.append(self._foreign_keys(group) if loc in group else self._sentence(loc, details))
        return joined(sentences)

    def _key_of(self, detail: ErrorDetails) -> Loc:
        """The location without the names of union branches, which are no keys the user wrote."""
        keys: list[int | str] = []
        value: Any = self.data
        last = len(detail["loc"]) - 1
        for position, part in enumerate(detail["loc"]):
            if isinstance(value, dict) and (part in value or (detail["type"] in _MISSING and position == last)):
                value = value.get(part)
            elif isinstance(value, list) and isinstance(part, int):
                value = value[part] if part < len(value) else None
            else:
                continue
            keys.append(part)
        return tuple(keys)

    def _sentence(self, loc: Loc, details: list[ErrorDetails]) -> str:
        kind = details[0]["type"]
        name, source = dotted(loc), self._source(loc)
        if kind == "union_tag_invalid":
            return self._unknown_choice(loc, details[0])
        if kind in _UNKNOWN:
            return self._unknown_key(loc)
        if kind in _MISSING and isinstance(loc[-1], int):
            return f"{dotted(loc[:-1])} has too few values in {source}"
        if kind in _MISSING:
            return f"{name} is required and missing in {self.path}"
        if kind in ("value_error", "assertion_error"):
            message = details[0]["msg"].split(", ", 1)[-1]
            if loc and not message.startswith((f"{name}.", f"{name} ")):
                return f"{name}: {message} (in {source})"
            # The rule names its keys in full: blame the override of one of them, if there is one.
            named = [source for keys, source in self.sources.items() if dotted(keys) in message]
            return f"{message} (in {named[-1] if named else source})"
        expected = list(dict.fromkeys(self._expectation(loc, detail) for detail in details))
        return self.wrong_type(loc, details[0]["input"], " or ".join(expected)) + _near_literal(details)

    def wrong_type(self, loc: Loc, value: Any, expected: str) -> str:
        """The sentence on a value that is not what its key needs."""
        got = json.dumps(value, default=str)
        return f"{dotted(loc)} must be {expected}, got {got} in {self._source(loc)}"

    def _source(self, loc: Loc) -> str:
        """The last override that set this key or a table around it or within it, else the file."""
        found = f"{self.path}"
        for keys, source in self.sources.items():
            shared = min(len(keys), len(loc))
            if shared and keys[:shared] == loc[:shared]:
                found = source
        return found

    def _expectation(self, loc: Loc, detail: ErrorDetails) -> str:
        kind, context = detail["type"], detail.get("ctx", {})
        if kind in _BOUND_ERRORS:
            return self._range(loc, context)
        if kind in ("literal_error", "enum"):
            return f"one of {context['expected']}" if " or " in str(context["expected"]) else f"{context['expected']}"
        if kind in ("too_short", "too_long"):
            low, high = context.get("min_length"), context.get("max_length")
            count = f"at least {low}" if kind == "too_short" else f"at most {high}"
            return f"a list of {count} values"
        if kind == "string_too_short":
            return f"a string of at least {context['min_length']} characters"
        if kind == "string_pattern_mismatch":
            return f"a string that matches {context['pattern']}"
        if kind == "multiple_of":
            return f"a multiple of {context['multiple_of']}"
        return _EXPECTED.get(kind) or lower_first(detail["msg"]).removeprefix("input should be ")

    def _range(self, loc: Loc, context: dict[str, Any]) -> str:
        """Both bounds of the key, not only the one that was crossed."""
        bounds = {name: context[name] for name in _BOUNDS if name in context}
        for meta in _metadata(self.model, loc, self.data):
            bounds |= {name: getattr(meta, name) for name in _BOUNDS if getattr(meta, name, None) is not None}
        return " and ".join(f"{_BOUNDS[name]} {bounds[name]}" for name in _BOUNDS if name in bounds)

    def _unknown_key(self, loc: Loc) -> str:
        """Says where the key would be known: nearest at this level, then the same name in other sections."""
        written = next((keys for keys in self.sources if keys[: len(loc)] == loc), loc)
        parent, key = loc[:-1], str(loc[-1])
        prefix = f"{dotted(parent)}." if parent else ""
        known = list(dict.fromkeys(name for m in _models_at(self.model, parent, self.data) for name in m.model_fields))
        sentence = f"unknown key {dotted(written)} in {self._source(loc)}"
        elsewhere = [
            path
            for path in dict.fromkeys(_all_paths(self.model))
            if path.rsplit(".", 1)[-1] == key and path.rpartition(".")[0] != dotted(parent)
        ]
        if elsewhere:
            return f"{sentence}; it exists as {' and '.join(elsewhere[:3])}"
        return sentence + did_you_mean(key, known, prefix)

    def _owners(self, loc: Loc) -> list[str]:
        """The names of the section's other models that do have this key."""
        chosen = _models_at(self.model, loc[:-1], self.data)
        return [_choice(m) for m in _models_at(self.model, loc[:-1]) if m not in chosen and loc[-1] in m.model_fields]

    def _foreign_keys(self, locs: list[Loc]) -> str:
        """Keys of one section that its chosen model lacks and another has."""
        section = dotted(locs[0][:-1])
        common = [name for name in self._owners(locs[0]) if all(name in self._owners(loc) for loc in locs)]
        owners = " or ".join(f'"{name}"' for name in common or self._owners(locs[0]))
        chosen = _choice(_models_at(self.model, locs[0][:-1], self.data)[0])
        verb = "belong" if len(locs) > 1 else "belongs"
        keys = ", ".join(dotted(loc) for loc in locs)
        there = f"{keys} in {self._source(locs[0])} {verb} to {section}.name = {owners}"
        return f'{there}, and here {section}.name is "{chosen}"'

    def _unknown_choice(self, loc: Loc, detail: ErrorDetails) -> str:
        """A name that none of a section's models has."""
        given = detail["input"].get("name") if isinstance(detail["input"], dict) else detail["input"]
        names = [_choice(m) for m in _models_at(self.model, loc)]
        near = did_you_mean(given, names) if isinstance(given, str) else ""
        expected = "one of " + ", ".join(f'"{name}"' for name in names)
        sentence = self.wrong_type((*loc, "name"), given, expected)
        return sentence + (near if near.startswith("; did") else "")


def coerced_values(raw: Any, value: Any, loc: Loc = ()) -> Iterator[tuple[Loc, Any, str]]:
    """Scalars that pydantic took for another type: "10" for a number, 1 for a boolean, true for a number.

    Its strict mode would refuse these, but also a list for a tuple and a string for a path, which TOML cannot
    write in another way; in strict JSON mode it refuses defaults of such types.
    """
    if isinstance(raw, dict):
        for key, inner in raw.items():
            attribute = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
            yield from coerced_values(inner, attribute, (*loc, key))
    elif isinstance(raw, list) and isinstance(value, list | tuple):
        for index, (inner, item) in enumerate(zip(raw, value, strict=False)):
            yield from coerced_values(inner, item, (*loc, index))
    elif type(value) in _SCALARS and type(raw) is not type(value):
        either_is_bool = isinstance(raw, bool) or isinstance(value, bool)
        if either_is_bool or (isinstance(raw, str) and _is_number(raw)):
            yield loc, raw, _SCALARS[type(value)]


def _is_number(text: str) -> bool:
    # Other text became a number by a validator that knows it, such as "auto".
    try:
        float(text)
    except ValueError:
        return False
    return True


def _near_literal(details: list[ErrorDetails]) -> str:
    """A suggestion when a misspelt word was given for a choice of words."""
    for detail in details:
        if detail["type"] in ("literal_error", "enum") and isinstance(detail["input"], str):
            choices = re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", "")))
            near = difflib.get_close_matches(detail["input"], choices, n=1)
            return f"; did you mean {near[0]}?" if near else ""
    return ""


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models an annotation mentions: `Section`, `Section | None`, `list[Section]`, `Annotated[...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _models_at(model: type[BaseModel], loc: Loc, data: Any = None) -> list[type[BaseModel]]:
    """The models that a table at `loc` may be; indices into lists do not change the model.

    data: what the user wrote; where several models share a section, only the one that its `name` chooses is left.
    """
    models = [model]
    value = data
    for part in loc:
        if isinstance(part, str):
            fields = [m.model_fields[part] for m in models if part in m.model_fields]
            models = [inner for field in fields for inner in _models_in(field.annotation)]
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            value = None
        if data is not None and len(models) > 1 and all(_choice(m) for m in models):
            name = value.get("name") if isinstance(value, dict) else None
            models = [m for m in models if _choice(m) == name] or models[:1]
    return models


def _choice(model: type[BaseModel]) -> str:
    """The `name` that chooses this model among those of its section; '' where it has no fixed name."""
    field = model.model_fields.get("name")
    if field is None or get_origin(field.annotation) is not Literal:
        return ""
    return str(get_args(field.annotation)[0])


def _metadata(model: type[BaseModel], loc: Loc, data: Any) -> list[Any]:
    """The constraints declared on the field at `loc`, also those inside `Annotated[...] | None`."""
    *parent, name = loc
    found: list[Any] = []
    for owner in _models_at(model, tuple(parent), data):
        if isinstance(name, str) and name in owner.model_fields:
            field = owner.model_fields[name]
            found += [*field.metadata, *_nested_metadata(field.annotation)]
    return found


def _nested_metadata(annotation: Any) -> Iterator[Any]:
    for inner in get_args(annotation):
        for meta in getattr(inner, "__metadata__", ()):
            yield from getattr(meta, "metadata", [meta])  # a Field(...) carries a list of constraints
        yield from _nested_metadata(inner)


def _all_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of the model, sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _models_in(field.annotation):
            yield from _all_paths(inner, f"{prefix}{name}.")


def joined(sentences: list[str]) -> str:
    """At most three problems: a file that is no recipe at all has dozens."""
    more = len(sentences) - 3
    tail = [f"and {more} more problem{'s' if more > 1 else ''}"] if more > 0 else []
    return "; ".join(sentences[:3] + tail)


def dotted(loc: Loc) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the recipe"


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
