"""The shapes in which frameworks write token ids and log-probs, and one record from each.

A layout is recognised by its fields, line by line; names of options override it. Fields that two frameworks name
alike are read alike, so a file need not say where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TOKEN_FIELDS = (
    "token_ids",
    "response_ids",
    "response_token_ids",
    "responses",
    "output_ids",
    "output_token_ids",
    "completion_ids",
    "completion_token_ids",
    "generated_ids",
    "tokens",
    "input_ids",
    "sequences",
    "ids",
)
TRAIN_FIELDS = (
    "train_logprobs",
    "train_log_probs",
    "old_log_probs",
    "old_logprobs",
    "actor_log_probs",
    "trainer_logprobs",
    "prev_logprobs",
)
ROLLOUT_FIELDS = (
    "rollout_log_probs",
    "rollout_logprobs",
    "generation_logprobs",
    "inference_logprobs",
    "sampling_logprobs",
    "behavior_logprobs",
)
ANY_FIELDS = ("logprobs", "log_probs", "logps", "token_logprobs", "transition_scores", "logprob")
MASK_FIELDS = ("response_mask", "loss_mask", "completion_mask", "action_mask", "mask")
ID_FIELDS = ("sample_id", "request_id", "id", "rid", "uid", "index", "sample_index")
STEP_FIELDS = ("step", "global_step", "global_steps", "rollout_id", "training_step", "iteration")
LAG_FIELDS = ("lag", "policy_lag", "staleness", "version_lag")
VERSION_FIELDS = ("weight_versions", "weight_version", "policy_version", "version", "versions")
TRAIN_VERSION_FIELDS = ("train_version", "trainer_version", "learner_version")
PROMPT_FIELDS = ("prompt_token_ids", "prompt_ids", "prompts", "prompt", "input", "group_index")
LENGTH_FIELDS = ("response_length", "completion_length", "num_response_tokens")
TEMPERATURE_FIELDS = ("temperature",)
ABSENT_LOGPROB = -9000.0
"""vLLM's server writes -9999.0 where JSON has no minus infinity."""
_INT64 = np.iinfo(np.int64)


class LayoutError(ValueError):
    """A line that is no record; the message is the end of a sentence that names the line."""


@dataclass
class Record:
    """One sample of one line.

    logprobs: by column, "train", "rollout" or "any", f64 [n] with NaN where the file says null and inf where it holds
    no log-prob at all (NaN, or a huge number). tokens: int64 [n], of
    the same positions, or None. texts: the tokens as text where the file has them. mask: bool [n], positions that
    count.
    lag: trainer's version minus the sample's. prompt: whatever names the prompt, hashed.
    """

    layout: str
    logprobs: dict[str, Floats]
    tokens: NDArray[np.int64] | None
    texts: list[str] | None = None
    mask: NDArray[np.bool_] | None = None
    id: str | None = None
    step: int | None = None
    lag: float | None = None
    prompt: int | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Names:
    """Fields named on the command line; dots reach into objects ("extra.logprobs"). None: recognised."""

    train: str | None = None
    rollout: str | None = None
    tokens: str | None = None
    id: str | None = None
    step: str | None = None


def read_record(line: dict[str, Any], names: Names) -> Record:
    """Raises LayoutError where the line holds no log-probs, or none that fit its tokens."""
    if names.train or names.rollout:
        return _flat(line, names)
    for recognises, read in _NESTED:
        if recognises(line):
            return _common(read(line), line, names)
    return _flat(line, names)


# -- servers and engines ------------------------------------------------------------------------------------------


def _is_sglang(line: dict[str, Any]) -> bool:
    return isinstance(line.get("meta_info"), dict) and "output_token_logprobs" in line["meta_info"]


def _sglang(line: dict[str, Any]) -> Record:
    """`/generate` with return_logprob: meta_info.output_token_logprobs is a list of [log-prob, token id, text]."""
    entries = line["meta_info"]["output_token_logprobs"]
    if not isinstance(entries, list) or not all(isinstance(e, (list, tuple)) and len(e) >= 2 for e in entries):
        raise LayoutError("meta_info.output_token_logprobs is no list of [log-prob, token id, text]")
    texts = [e[2] for e in entries if len(e) > 2 and isinstance(e[2], str)]
    return Record(
        "sglang",
        {"any": _floats([e[0] for e in entries], "meta_info.output_token_logprobs")},
        _ints([e[1] for e in entries], "meta_info.output_token_logprobs"),
        texts if len(texts) == len(entries) else None,
    )


def _is_openai(line: dict[str, Any]) -> bool:
    choices = line.get("choices")
    return isinstance(choices, list) and bool(choices) and isinstance(choices[0], dict)


