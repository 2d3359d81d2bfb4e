"""What a form is, from how a user writes it: ``DIR``, ``DIR@nvfp4-w4a4``, ``FILE.gguf``, ``http://host/v1?model=m``."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from tracefp4.assets import builtin_model_path
from tracefp4.config import did_you_mean
from tracefp4.errors import TracefpError

W4A4 = "-w4a4"
ENGINE = "engine:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ENDPOINT_KEYS = ("model", "key_env", "price_in", "price_out")


@dataclass(frozen=True)
class LocalForm:
    """Weights on this machine.

    text: as the user wrote it. path: a checkpoint directory, or a GGUF file where kind is "gguf". weights, activations:
    names of formats that linear layers are rounded to, None for none. kind "engine": this package's rollout engine,
    which rounds experts or MLP, and K and V too.
    """

    text: str
    path: Path
    kind: Literal["checkpoint", "gguf", "engine"] = "checkpoint"
    weights: str | None = None
    activations: str | None = None

    @property
    def describes(self) -> str:
        """In words, for the report."""
        if self.kind == "gguf":
            return "GGUF file, its weights dequantized by transformers"
        if self.kind == "engine":
            what = f"{self.weights} weights, activations and KV cache" if self.weights else "no quantization"
            return f"rollout engine, {what}"
        if self.weights is None:
            return "checkpoint as it is stored"
        return f"weights of linear layers in {self.weights}" + (", their inputs too" if self.activations else "")


@dataclass(frozen=True)
class EndpointForm:
    """An OpenAI-compatible server. url: up to and with /v1; key_env: the variable that holds its key, "" for none;
    prices: per million tokens, None where they are unknown."""

    text: str
    url: str
    model: str
    key_env: str = ""
    price_in: float | None = None
    price_out: float | None = None

    @property
    def describes(self) -> str:
        return f"{self.model} behind an OpenAI-compatible server"

    def key(self) -> str | None:
        """The key, read now and kept nowhere. Raises TracefpError where the named variable is not set."""
        if self.key_env:
            value = os.environ.get(self.key_env, "").strip()
            if not value:
                raise TracefpError(f"{self.text}: the environment variable {self.key_env} (key_env) is not set")
            return value
        return os.environ.get("OPENAI_API_KEY", "").strip() or None


Form = LocalForm | EndpointForm


def parse_form(option: str, text: str) -> Form:
    """option: the name it was given by, for messages. Raises TracefpError for what is no form, or is not there."""
    text = text.strip()
    if not text:
        raise TracefpError(f"{option} is empty: give a checkpoint directory, a GGUF file or an endpoint")
    if text.startswith(("http://", "https://", "endpoint:")):
        return _endpoint(option, text)
    return _local(option, text)


# -- endpoints --------------------------------------------------------------------------------------------------------


def _endpoint(option: str, text: str) -> EndpointForm:
    if text.startswith("endpoint:"):
        url, *parts = text.removeprefix("endpoint:").split(",")
        pairs = [(name.strip(), value.strip()) for name, _, value in (part.partition("=") for part in parts)]
    else:
        url, _, query = text.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
    try:
        parsed = urlsplit(url)
        host, _ = parsed.hostname, parsed.port
    except ValueError as error:
        raise TracefpError(f"{option} is no valid URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not host:
        raise TracefpError(f"{option} must be an http or https URL such as http://localhost:8000/v1?model=NAME")
    if parsed.username or parsed.password:
        raise TracefpError(
            f"{option} holds a user name or password: put a key into an environment variable (key_env=NAME)"
        )
    keys = dict(pairs)
    for name in keys:
        if name not in _ENDPOINT_KEYS:  # the value stays out of the message: it may be a key
            raise TracefpError(f"{option} has the unknown key {name!r}{did_you_mean(name, list(_ENDPOINT_KEYS))}")
    if not keys.get("model"):
        raise TracefpError(f"{option} names no model: write {url}?model=NAME")
    url = url.rstrip("/")
    for ending in ("/chat/completions", "/completions"):
        url = url.removesuffix(ending)
    prices = {name: _price(option, name, keys[name]) for name in ("price_in", "price_out") if keys.get(name)}
    return EndpointForm(f"{url}?model={keys['model']}", url, keys["model"], keys.get("key_env", ""), **prices)


def _price(option: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise TracefpError(f"{option}: {name} must be a price per million tokens, got {text!r}")
    return value


# -- weights on this machine ------------------------------------------------------------------------------------------


def _local(option: str, text: str) -> LocalForm:
    bare = text.removeprefix("hf:")
    path, at, variant = bare.rpartition("@")
    if not at or _exists(bare):
        path, variant = bare, ""
    directory = builtin_model_path(path.removeprefix("builtin:")) if path.startswith("builtin:") else Path(path)
    if directory.suffix.lower() == ".gguf":
        if variant:
            raise TracefpError(f"{option} {text}: a GGUF file is run as it is, without @{variant}")
        if not directory.is_file():
            raise TracefpError(f"{option} {directory} does not exist (relative paths start at {Path.cwd()})")
        return LocalForm(text, directory, "gguf")
    kind, weights, activations = _variant(option, variant)
    _check_directory(option, directory)
    form = LocalForm(text, directory, kind, weights, activations)  # type: ignore[arg-type]
    stored = stored_quantization(directory)
    if stored and weights:
        raise TracefpError(f"{option} {text}: the checkpoint is quantized already ({stored}); leave @{variant} out")
    return form


def _variant(option: str, variant: str) -> tuple[str, str | None, str | None]:
    """(kind, weights, activations) of what follows the @."""
    from tracefp4.formats import list_formats  # imports torch, which endpoints do without

    if not variant:
        return "checkpoint", None, None
    kind, name = ("engine", variant.removeprefix(ENGINE)) if variant.startswith(ENGINE) else ("checkpoint", variant)
    if name in ("bf16", "stored"):
        return kind, None, None
    base = name.removesuffix(W4A4)
    if base not in list_formats():
        known = [*list_formats(), *(f + W4A4 for f in list_formats()), ENGINE + "nvfp4", ENGINE + "bf16"]
        raise TracefpError(f"{option}: unknown variant @{variant}{did_you_mean(variant, known)}")
    return kind, base, base if kind == "engine" or name.endswith(W4A4) else None


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a name that is too long
        return False


def _check_directory(option: str, directory: Path) -> None:
    if directory.is_file():
        raise TracefpError(f"{option} {directory} is a file; give the checkpoint directory that holds it")
    if not directory.is_dir():
        hint = f" (relative paths start at {Path.cwd()})"
        if _HUB_ID.fullmatch(str(directory)):
            hint = f"; a model of the Hugging Face hub is fetched by `hf download {directory} --local-dir DIR`"
        raise TracefpError(f"{option} {directory} does not exist{hint}")
    if not (directory / "config.json").is_file():
        raise TracefpError(f"{option} {directory} is no Hugging Face checkpoint directory (it has no config.json)")


def read_model_config(directory: Path) -> dict[str, Any]:
    """The content of a checkpoint's config.json. Raises TracefpError where it is damaged."""
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TracefpError(f"{directory / 'config.json'} is no readable JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise TracefpError(f"{directory / 'config.json'} must hold a JSON object; fetch it again")
    return content


def stored_quantization(directory: Path) -> str | None:
    """The method that a checkpoint's quantization_config names, such as "compressed-tensors"; None for none."""
    found = read_model_config(directory).get("quantization_config")
    if not found:
        return None
    return str(found.get("quant_method", "unknown")) if isinstance(found, dict) else str(found)
