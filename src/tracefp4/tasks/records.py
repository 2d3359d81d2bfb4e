"""From the rows of a data file to problems: which fields hold what, and how a reference answer is written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tracefp4.config import did_you_mean
from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Message, Prompt, TaskConfig
from tracefp4.tasks.extract import extract_answer
from tracefp4.tasks.pool import held_out_flags, stable_hash
from tracefp4.tasks.rows import Row, plain, read_rows

PROMPT_FIELDS = ("prompt", "question", "problem", "messages")
ANSWER_FIELDS = ("reward_model.ground_truth", "answer", "solution", "ground_truth")
ROLES = ("system", "user", "assistant", "tool")

_NUMBER = re.compile(r"[-+]?\$?(\d[\d,]*(\.\d+)?|\.\d+)(\s*/\s*\d+)?(e[-+]?\d+)?%?", re.IGNORECASE)

ReferenceForm = Literal["plain", "hashes", "boxed"]


class FileConfig(TaskConfig):
    """A file of problems, which fields of its rows hold what, and what is held out of it.

    path, test_path: JSON lines (also gzipped), CSV or Parquet. test_share, test_size: what is held out of ``path``
    where there is no test_path, chosen by a hash of each prompt. prompt_field, answer_field, messages_field: dotted
    for nested fields ("reward_model.ground_truth"); empty: found by themselves. template: how a prompt's text is put
    to the policy, with ``{prompt}`` in it. system: a system message in front.
    """

    path: str = Field(min_length=1)
    test_path: str = ""
    test_share: float = Field(default=0.0, ge=0, lt=1)
    test_size: int = Field(default=0, ge=0)
    prompt_field: str = ""
    answer_field: str = ""
    messages_field: str = ""
    template: str = "{prompt}"
    system: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("test_path", "test_share", "test_size") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say what is held out; give one of them")
        if self.prompt_field and self.messages_field:
            raise ValueError("prompt_field and messages_field both say where the prompt is; give one of them")
        if "{prompt}" not in self.template:
            raise ValueError(f"template {self.template!r} must hold {{prompt}}, where the prompt's text goes")
        return self

    @property
    def needs_answer(self) -> bool:
        """Whether each row must have a reference answer; a row's tests, say, can take its place."""
        return True


@dataclass(frozen=True)
class Layout:
    """Where a file's rows hold what, decided on its first row and required of the others.

    prompt: a field of text, or of chat messages where ``chat``. answer: a field, or "" where the last assistant
    message is the reference. form: how the reference stands in that field: by itself, after ``####``, in ``\\boxed{}``.
    """

    prompt: str
    chat: bool
    answer: str
    form: ReferenceForm

    def __str__(self) -> str:
        source = f"the answer from {self.answer}" if self.answer else "the answer from the last assistant message"
        how = {"plain": "", "hashes": " after ####", "boxed": " in \\boxed{}"}[self.form]
        return f"the prompt from {self.prompt}, {source}{how}"


@dataclass
class Problems:
    """What a file gave: disjoint problems, and how many rows were left out because they repeat another prompt."""

    train: list[Prompt]
    test: list[Prompt]
    layout: Layout
    repeated: int = 0
    leaked: int = 0
    """training rows left out because their prompt is held out"""


def load_problems(config: FileConfig) -> Problems:
    """Reads ``config.path`` (and ``test_path``) into problems with distinct prompts, training and held-out apart.

    Raises:
        TracefpError: a file or a row cannot be used; the message names the file and the line.
    """
    train, layout, repeated = _read_problems(config, Path(config.path), "task.path", "train")
    leaked = 0
    if config.test_path:
        test, _, more = _read_problems(config, Path(config.test_path), "task.test_path", "test")
        repeated += more
        kept = {key: prompt for key, prompt in train.items() if key not in test}
        leaked, train = len(train) - len(kept), kept
    else:
        keys = list(train)
        flags = held_out_flags(keys, config.test_share, config.test_size)
        test = {key: train.pop(key) for key, held_out in zip(keys, flags, strict=True) if held_out}
    # In the order of their hashes, not the file's: the first n of a sorted file would be its easiest.
    held_out_prompts = [test[key] for key in sorted(test, key=stable_hash)]
    return Problems(list(train.values()), held_out_prompts, layout, repeated, leaked)


