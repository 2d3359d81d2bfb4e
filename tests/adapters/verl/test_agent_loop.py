"""Handles on their way through verl's clients and agent-loop workers, without Ray. Skipped where verl is not there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

import verl.experimental.agent_loop.agent_loop as stock
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

from tiny import tiny_config, tiny_model
from tracefp4.adapters.verl.agent_loop import GuidedAgentLoopWorker, GuidedClient, PartialRolloutClient
from tracefp4.adapters.verl.guided import GuidedForward, Row
from tracefp4.adapters.verl.replica import RolloutServer
from tracefp4.adapters.verl.rows import FIELD
from tracefp4.adapters.verl.segments import Segment, read_note
from tracefp4.adapters.verl.settings import read_settings
from verl_server import PARAMS, load

PROMPT = [3, 4, 5]
TOOL = [20, 21]


class Handle:
    """A Ray handle's method."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


def client_of(kind: type, generate: Callable[..., Any]) -> Any:
    """A client of one server, with a balancer that knows no other."""

    async def no_fields() -> list[str]:
        return []

    async def acquire(request_id: str) -> tuple[str, Any]:
        return "server", SimpleNamespace(generate=Handle(generate))

    balancer = SimpleNamespace(
        require_acquire_fields=Handle(no_fields),
        require_release_fields=Handle(no_fields),
        acquire_server=Handle(acquire),
        release_server=Handle(lambda server_id: None),
    )
    rollout = SimpleNamespace(name="tracefp4", full_determinism=False, response_length=12)
    return kind(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), balancer)


def slow_down(server: RolloutServer) -> None:
    step = server.engine.step

    def slowly(*args: Any) -> Any:
        time.sleep(0.02)
        return step(*args)

    server.engine.step = slowly  # type: ignore[method-assign]


async def interrupted(server: RolloutServer, work: Any, tokens: int = 4) -> Any:
    """Awaits work; once its request has so many tokens it is aborted, and resumed under other weights."""
    task = asyncio.ensure_future(work)
    while not (running := server.engine.scheduler.running) or len(running[0].response) < tokens:
        await asyncio.sleep(0.001)
    await server.abort_all_requests()
    await server.sleep()
    await load(server, server.engine.version + 1)
    await server.wake_up()
    await server.resume_generation()
    return await task


def segments_of(extra_fields: dict[str, Any], server: RolloutServer) -> list[Segment]:
    return read_note(extra_fields[FIELD], server.recipe.hash)


def guided_rows(tokens: list[int], output: Any, server: RolloutServer, tmp_path: Path) -> tuple[int, int, int]:
    """(guided, replayed, all) rows of a sequence, as a trainer finds them."""
    assert server.store.flush()  # type: ignore[attr-defined]
    settings = read_settings({"model_config": {}, "tracefp4": {"method": "trace-all", "guidance": {
        "url": str(tmp_path / "g")}}})  # fmt: skip
    assert settings is not None
    row = Row(torch.tensor(tokens), 3, output.extra_fields[FIELD], torch.as_tensor(output.routed_experts))
    _, counts, _ = GuidedForward(tiny_model(tiny_config()), settings).micro_batch([row], None)
    return counts.guided, counts.replayed, counts.total


def test_a_resumed_response_keeps_every_handle_in_order(server: RolloutServer, tmp_path: Path) -> None:
    async def run() -> TokenOutput:
        await load(server)
        slow_down(server)
        client = client_of(PartialRolloutClient, server.generate)
        return await interrupted(server, client.generate("s", prompt_ids=PROMPT, sampling_params=dict(PARAMS)))

    output = asyncio.run(run())
    first, second = segments_of(output.extra_fields, server)
    rows = len(PROMPT) + len(output.token_ids) - 1
    assert len(output.token_ids) == len(output.log_probs or []) == 12
    assert (first.start, first.stop, second.start, second.stop) == (0, first.stop, first.stop, rows)
    assert first.first == 3
    assert second.first == first.stop + 1
    assert set(first.own_versions) == {0}
    assert set(second.own_versions) == {1}
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (0, 1)
    assert len(output.routed_experts) == rows
    assert guided_rows([*PROMPT, *output.token_ids], output, server, tmp_path) == (rows, rows, rows)


def test_verls_own_resuming_client_drops_the_note(server: RolloutServer) -> None:
    """Why there is a client of ours: where this fails, verl carries extra fields and ours may go."""

    async def run() -> TokenOutput:
        await load(server)
        client = client_of(FullyAsyncLLMServerClient, server.generate)
        return await client.generate("s", prompt_ids=PROMPT, sampling_params=dict(PARAMS))

    assert FIELD not in asyncio.run(run()).extra_fields


