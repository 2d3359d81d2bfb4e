"""Servers that time out, send garbage, refuse, cut off or lack log-probs."""

from __future__ import annotations

import gc
import json
import signal
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from gap_server import Bad, completion, fake_server
from tracefp4.errors import TracefpError
from tracefp4.gap.answers import Answer, Failure, Sampling
from tracefp4.gap.endpoint import HOPELESS, Endpoint, _retry_after, ask_for, ask_scores, read_answer, read_scores
from tracefp4.gap.forms import EndpointForm, parse_form
from tracefp4.signals import Stopped

HI = [{"role": "user", "content": "Hi"}]
KEY = "sk-very-secret"


def endpoint(url: str, **options: Any) -> Endpoint:
    form = parse_form("--serve-form", f"{url}?model=m")
    assert isinstance(form, EndpointForm)
    made = Endpoint(form, **{"concurrency": 2, "timeout": 5.0, "retries": 3, **options})

    async def no_wait(seconds: float) -> None:
        waits.append(seconds)

    waits: list[float] = []
    made._sleep = no_wait
    made.waits = waits  # type: ignore[attr-defined]
    return made


def ask(
    made: Endpoint, count: int = 1, logprobs: bool = False, sampling: Sampling | None = None
) -> list[Answer | Failure]:
    found: dict[int, Answer | Failure] = {}
    asks = [ask_for(HI, sampling or Sampling(), seed, logprobs) for seed in range(count)]
    made.run(asks, lambda number, reply, seconds: found.__setitem__(number, read_answer(reply, seconds)))
    return [found[number] for number in range(count)]


def test_answers_come_with_their_counts_and_requests_hold_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with fake_server(lambda body, n: f"seed {body['seed']}") as server:
        answers = ask(endpoint(server.url), 5, sampling=Sampling(temperature=0.5, max_new_tokens=9))
    assert [a.text for a in answers if isinstance(a, Answer)] == [f"seed {i}" for i in range(5)]
    assert isinstance(answers[0], Answer)
    assert (answers[0].prompt_tokens, answers[0].tokens, answers[0].finish) == (7, 2, "stop")
    first = server.requests[0]
    assert (first["model"], first["temperature"], first["max_tokens"], first["messages"]) == ("m", 0.5, 9, HI)
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_plain_text_goes_to_completions() -> None:
    reply = {
        "choices": [
            {"text": " there", "finish_reason": "length", "logprobs": {"tokens": [" there"], "token_logprobs": [-0.5]}}
        ]
    }
    with fake_server(lambda body, n: reply) as server:
        (answer,) = ask(endpoint(server.url), logprobs=True, sampling=Sampling(chat="off"))
    assert isinstance(answer, Answer)
    assert (answer.text, answer.finish, answer.tokens, answer.logprobs) == (" there", "length", None, [-0.5])
    assert server.requests[0]["path"] == "/v1/completions"
    assert server.requests[0]["prompt"] == "Hi"


@pytest.mark.parametrize(
    "bad",
    [
        Bad(429, b"slow down"),
        Bad(500, b"oops"),
        Bad(503, b""),
        Bad(body=b"\x00\xff garbage"),
        Bad(body=b"[1, 2]"),
        Bad(body=b'{"choices": [{"mess', cut=True),
        Bad(body=b'{"error": {"message": "overloaded"}}'),
    ],
)
def test_what_may_pass_is_tried_again(bad: Bad) -> None:
    with fake_server(lambda body, n: "fine" if n == 2 else bad) as server:
        made = endpoint(server.url)
        (answer,) = ask(made)
    assert isinstance(answer, Answer)
    assert answer.text == "fine"
    assert made.retried == len(made.waits) == 2  # type: ignore[attr-defined]
    assert 0.3 < made.waits[0] < made.waits[1] < 1.3  # type: ignore[attr-defined]


def test_a_server_that_hangs_or_drips_runs_out_of_time() -> None:
    for bad in (Bad(hang=3.0), Bad(body=b"{", drip=0.1)):
        with fake_server(lambda body, n, bad=bad: bad) as server:
            started = time.perf_counter()
            (answer,) = ask(endpoint(server.url, timeout=0.3, retries=1))
        assert isinstance(answer, Failure)
        assert answer.reason == "no answer within 0.3 s (2 tries)"
        assert time.perf_counter() - started < 3


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"choices": []},
        {"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]},
        completion("half", finish=None),
    ],
)  # type: ignore[arg-type]
def test_an_answer_without_a_text_or_an_end_is_missing(reply: dict[str, Any]) -> None:
    with fake_server(lambda body, n: reply) as server:
        (answer,) = ask(endpoint(server.url))
    assert isinstance(answer, Failure)


def test_half_a_surrogate_pair_and_infinite_log_probs_can_be_written() -> None:
    reply = completion("a\ud83d b", [("a\ud83d", -0.1), (" b", float("-inf"))])
    reply["usage"] = {"prompt_tokens": -5, "completion_tokens": 10**30}
    with fake_server(lambda body, n: reply if n == 0 else Bad(500, b'{"error": "\\ud83d"}')) as server:
        answer, failure = ask(endpoint(server.url, concurrency=1, retries=0), 2, logprobs=True)
    assert isinstance(answer, Answer)
    assert (answer.text, answer.logprobs, answer.prompt_tokens, answer.tokens) == ("a\ufffd b", None, None, None)
    assert isinstance(failure, Failure)
    assert read_scores({"choices": [{"prompt_logprobs": [{"4": {"logprob": float("nan")}}]}]}, [4]) is None
    json.dumps([answer.as_dict(), failure.reason], allow_nan=False, ensure_ascii=False).encode()


