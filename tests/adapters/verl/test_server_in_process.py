"""The rollout server without Ray: requests, weights, aborts. Skipped where verl is not installed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import tiny_checkpoint, tiny_config, tiny_weights

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

from verl.workers.config import HFModelConfig, RolloutConfig

from tracefp4.adapters.verl.replica import RolloutServer
from tracefp4.adapters.verl.rows import FIELD, read_trajectory
from tracefp4.errors import TracefpError
from tracefp4.guidance.disk import ShardStore

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RolloutServer]:
    path = tiny_checkpoint(tmp_path / "model", tiny_config())
    model = HFModelConfig(
        path=str(path),
        override_config={
            "attn_implementation": "eager",
            "model_config": {},
            "tracefp4": {"method": "trace", "guidance": {"url": str(tmp_path / "g")}},
        },
    )
    config = RolloutConfig(
        name="tracefp4", prompt_length=16, response_length=12, max_num_seqs=8, tensor_model_parallel_size=1
    )
    server = RolloutServer(config, model, 0, "cpu")
    yield server
    server.host.close()


async def load(server: RolloutServer, version: int = 0, recipe_hash: str | None = None) -> None:
    await server.receive_weights({k: v.bfloat16() for k, v in tiny_weights(tiny_config()).items()})
    await server.commit_weights(version, recipe_hash or server.recipe.hash)


def test_a_response_carries_its_handle_and_no_bits(server: RolloutServer, tmp_path: Path) -> None:
    async def run() -> list[Any]:
        await load(server)
        work = [server.generate(f"r{i}", [2 + i, 5, 7], dict(PARAMS)) for i in range(5)]
        return list(await asyncio.gather(*work))

    outputs = asyncio.run(run())
    assert server.store.flush()  # type: ignore[attr-defined]
    store = ShardStore(str(tmp_path / "g"), create=False)
    for i, output in enumerate(outputs):
        assert len(output.token_ids) == len(output.log_probs)
        tokens = torch.tensor([2 + i, 5, 7, *output.token_ids])
        t = read_trajectory(tokens, 3, output.extra_fields[FIELD], torch.as_tensor(output.routed_experts),
                            server.recipe.hash)  # fmt: skip
        (segment,) = t.segments
        assert segment.handle is not None
        assert store.get(segment.handle).token_ids.tolist() == tokens[:-1].tolist()
        assert t.routed_experts is not None
        assert len(t.routed_experts) == t.num_rows
        assert output.extra_fields["global_steps"] == 0


def test_the_same_request_draws_the_same_tokens_in_any_order(server: RolloutServer) -> None:
    async def run(order: list[int], tag: str) -> dict[int, list[int]]:
        work = [server.generate(f"{tag}{i}", [2 + i, 5], dict(PARAMS)) for i in order]
        return dict(zip(order, [o.token_ids for o in await asyncio.gather(*work)], strict=True))

    async def both() -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        await load(server)
        first = await run([0, 1, 2], "a")
        server.seeds._version = -1  # as a new run at the same version would count
        return first, await run([2, 0, 1], "b")

    first, second = asyncio.run(both())
    assert first == second


def test_abort_hands_out_what_there_is_and_holds_back_the_rest(server: RolloutServer) -> None:
    async def run() -> tuple[Any, Any]:
        await load(server)
        running = asyncio.create_task(server.generate("long", [3, 4, 5], dict(PARAMS)))
        while not server.engine.scheduler.running:
            await asyncio.sleep(0)
        await server.abort_all_requests()
        later = asyncio.create_task(server.generate("later", [3, 4], dict(PARAMS)))
        aborted = await running
        await asyncio.sleep(0.05)
        assert not later.done()
        await server.resume_generation()
        return aborted, await later

    aborted, later = asyncio.run(run())
    assert aborted.stop_reason in ("aborted", "completed")
    assert later.stop_reason == "completed"
    assert later.token_ids


def test_sleep_waits_and_wake_up_goes_on(server: RolloutServer) -> None:
    async def run() -> Any:
        await load(server)
        await server.sleep()
        waiting = asyncio.create_task(server.generate("r", [3, 4], dict(PARAMS)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await load(server, 1)
        await server.wake_up()
        return await waiting

    assert asyncio.run(run()).extra_fields["global_steps"] == 1


def test_a_trainer_of_another_recipe_cannot_publish(server: RolloutServer) -> None:
    with pytest.raises(TracefpError, match="the trainer holds recipe feed, replica 0 holds"):
        asyncio.run(load(server, 0, "feed"))


def test_images_are_refused(server: RolloutServer) -> None:
    with pytest.raises(TracefpError, match="serves text only"):
        asyncio.run(server.generate("r", [3], dict(PARAMS), image_data=[object()]))
