"""Handles from the rollout servers to verl's batches, over partial rollouts and over turns.

``GuidedClient`` keeps what each request brought back; ``PartialRolloutClient`` is the same over verl's client that
resumes aborted requests. The agent-loop worker gathers the pieces of a session, whatever agent loop it runs, and puts
one note and one routing on each output. No agent loop needs to know of it.

Seams: ``PPOTrainer.get_llm_client`` chooses the client, ``rollout.agent.agent_loop_manager_class`` the manager. verl's
resuming client builds its output anew, so the pieces are taken between it and the client it derives from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import ray
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from tracefp4.adapters.verl.rows import FIELD
from tracefp4.adapters.verl.segments import Joined, Piece, join_pieces

_gathering: ContextVar[tuple[list[Piece], ...]] = ContextVar("tracefp4_pieces", default=())


@contextmanager
def gathering() -> Iterator[list[Piece]]:
    """The pieces of all requests that are made inside, in this task and in those it starts."""
    pieces: list[Piece] = []
    token = _gathering.set((*_gathering.get(), pieces))
    try:
        yield pieces
    finally:
        _gathering.reset(token)


class GuidedClient(LLMServerClient):
    """verl's client; every request is noted for whoever gathers."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
        tokens = [*prompt_ids, *output.token_ids]
        piece = Piece(tokens, len(output.token_ids), output.extra_fields.get(FIELD), output.routed_experts)
        for pieces in _gathering.get():
            pieces.append(piece.after(pieces))
        return output


class PartialRolloutClient(FullyAsyncLLMServerClient, GuidedClient):
    """verl's client that resumes aborted requests; each resume is a request of ``GuidedClient``, next in line."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        with gathering() as pieces:
            output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
        _attach(output, join_pieces([*prompt_ids, *output.token_ids], pieces))
        return output


class GuidedAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker; gives each output of a session the note and the routing of the pieces that led to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Not inherited: Ray pickles inherited methods of a class that is an actor class itself by value, and the
        # super() in that copy would be of a copied class, to which the worker does not belong.
        super().__init__(*args, **kwargs)

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        with gathering():
            return await super()._run_agent_loop(*args, **kwargs)

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> Any:
        pieces = _gathering.get()[-1]
        for one in output if isinstance(output, list) else [output]:
            _attach(one, join_pieces([*one.prompt_ids, *one.response_ids], pieces))
        return await super()._agent_loop_postprocess(output, validate, **kwargs)


def _attach(output: TokenOutput | AgentLoopOutput, joined: Joined) -> None:
    """Replaces what a first turn or piece may have left; leaves alone what another rollout engine brought."""
    if joined.note is None:
        return
    output.routed_experts = joined.routed
    output.extra_fields[FIELD] = joined.note
    if joined.versions is not None:
        output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"] = joined.versions


class GuidedAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager over workers of this module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(GuidedAgentLoopWorker)