def _openai(line: dict[str, Any]) -> Record:
    """An OpenAI-compatible completion or chat completion, as `vllm serve` and SGLang answer it.

    Token ids: choices[0].token_ids (return_token_ids), or texts "token_id:123" (return_tokens_as_token_ids).
    """
    choice = line["choices"][0]
    if len(line["choices"]) > 1:
        raise LayoutError(f"holds {len(line['choices'])} choices; write one sample a line")
    given = choice.get("logprobs")
    if not isinstance(given, dict):
        raise LayoutError("has no choices[0].logprobs; ask the server for log-probs")
    if isinstance(given.get("content"), list):  # chat
        values = [entry.get("logprob") for entry in given["content"]]
        texts = [str(entry.get("token", "")) for entry in given["content"]]
    else:
        values, texts = given.get("token_logprobs", []), [str(t) for t in given.get("tokens") or []]
    if not isinstance(values, list) or not values:
        raise LayoutError("has neither choices[0].logprobs.content nor choices[0].logprobs.token_logprobs")
    ids = choice.get("token_ids")
    if ids is None and texts and all(t.startswith("token_id:") for t in texts):
        ids = [int(t.removeprefix("token_id:")) for t in texts]
    tokens = None if ids is None else _ints(ids, "choices[0].token_ids")
    texts = [] if texts and texts[0].startswith("token_id:") else texts
    return Record("openai", {"any": _floats(values, "choices[0].logprobs")}, tokens, texts or None)


def _is_vllm(line: dict[str, Any]) -> bool:
    outputs = line.get("outputs")
    return isinstance(outputs, list) and bool(outputs) and isinstance(outputs[0], dict) and "logprobs" in outputs[0]


def _vllm(line: dict[str, Any]) -> Record:
    """vLLM's RequestOutput: outputs[0].token_ids, and outputs[0].logprobs a dict of token id to Logprob a position."""
    if len(line["outputs"]) > 1:
        raise LayoutError(f"holds {len(line['outputs'])} outputs; write one sample a line")
    output = line["outputs"][0]
    tokens = _ints(output.get("token_ids"), "outputs[0].token_ids")
    values = [_of_token(at, token) for at, token in zip(output["logprobs"] or [], tokens.tolist(), strict=False)]
    return Record("vllm", {"any": _floats(values, "outputs[0].logprobs")}, tokens)


def _of_token(entry: Any, token: int) -> Any:
    if not isinstance(entry, dict):
        return entry
    found = entry.get(str(token))
    if found is None:
        raise LayoutError(f"outputs[0].logprobs lacks the sampled token {token}")
    return found.get("logprob") if isinstance(found, dict) else found


_NESTED: tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], Record]], ...] = (
    (_is_sglang, _sglang),
    (_is_openai, _openai),
    (_is_vllm, _vllm),
)


# -- flat records: trainers, transformers, anything else --------------------------------------------------------------


def _flat(line: dict[str, Any], names: Names) -> Record:
    columns: dict[str, Floats] = {}
    for role, named, known in (
        ("train", names.train, TRAIN_FIELDS),
        ("rollout", names.rollout, ROLLOUT_FIELDS),
        ("any", None, ANY_FIELDS),
    ):
        name = named or (None if names.train or names.rollout else _first(line, known))
        if name is None or (named and _get(line, named) is None):
            continue
        columns[role] = _floats(_get(line, name), name)
    if "rollout" in columns and "any" in columns and "train" not in columns:
        columns["train"] = columns.pop("any")  # slime's and others' plain log_probs are the trainer's
    if not columns:
        wanted = names.train or names.rollout
        raise LayoutError(
            f"has no field {wanted}" if wanted else f"has no log-probs; known fields are {', '.join(_all_logprobs())}"
        )
    name = names.tokens or _first(line, TOKEN_FIELDS)
    value = None if name is None else _get(line, name)
    tokens = None
    if isinstance(value, list) and not (value and isinstance(value[0], str)):
        tokens = _ints(value, str(name))
    record = Record(_layout_name(line), columns, tokens)
    if isinstance(value, list) and value and isinstance(value[0], str):
        record.texts = [str(v) for v in value]
    return _common(record, line, names)


def _layout_name(line: dict[str, Any]) -> str:
    if "response_length" in line and "tokens" in line:
        return "slime"
    if "responses" in line or "old_log_probs" in line:
        return "verl"
    if "transition_scores" in line or "sequences" in line:
        return "transformers"
    return "plain"


def _all_logprobs() -> Iterable[str]:
    return (*TRAIN_FIELDS, *ROLLOUT_FIELDS, *ANY_FIELDS)