def test_a_signal_between_two_answers_is_raised_once(caplog: pytest.LogCaptureFixture) -> None:
    def stop(number: int, found: Any, seconds: float) -> None:
        raise Stopped(signal.SIGTERM)

    with fake_server(lambda body, n: "fine") as server, pytest.raises(Stopped):
        endpoint(server.url).run([ask_for(HI, Sampling(), n, False) for n in range(9)], stop)
    gc.collect()  # asyncio logs an exception that nobody took once its task is gone
    assert not caplog.records


def test_retry_after_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server(lambda body, n: "fine" if n else Bad(429, headers={"Retry-After": "17"})) as server:
        made = endpoint(server.url)
        assert isinstance(ask(made)[0], Answer)
    assert made.waits == [17.0]  # type: ignore[attr-defined]
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 25 < (_retry_after(date) or 0) <= 30
    assert _retry_after("soon") is _retry_after(None) is None


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_what_is_wrong_for_all_requests_ends_the_run_and_shows_no_key(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with fake_server(lambda body, n: Bad(status, f"wrong key {KEY}".encode(), {"Location": "/x"})) as server:
        made = endpoint(server.url)
        with pytest.raises(TracefpError, match=f"HTTP {status}") as error:
            ask(made, 5)
    assert KEY not in str(error.value) + repr(made) + repr(made.form)
    assert len(server.requests) <= 2


def test_a_refused_inquiry_is_missing_and_the_others_go_on() -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        return Bad(400, b"context_length_exceeded") if body["seed"] == 1 else "fine"

    with fake_server(script) as server:
        answers = ask(endpoint(server.url), 3)
    assert [isinstance(a, Answer) for a in answers] == [True, False, True]
    assert isinstance(answers[1], Failure)
    assert answers[1].final
    assert len(server.requests) == 3


def test_a_server_that_is_gone_ends_the_run() -> None:
    done: list[Any] = []
    made = endpoint("http://127.0.0.1:9/v1", retries=0)
    asks = (ask_for(HI, Sampling(), n, False) for n in range(1000))
    with pytest.raises(TracefpError, match=f"{HOPELESS} requests in a row have failed"):
        made.run(asks, lambda *reply: done.append(reply))
    assert HOPELESS <= len(done) <= HOPELESS + 2


def test_requests_run_at_the_same_time_up_to_the_limit() -> None:
    def script(body: dict[str, Any], n: int) -> str:
        time.sleep(0.05)
        return "fine"

    with fake_server(script) as server:
        ask(endpoint(server.url, concurrency=4), 16)
    assert 2 <= server.at_once[0] <= 4


def test_log_probs_are_read_with_ids_with_texts_and_not_at_all() -> None:
    replies = [
        completion("a b", [("token_id:5", -0.1), ("token_id:7", -0.2)]),
        completion("a b", [("a", -0.1), (" b", -0.2)]),
        completion("a b"),
        completion("a b", [("a", None)]),  # type: ignore[list-item]
    ]
    with fake_server(lambda body, n: replies[n]) as server:
        ids, pieces, none, broken = ask(endpoint(server.url, concurrency=1), 4, logprobs=True)
    assert isinstance(ids, Answer)
    assert isinstance(pieces, Answer)
    assert isinstance(none, Answer)
    assert isinstance(broken, Answer)
    assert (ids.token_ids, ids.logprobs) == ([5, 7], [-0.1, -0.2])
    assert (pieces.token_ids, pieces.pieces) == (None, ["a", " b"])
    assert none.logprobs is broken.logprobs is None


def test_a_server_that_refuses_a_key_is_asked_without_it() -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        return Bad(400, b'{"error": "unknown field logprobs"}') if "logprobs" in body else "fine"

    with fake_server(script) as server:
        answers = ask(endpoint(server.url, concurrency=1), 3, logprobs=True)
    assert all(isinstance(a, Answer) for a in answers)
    assert len(server.requests) == 4


def test_scores_of_given_tokens_are_those_vllm_sends() -> None:
    reply = {
        "choices": [
            {"prompt_logprobs": [None, {"4": {"logprob": -1.0}}, {"5": {"logprob": -2.0}, "6": {"logprob": 0}}]}
        ]
    }
    assert read_scores(reply, [4, 5]) == [-1.0, -2.0]
    assert read_scores(reply, [4, 9]) is None
    assert read_scores({"choices": [{}]}, [4]) is None
    assert read_scores(Failure("no"), [4]) is None
    assert json.dumps(ask_scores([1], [4, 5]).body["prompt"]) == "[1, 4, 5]"


def test_the_key_is_in_no_attribute_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    form = parse_form("--serve-form", "http://h/v1?model=m&key_env=MY_KEY")
    assert KEY not in json.dumps(form.__dict__)
