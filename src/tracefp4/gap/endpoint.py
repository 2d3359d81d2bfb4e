"""Asks an OpenAI-compatible server: several requests at a time, retries with backoff, keys that never show.

What goes wrong with one request is a `Failure`, and that answer is missing; what would go wrong with every request (the
wrong key, an unknown model, a server that is not there) is a TracefpError.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any

import httpx

from tracefp4.errors import TracefpError
from tracefp4.gap.answers import Answer, Failure, Sampling
from tracefp4.gap.forms import EndpointForm
from tracefp4.tasks.base import Message

MAX_BODY = 64 << 20
FIRST_WAIT, LONGEST_WAIT, LONGEST_ASKED = 0.5, 30.0, 600.0
HOPELESS = 20
"""Requests that fail one after another, none succeeding meanwhile, before the run stops."""

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_WRONG_FOR_ALL = frozenset({401, 403, 404, 405})
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Ask:
    """One request: a body for ``path``; the endpoint adds the model."""

    path: str
    body: dict[str, Any]


class _Refused(Exception):
    """A request that failed. retry_after: seconds the server asked for."""

    def __init__(self, reason: str, *, status: int = 0, retry: bool = False, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.status, self.retry, self.retry_after = status, retry, retry_after


class Endpoint:
    """One server and model.

    concurrency: requests at a time; timeout: seconds of one, to its last byte; retries: after the first try.
    Raises TracefpError where a key is named and not set.
    """

    def __init__(self, form: EndpointForm, concurrency: int = 8, timeout: float = 120.0, retries: int = 5) -> None:
        self.form, self.concurrency, self.timeout, self.retries = form, concurrency, timeout, retries
        self._key = form.key()
        self.retried = 0
        self._failed_in_row = 0
        self._succeeded = False
        self._unsupported: set[str] = set()
        self._sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __repr__(self) -> str:
        return f"Endpoint({self.form.text})"

    def run(self, asks: Iterable[Ask], done: Callable[[int, dict[str, Any] | Failure, float], None]) -> None:
        """Sends all; calls ``done`` with each one's number, its JSON object or a Failure, and the last try's seconds.

        ``done`` runs in this thread, in the order of completion, between two requests: it may write to disk. Raises
        TracefpError for what no request can succeed with, and once ``HOPELESS`` in a row have failed.
        """
        asyncio.run(self._run(iter(enumerate(asks)), done))

    async def _run(
        self, asks: Iterable[tuple[int, Ask]], done: Callable[[int, dict[str, Any] | Failure, float], None]
    ) -> None:
        feed = iter(asks)

        async def work() -> None:
            for number, ask in feed:  # shared by all workers: each takes the next
                found, seconds = await self._with_retries(client, ask)
                done(number, found, seconds)
                self._watch(found)

        async with self._client() as client:
            tasks = [asyncio.create_task(work()) for _ in range(self.concurrency)]
            try:
                await asyncio.gather(*tasks)
            except KeyboardInterrupt:
                return  # a signal that struck a task has left the loop already; raised again, it is logged as lost
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(
            headers=headers, limits=limits, timeout=None, follow_redirects=False, verify=_certificates()
        ) as client:
            yield client

    def _watch(self, found: dict[str, Any] | Failure) -> None:
        """Ends a run in which nothing succeeds any more."""
        if not isinstance(found, Failure):
            self._failed_in_row, self._succeeded = 0, True
            return
        if found.final and self._succeeded:
            return  # the inquiry's fault, not the server's
        self._failed_in_row += 1
        if self._failed_in_row >= HOPELESS:
            raise TracefpError(
                f"{self.form.text}: {HOPELESS} requests in a row have failed, the last: {found.reason}; when the "
                "server answers again, go on with --resume"
            )

    async def _with_retries(self, client: httpx.AsyncClient, ask: Ask) -> tuple[dict[str, Any] | Failure, float]:
        """(what came of it, seconds of the last try)."""
        wait = FIRST_WAIT
        for attempt in range(self.retries + 1):
            started = time.perf_counter()
            try:
                return await self._send(client, ask), time.perf_counter() - started
            except _Refused as error:
                self._check_common(error)
                if not error.retry:
                    return Failure(str(error), final=error.status in (400, 413, 422)), time.perf_counter() - started
                if attempt == self.retries:
                    tries = f" ({attempt + 1} tries)" if attempt else ""
                    return Failure(str(error) + tries), time.perf_counter() - started
                self.retried += 1
                asked = error.retry_after
                await self._sleep(wait * random.uniform(0.75, 1.25) if asked is None else min(asked, LONGEST_ASKED))
                wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError("unreachable")

    def _check_common(self, error: _Refused) -> None:
        if error.status in _WRONG_FOR_ALL or 300 <= error.status < 400:
            key = "is the key right (key_env)? " if error.status in (401, 403) else ""
            raise TracefpError(f"{self.form.text}: {error}: {key}is the URL right, and the model's name?")

    async def _send(self, client: httpx.AsyncClient, ask: Ask) -> dict[str, Any]:
        """The JSON object of one try. A server that refuses an optional key is asked without it from then on."""
        body = {"model": self.form.model, **{k: v for k, v in ask.body.items() if k not in self._unsupported}}
        try:
            status, headers, data = await self._post(client, ask.path, body)
        except TimeoutError:
            raise _Refused(f"no answer within {self.timeout:g} s", retry=True) from None
        except httpx.HTTPError as error:
            raise _Refused(f"{type(error).__name__}: {self._shown(str(error))}", retry=True) from None
        if status != 200:
            text = self._shown(data[:2000].decode(errors="replace"))
            refused = [key for key in OPTIONAL if key in body and key in text] if status in (400, 422) else []
            if refused:
                self._unsupported.update(refused)
                return await self._send(client, ask)
            after = _retry_after(headers.get("retry-after"))
            raise _Refused(f"HTTP {status}: {text}", status=status, retry=status in _RETRIED, retry_after=after)
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _Refused(
                f"the answer is no JSON object: {self._shown(data[:200].decode(errors='replace'))}", retry=True
            )
        if "choices" not in found and "error" in found:  # some servers report errors under status 200
            raise _Refused(f"error: {self._shown(json.dumps(found['error']))}", retry=True)
        return found

    async def _post(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any]
    ) -> tuple[int, httpx.Headers, bytes]:
        # One clock for all of it: a server that sends a byte now and then would never meet a timeout of each read.
        async with asyncio.timeout(self.timeout), client.stream("POST", self.form.url + path, json=body) as response:
            data = bytearray()
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > MAX_BODY:
                    raise _Refused(f"the answer is larger than {MAX_BODY >> 20} MiB", retry=True)
            return response.status_code, response.headers, bytes(data)

    def _shown(self, text: str) -> str:
        """A server's text as part of a sentence: short, and without the key, which some servers repeat."""
        if self._key:
            text = text.replace(self._key, "***")
        text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
        return text if len(text) <= 300 else text[:300] + "..."


@lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    """httpx's own; read once: that takes longer than some requests, and clients come and go."""
    return httpx.create_ssl_context()


OPTIONAL = ("logprobs", "return_tokens_as_token_ids", "seed", "top_p", "max_tokens", "max_completion_tokens")
"""Keys of a request that a server may not know; each is left out once it has refused it."""


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None where there is none that can be read."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


# -- chat and completions ---------------------------------------------------------------------------------------------


def ask_for(messages: Sequence[Message], sampling: Sampling, seed: int, logprobs: bool) -> Ask:
    """The request of one answer: a chat, or the plain text where chat is "off"."""
    body: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
    }
    if sampling.chat == "off":
        body["prompt"] = "\n\n".join(m["content"] for m in messages)
        if logprobs:
            body |= {"logprobs": 1, "return_tokens_as_token_ids": True}
        return Ask("/completions", body)
    body["messages"] = list(messages)
    if logprobs:
        body |= {"logprobs": True, "return_tokens_as_token_ids": True}
    return Ask("/chat/completions", body)


def read_answer(found: dict[str, Any] | Failure, seconds: float) -> Answer | Failure:
    """The answer of a server's JSON object; a Failure where it does not hold one."""
    if isinstance(found, Failure):
        return found
    try:
        choice = found["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        finish = choice.get("finish_reason")
        usage = found.get("usage") or {}
        counts = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    except (KeyError, IndexError, TypeError, AttributeError):
        return Failure("the answer holds no choices[0] with a text")
    if text is None:  # tool calls, or reasoning that ran into the limit
        text = ""
    if not isinstance(text, str):
        return Failure(f"the answer's text is {type(text).__name__}")
    if finish is None:
        return Failure("the answer was cut off: it has no finish_reason")
    prompt_tokens, tokens = (c if type(c) is int and 0 <= c <= MAX_BODY else None for c in counts)
    answer = Answer(_whole(text), _whole(str(finish)), seconds, prompt_tokens, tokens)
    return _with_logprobs(answer, choice.get("logprobs"))


def _whole(text: str) -> str:
    """With U+FFFD for halves of UTF-16 pairs: JSON can carry them (a token may end within an emoji), UTF-8 cannot."""
    return _SURROGATE.sub("\ufffd", text)


def _with_logprobs(answer: Answer, raw: Any) -> Answer:
    """With what the server says of tokens, where it says it of every one; a half of it is left out."""
    try:
        if raw.get("content") is not None:
            pieces = [_whole(str(entry["token"])) for entry in raw["content"]]
            logprobs = [float(entry["logprob"]) for entry in raw["content"]]
        else:
            pieces, logprobs = [_whole(str(t)) for t in raw["tokens"]], [float(v) for v in raw["token_logprobs"]]
    except (AttributeError, KeyError, TypeError, ValueError):
        return answer
    if not pieces or len(pieces) != len(logprobs) or not all(map(math.isfinite, logprobs)):
        return answer
    ids = None
    if all(piece.startswith("token_id:") and piece[9:].isdigit() for piece in pieces):
        ids = [int(piece[9:]) for piece in pieces]
    return replace(answer, token_ids=ids, pieces=None if ids else pieces, logprobs=logprobs)


def ask_scores(prompt: Sequence[int], response: Sequence[int]) -> Ask:
    """The request for log-probs of given tokens, as vLLM answers it."""
    body = {"prompt": [*prompt, *response], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    return Ask("/completions", body)


def read_scores(found: dict[str, Any] | Failure, response: Sequence[int]) -> list[float] | None:
    """Log-probs of the response's tokens; None where the server does not give them."""
    try:
        entries = found["choices"][0]["prompt_logprobs"][-len(response) :]  # type: ignore[index]
        values = [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, response, strict=True)]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None
    return values if all(map(math.isfinite, values)) else None