def _common(record: Record, line: dict[str, Any], names: Names) -> Record:
    """Fits tokens, mask and log-probs to one another, and takes what says where the sample belongs."""
    n = max(len(v) for v in record.logprobs.values())
    if any(len(v) != n for v in record.logprobs.values()):
        sizes = ", ".join(f"{len(v)} {k}" for k, v in record.logprobs.items())
        raise LayoutError(f"has log-prob columns of different lengths ({sizes})")
    declared = _first(line, LENGTH_FIELDS)
    if record.tokens is not None and len(record.tokens) != n:
        front = record.tokens[: max(0, len(record.tokens) - n)]
        record.prompt = hash(front.tobytes()) if len(front) > 1 else None
        record.tokens = _last(record.tokens, n, declared is not None and _get(line, declared) == n)
    if record.texts is not None and len(record.texts) != n:
        record.texts = None
    mask = _first(line, MASK_FIELDS)
    if mask is not None:
        values = _floats(_get(line, mask), mask)
        if len(values) < n:
            raise LayoutError(f"has {n} log-probs and {len(values)} entries in {mask}")
        last = values[len(values) - n :]
        record.mask = np.isfinite(last) & (last > 0)
    meta = line.get("meta_info") if isinstance(line.get("meta_info"), dict) else {}
    both = {**(meta or {}), **line}
    name = names.id or _first(both, ID_FIELDS)
    identity = None if name is None else _get(both, name)
    record.id = None if identity is None or isinstance(identity, (list, dict)) else str(identity)
    record.step = _whole(_get(both, names.step or _first(both, STEP_FIELDS)))
    record.lag = _lag(both)
    prompt = _get(both, _first(both, PROMPT_FIELDS))
    record.prompt = record.prompt if prompt is None else hash(str(prompt))
    temperature = _get(both, _first(both, TEMPERATURE_FIELDS))
    record.temperature = _version(temperature)
    return record


def _last(tokens: NDArray[np.int64], n: int, declared: bool) -> NDArray[np.int64]:
    """The last n tokens: prompt and response in one list, or a first token that nothing predicts."""
    extra = len(tokens) - n
    if extra < 0:
        raise LayoutError(f"has {n} log-probs for {len(tokens)} tokens")
    return tokens[extra:]


def _lag(line: dict[str, Any]) -> float | None:
    given = _get(line, _first(line, LAG_FIELDS))
    if isinstance(given, (int, float)):
        return _version(given)
    mine = _version(_get(line, _first(line, VERSION_FIELDS)))
    trainer = _version(_get(line, _first(line, TRAIN_VERSION_FIELDS)))
    return None if mine is None or trainer is None else trainer - mine


def _version(value: Any) -> float | None:
    if isinstance(value, list):
        known = [v for v in map(_version, value) if v is not None]
        return min(known) if known else None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _whole(value: Any) -> int | None:
    try:
        whole = None if value is None or isinstance(value, (list, dict)) else int(float(value))
        return whole if whole is None or _INT64.min <= whole <= _INT64.max else None
    except (TypeError, ValueError, OverflowError):
        return None


def _first(line: dict[str, Any], known: Sequence[str]) -> str | None:
    for name in known:  # a plain loop: this is called a dozen times a line
        if name in line and line[name] is not None:
            return name
    return None


def _get(line: dict[str, Any], name: str | None) -> Any:
    if name is None:
        return None
    if name in line:
        return line[name]
    value: Any = line
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _floats(values: Any, name: str) -> Floats:
    if not isinstance(values, list):
        raise LayoutError(f"has a {type(values).__name__} in {name}, not a list with a log-prob for each token")
    if values and isinstance(values[0], list):
        raise LayoutError(f"has a list of lists in {name}; write one sample a line")
    try:
        out = np.array([np.nan if v is None else float(v) for v in values], dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise LayoutError(f"has an entry in {name} that is no number") from None
    undefined = np.isnan(out)
    if undefined.any():
        undefined &= np.array([v is not None for v in values])
    out[undefined | (out >= -ABSENT_LOGPROB)] = np.inf
    out[out <= ABSENT_LOGPROB] = -np.inf
    return out


def _ints(values: Any, name: str) -> NDArray[np.int64]:
    if not isinstance(values, list):
        raise LayoutError(f"has no list of token ids in {name}")
    if values and isinstance(values[0], list):
        raise LayoutError(f"has a list of lists in {name}; write one sample a line")
    try:
        out = np.array([int(v) for v in values], dtype=np.int64)
        if any(isinstance(v, float) and v != int(v) for v in values):
            raise ValueError
        return out
    except (TypeError, ValueError, OverflowError):
        raise LayoutError(f"has an entry in {name} that is no token id") from None