def _read_problems(config: FileConfig, path: Path, key: str, split: str) -> tuple[dict[str, Prompt], Layout, int]:
    """Problems by their prompt's key (white space folded), the layout, and the number of repeated prompts."""
    rows = read_rows(path, key)
    layout = find_layout(config, rows[0])
    problems: dict[str, Prompt] = {}
    answer_kind: tuple[str, str] | None = None  # "text" or "a number", and the first row's place
    for number, row in enumerate(rows, start=1):
        values = row.values
        raw = _field(row, layout.prompt)
        messages = _messages(row, layout, raw) if layout.chat else None
        if messages is None and not isinstance(raw, str):
            raise TracefpError(f"{row.where}: {layout.prompt} is {_kind(raw)}, in {rows[0].where} it is text")
        written = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
        answer = _field(row, layout.answer) if layout.answer else written
        if answer is None and config.needs_answer:
            raise TracefpError(f"{row.where}: the last message is not the assistant's, and there is no answer field")
        if messages is not None and not any(m["role"] == "user" for m in messages):
            raise TracefpError(f"{row.where}: {layout.prompt} has no message of the user")
        kind = _kind(answer)
        answer_kind = answer_kind or (kind, row.where)
        if kind != answer_kind[0]:
            raise TracefpError(f"{row.where}: {layout.answer} is {kind}, in {answer_kind[1]} it is {answer_kind[0]}")
        reference = _reference(row, layout, answer, config.needs_answer)
        text, chat = _prompt(config, row, layout, raw, messages)
        identity = " ".join(str(raw).split()) if messages is None else json.dumps(messages, sort_keys=True)
        used = {layout.prompt.split(".")[0], layout.answer if layout.form == "plain" else ""}
        metadata = {name: plain(value) for name, value in values.items() if name not in used}
        problems.setdefault(identity, Prompt(f"{split}-{number}", text, reference, metadata, chat))
    return problems, layout, len(rows) - len(problems)


def find_layout(config: FileConfig, first: Row) -> Layout:
    """The layout that the config names, and the rest found on the first row.

    Raises:
        TracefpError: no field can be the prompt or the answer; the message lists the row's fields.
    """
    prompt = config.messages_field or config.prompt_field
    if not prompt:
        prompt = next((name for name in PROMPT_FIELDS if _has(first, name)), "")
        if not prompt:
            raise TracefpError(
                f"{first.where} has no field that could be the prompt ({', '.join(PROMPT_FIELDS)}); its fields are "
                f"{_names(first)}: name one in task.prompt_field{_header_hint(first)}"
            )
    chat = bool(config.messages_field) or isinstance(_field(first, prompt), list)
    answer = config.answer_field
    if not answer:
        answer = next((name for name in ANSWER_FIELDS if name != prompt and _has(first, name)), "")
        if not answer and not chat and config.needs_answer:
            raise TracefpError(
                f"{first.where} has no field that could be the answer ({', '.join(ANSWER_FIELDS)}); its fields are "
                f"{_names(first)}: name one in task.answer_field"
            )
    reference = _field(first, answer) if answer else None
    return Layout(prompt, chat, answer, _form(reference))


def _form(reference: Any) -> ReferenceForm:
    if isinstance(reference, str) and extract_answer(reference, "hashes") is not None:
        return "hashes"
    if isinstance(reference, str) and extract_answer(reference, "boxed") is not None:
        return "boxed"
    return "plain"


