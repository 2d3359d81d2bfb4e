"""The engine in a thread of its own; runs without verl."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiny import make_engine, tiny_config, tiny_requests, tiny_weights
from tracefp4.adapters.verl.host import EngineHost
from tracefp4.errors import TracefpError

WAIT = 20.0


@pytest.fixture
def host() -> Iterator[EngineHost]:
    host = EngineHost(make_engine("trace"))
    yield host
    host.close()


def test_requests_from_outside_are_batched_and_give_what_generate_gives(host: EngineHost) -> None:
    requests = tiny_requests(6)
    futures = [host.submit(r) for r in requests]
    got = [f.result(WAIT).response_ids for f in futures]
    assert got == [t.response_ids for t in make_engine("trace").generate(requests)]


def test_a_request_that_can_never_run_fails_alone(host: EngineHost) -> None:
    good, bad = tiny_requests(2)
    long = tiny_requests(1, min_prompt=64, max_prompt=64)[0]
    wrong = host.submit(long)
    with pytest.raises(TracefpError, match=r"exceed rollout\.max_model_len"):
        wrong.result(WAIT)
    assert host.submit(good).result(WAIT).response_ids
    assert host.submit(bad).result(WAIT).response_ids


def test_new_weights_mark_the_rows_that_follow(host: EngineHost) -> None:
    future = host.submit(tiny_requests(1, max_new_tokens=16)[0])
    host.update_weights(tiny_weights(tiny_config(), seed=1).items(), 1).result(WAIT)
    versions = future.result(WAIT).row_versions.tolist()
    assert versions == sorted(versions)
    assert host.engine.version == 1


def test_refused_weights_leave_the_old_ones_in_use(host: EngineHost) -> None:
    with pytest.raises(TracefpError, match="policy version must rise"):
        host.update_weights(tiny_weights(tiny_config()).items(), 0).result(WAIT)
    assert host.submit(tiny_requests(1)[0]).result(WAIT).response_ids


def test_aborted_requests_keep_what_they_have_and_later_ones_wait(host: EngineHost) -> None:
    running = [host.submit(r) for r in tiny_requests(3)]
    host.abort_all().result(WAIT)
    late = host.submit(tiny_requests(4)[3])
    host.run_between_steps(lambda: None).result(WAIT)  # by then the thread has taken the late one too
    assert all(f.result(WAIT).finish_reason in ("abort", "length") for f in running)
    assert host.running == 0
    assert not late.done()
    host.resume().result(WAIT)
    assert late.result(WAIT).finish_reason == "length"


def test_a_step_that_fails_reaches_everybody_who_waits_and_ends_the_host(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(host.engine, "step", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        host.submit(tiny_requests(1)[0]).result(WAIT)
    host._thread.join(WAIT)
    with pytest.raises(RuntimeError, match="out of memory"):
        host.submit(tiny_requests(2)[1]).result(WAIT)


def test_a_closed_host_refuses(host: EngineHost) -> None:
    host.close()
    with pytest.raises(TracefpError, match="rollout server was closed"):
        host.submit(tiny_requests(1)[0]).result(WAIT)