class TwoTurns:
    """As verl's tool loop: keeps the first turn's extra fields and the last turn's routing."""

    prompt = PROMPT

    def __init__(self, server_manager: Any, **_: Any) -> None:
        self.client = server_manager

    async def run(self, sampling_params: dict[str, Any], **_: Any) -> Any:
        first = await self.client.generate("s", prompt_ids=self.prompt, sampling_params=sampling_params)
        tokens = [*self.prompt, *first.token_ids, *TOOL]
        second = await self.client.generate("s", prompt_ids=tokens, sampling_params=sampling_params)
        tokens += second.token_ids
        mask = [1] * len(first.token_ids) + [0] * len(TOOL) + [1] * len(second.token_ids)
        return AgentLoopOutput(
            prompt_ids=self.prompt,
            response_ids=tokens[len(self.prompt) :],
            response_mask=mask,
            routed_experts=second.routed_experts,
            metrics=AgentLoopMetrics(),
            extra_fields=first.extra_fields,
        )


class Branching(TwoTurns):
    """One output a turn: what the second turn saw is not what the first one gave."""

    async def run(self, sampling_params: dict[str, Any], **_: Any) -> Any:
        outputs = []
        for prompt in (PROMPT, [9, 8, 7]):
            turn = await self.client.generate("s", prompt_ids=prompt, sampling_params=sampling_params)
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt,
                    response_ids=turn.token_ids[:-1],  # as verl cuts at response_length
                    response_mask=[1] * (len(turn.token_ids) - 1),
                    metrics=AgentLoopMetrics(),
                )
            )
        return outputs


@pytest.fixture
def run_session(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """run_session(loop, client, max_tokens): the outputs that verl's worker would put into its queue."""

    async def put(self: Any, output: Any, validate: bool, **_: Any) -> Any:
        return output

    (base,) = GuidedAgentLoopWorker.__bases__
    monkeypatch.setattr(base, "_agent_loop_postprocess", put)
    worker: Any = GuidedAgentLoopWorker.__new__(GuidedAgentLoopWorker)
    worker.config = SimpleNamespace(data=None)
    worker.tokenizer = worker.processor = worker.hf_model_type = worker.dataset_cls = worker.tools = None
    trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}

    async def run(loop: type, client: Any, max_tokens: int) -> Any:
        name = loop.__name__
        monkeypatch.setitem(stock._agent_loop_registry, name, {"_target_": loop})
        worker.llm_client = client
        params = {**PARAMS, "max_tokens": max_tokens}
        return await worker._run_agent_loop(params, trajectory, agent_name=name, trace=False)

    return run


def test_every_turn_keeps_its_handle(server: RolloutServer, run_session: Any, tmp_path: Path) -> None:
    async def run() -> Any:
        await load(server)
        client = client_of(GuidedClient, server.generate)
        return await asyncio.gather(*(run_session(TwoTurns, client, 4) for _ in range(4)))

    outputs = asyncio.run(run())
    samples = set()
    for output in outputs:
        first, second = segments_of(output.extra_fields, server)
        rows = len(PROMPT) + len(output.response_ids) - 1
        assert (first.start, first.stop, second.start, second.stop) == (0, 6, 6, rows)
        assert second.first == 3 + 4 + len(TOOL)
        samples |= {first.sample, second.sample}
        tokens = [*PROMPT, *output.response_ids]
        assert guided_rows(tokens, output, server, tmp_path) == (rows, rows, rows)
    assert len(samples) == 8  # sessions that run at the same time do not mix


def test_a_turn_that_is_interrupted_gives_three_segments(server: RolloutServer, run_session: Any) -> None:
    async def run() -> Any:
        await load(server)
        slow_down(server)
        client = client_of(PartialRolloutClient, server.generate)
        return await interrupted(server, run_session(TwoTurns, client, 6))

    output = asyncio.run(run())
    segments = segments_of(output.extra_fields, server)
    assert [s.own_versions[-1] for s in segments] == [0, 1, 1]
    assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])]
    assert segments[-1].stop == len(PROMPT) + len(output.response_ids) - 1 == len(output.routed_experts)
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (0, 1)


def test_each_output_of_a_session_gets_its_own_pieces(server: RolloutServer, run_session: Any, tmp_path: Path) -> None:
    async def run() -> Any:
        await load(server)
        return await run_session(Branching, client_of(GuidedClient, server.generate), 6)

    for output in asyncio.run(run()):
        (segment,) = segments_of(output.extra_fields, server)
        rows = 3 + 5 - 1
        assert (segment.start, segment.stop) == (0, rows)
        assert len(output.routed_experts) == rows
        tokens = [*output.prompt_ids, *output.response_ids]
        assert guided_rows(tokens, output, server, tmp_path) == (rows, rows, rows)


def test_what_another_rollout_engine_brings_is_left_alone(run_session: Any) -> None:
    async def generate(**_: Any) -> TokenOutput:
        return TokenOutput(token_ids=[7, 8], log_probs=[0.0, 0.0], routed_experts="theirs", stop_reason="completed")

    output = asyncio.run(run_session(TwoTurns, client_of(GuidedClient, generate), 2))
    assert output.routed_experts == "theirs"
    assert FIELD not in output.extra_fields