def _reference(row: Row, layout: Layout, answer: Any, needed: bool) -> str:
    name = layout.answer or layout.prompt
    if not needed and not isinstance(answer, str):
        return "" if answer is None else json.dumps(plain(answer))  # tests, for example
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, float) and math.isfinite(answer):
        return str(int(answer)) if answer.is_integer() else repr(answer)
    text = _checked_text(row, name, answer).strip()
    if layout.form == "plain":
        return text
    found = extract_answer(text, layout.form)
    if found is None:
        marker = "####" if layout.form == "hashes" else "\\boxed{}"
        raise TracefpError(f"{row.where}: {name} has no answer after {marker}, unlike the file's first row")
    return found


def _messages(row: Row, layout: Layout, raw: Any) -> list[Message]:
    if not isinstance(raw, list) or not raw:
        what = "an empty list" if raw == [] else _kind(raw)
        raise TracefpError(f"{row.where}: {layout.prompt} is {what}, not a list of chat messages")
    messages = []
    for message in raw:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise TracefpError(f"{row.where}: each message of {layout.prompt} must have a role and a content")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            near = did_you_mean(str(role), list(ROLES))
            raise TracefpError(f"{row.where}: {layout.prompt} has a message of role {role!r}{near}")
        messages.append({"role": role, "content": _checked_text(row, f"{layout.prompt}.content", content)})
    return messages


def _prompt(
    config: FileConfig, row: Row, layout: Layout, raw: Any, messages: list[Message] | None
) -> tuple[str, tuple[Message, ...] | None]:
    """(text, messages): the template around the user's last message, the system message in front.

    The text, for tokenizers without a chat template, is the contents of the messages with blank lines between them.
    """
    chat = [{"role": "user", "content": _checked_text(row, layout.prompt, raw)}] if messages is None else messages
    last = max((i for i, m in enumerate(chat) if m["role"] == "user"), default=-1)
    chat = [
        {**m, "content": config.template.replace("{prompt}", m["content"])} if i == last else m
        for i, m in enumerate(chat)
    ]
    if config.system and chat[0]["role"] != "system":
        chat = [{"role": "system", "content": config.system}, *chat]
    return "\n\n".join(m["content"] for m in chat), tuple(chat)


def _field(row: Row, name: str) -> Any:
    """The value at a dotted name; a null one is an error too."""
    value = _lookup(row.values, name)
    if value is _ABSENT:
        raise TracefpError(f"{row.where} has no field {name}; its fields are {_names(row)}")
    if value is None:
        raise TracefpError(f"{row.where}: {name} is null")
    return value


def _has(row: Row, name: str) -> bool:
    return _lookup(row.values, name) is not _ABSENT


_ABSENT = object()


def _lookup(values: Any, name: str) -> Any:
    if isinstance(values, dict) and name in values:
        return values[name]
    head, dot, rest = name.partition(".")
    return _lookup(values.get(head), rest) if dot and isinstance(values, dict) else _ABSENT


def _names(row: Row) -> str:
    names = [str(name)[:40] for name in row.values]
    return (", ".join(names[:12]) + (", ..." if len(names) > 12 else "")) or "none"


def _header_hint(row: Row) -> str:
    csv = " row " in row.where and ".csv" in row.where.lower()
    return ", or give the file a first line of column names" if csv else ""


def _checked_text(row: Row, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TracefpError(f"{row.where}: {name} is {_kind(value)}, not text")
    if not value.strip():
        raise TracefpError(f"{row.where}: {name} is empty")
    if re.search("[\ud800-\udfff]", value):
        raise TracefpError(f"{row.where}: {name} holds half of a surrogate pair, which is no character")
    return value


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number" if math.isfinite(value) else str(value)
    return {str: "text", list: "a list", dict: "an object", type(None): "null"}.get(type(value), type(value).__name__)


def looks_like_a_number(answer: str) -> bool:
    """As "42", "-1,250.50", "3/4", "$12" and "15%" do."""
    return _NUMBER.fullmatch(answer.strip()) is not None


def all_numbers(prompts: Sequence[Prompt]) -> bool:
    return all(looks_like_a_number(prompt.answer) for prompt in prompts)
