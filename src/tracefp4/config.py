"""Reading a recipe: a TOML file, `key=value` overrides, strict models, errors of one sentence.

Components declare their settings beside their class as a `StrictModel`; the root model that collects them
is handed to `load_config`. Why a recipe is refused is put into words by `config_problems`.

    config = load_config("recipes/demo.toml", ["train.lr=1e-4", "method.name=trace"], RunConfig)

An override is a dotted key and a value in TOML (`run.seed=3`, `a=[1, 2]`, `quant.kv=false`). A value that
is no TOML at all and does not look like an attempt at it is a bare word and read as a string
(`method.name=trace`). Later overrides win. A table (`train={lr=1e-4}`) is merged into the section key by key.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from tracefp4.config_problems import Explainer, coerced_values, joined, lower_first
from tracefp4.config_problems import did_you_mean as did_you_mean
from tracefp4.errors import TracefpError

Model = TypeVar("Model", bound=BaseModel)

MAX_RECIPE_BYTES = 1 << 20
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class ConfigError(TracefpError, ValueError):
    """A recipe or an override that cannot be used; the first three problems are joined by semicolons."""


class StrictModel(BaseModel):
    """Base of every config section: unknown keys fail, values are frozen, defaults are checked too.

    NaN and infinity are refused: no setting means anything with them, and "no limit" is spelled None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def default_name(name: str) -> BeforeValidator:
    """For a section that is one of several models told apart by their `name`: the one to take where none is given.

    The models' union must name that one first:
    `Annotated[A | B, Field(discriminator="name"), default_name("a")]`.
    """
    return BeforeValidator(lambda data: {"name": name, **data} if isinstance(data, dict) else data)


def load_config(path: str | Path, overrides: list[str], model: type[Model]) -> Model:
    """The recipe at `path` with `overrides` applied, validated as `model`; ConfigError says what is wrong.

    A file that ends in .json is a run folder's config.json, of which the settings are read again.
    """
    data = _read_json(Path(path)) if Path(path).suffix == ".json" else read_toml(Path(path))
    return with_overrides(data, overrides, model, str(path))


def with_overrides(data: dict[str, Any], overrides: list[str], model: type[Model], source: str) -> Model:
    """The tables ``data``, which it changes, with `overrides` applied, validated as `model`. source: for messages."""
    parsed = [(text, *parse_override(text)) for text in overrides]
    for text, keys, value in parsed:
        _apply_override(data, text, keys, value)
    # TOML dates become ISO strings, as every field that could take one is text.
    data = json.loads(json.dumps(data, default=str))
    sources = {keys: f"the override '{text}'" for text, keys, _ in parsed}
    explainer = Explainer(source, sources, data, model)
    try:
        config = model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explainer.explain(error)) from None
    if coerced := [explainer.wrong_type(*found) for found in coerced_values(data, config)]:
        raise ConfigError(joined(coerced))
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; a missing, unreadable or broken file is a ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        tables = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe at {path}{_nearby_recipe(path)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text, as TOML must be") from None
    except OSError as error:
        what = "a folder, not a recipe file" if path.is_dir() else f"not readable ({error.strerror})"
        raise ConfigError(f"{path} is {what}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {_toml_problem(str(error), text)}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {_too_much(error)}") from None
    if len(data) > MAX_RECIPE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_RECIPE_BYTES >> 20} MiB, so it is no recipe")
    if not tables:  # an interrupted copy, a pipe read twice: hours of a run that nobody asked for
        raise ConfigError(f'{path} is empty: set at least one key, such as method.name = "trace"')
    return tables


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return data


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Splits `a.b=VALUE` into its keys and its value.

    >>> parse_override("train.lr=1e-4")
    (('train', 'lr'), 0.0001)
    """
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals:
        raise ConfigError(f"the override '{text}' has no '=': write it as section.key=value")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"the override '{text}' needs a dotted key such as train.lr before the '='")
    if not raw:
        raise ConfigError(f"the override '{text}' has no value: write {key}='\"\"' for an empty string")
    return tuple(key.split(".")), _parse_value(text, raw)


def resolved(config: BaseModel) -> dict[str, Any]:
    """The config with every default filled in, as plain JSON types: a run folder's config.json."""
    return config.model_dump(mode="json")


def config_hash(config: BaseModel) -> str:
    """16 hex digits that name the resolved config: equal settings, however written, give equal hashes."""
    canonical = json.dumps(resolved(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


# Files and overrides


def _nearby_recipe(path: Path) -> str:
    """A hint naming the recipe of the same folder whose name is nearest."""
    if not path.parent.is_dir():
        return f" (the folder {path.parent} does not exist either)"
    names = sorted(entry.name for entry in path.parent.glob("*.toml"))
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _toml_problem(message: str, text: str) -> str:
    """tomllib's message with the line first, also where it only says 'at end of document'."""
    found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message, re.DOTALL)
    if found:
        problem, line, column = found.groups()
        return f"line {line}, column {column}: {lower_first(problem)}"
    problem = message.removesuffix(" (at end of document)")
    return f"line {max(1, len(text.splitlines()))}: {lower_first(problem)}"


def _too_much(error: Exception) -> str:
    """What Python refuses to parse although it is TOML."""
    if isinstance(error, RecursionError):
        return "its brackets are nested too deeply"
    return "a number has thousands of digits" if "digits" in str(error) else str(error)


def _parse_value(text: str, raw: str) -> Any:
    """A TOML value, or the raw text when it is a bare word.

    It must parse both alone and inside an array: alone rules out `1, 2`, the array rules out a value with a
    comment or a second line after it, which would silently lose its tail.
    """
    try:
        alone, listed = tomllib.loads(f"v = {raw}"), tomllib.loads(f"v = [{raw}]")
        # Compared by repr, as NaN is not equal to itself.
        if set(alone) == {"v"} and repr(listed["v"]) == repr([alone["v"]]):
            return alone["v"]
    except tomllib.TOMLDecodeError:
        pass
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"the override of {text.partition('=')[0].strip()} cannot be read: {_too_much(error)}"
        ) from None
    if raw[0] in "[{\"'":
        raise ConfigError(f"the value in the override '{text}' is not valid TOML: check its brackets and quotes")
    return raw


def _apply_override(data: dict[str, Any], text: str, keys: tuple[str, ...], value: Any) -> None:
    table = data
    for depth, key in enumerate(keys[:-1]):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            section = ".".join(keys[: depth + 1])
            raise ConfigError(f"the override '{text}' needs {section} to be a section, but it is a value")
    _merge(table, keys[-1], value)


def _merge(table: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, dict) and isinstance(table.get(key), dict):
        for name, inner in value.items():
            _merge(table[key], name, inner)
    else:
        table[key] = value
