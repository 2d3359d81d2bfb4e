"""The rollout server without Ray: requests, weights, aborts. Skipped where verl is not installed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

from tracefp4.adapters.verl import replica
from tracefp4.adapters.verl.replica import RolloutServer
from tracefp4.adapters.verl.rows import FIELD, read_trajectory
from tracefp4.errors import TracefpError
from tracefp4.guidance.disk import ShardStore
from verl_server import PARAMS, load, make_server


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


def test_a_replica_that_leaves_hands_requests_back_also_asleep(server: RolloutServer) -> None:
    async def run() -> list[Any]:
        await load(server)
        await server.abort_all_requests()
        parked = asyncio.create_task(server.generate("parked", [3, 4, 5], dict(PARAMS)))
        await asyncio.sleep(0.05)
        assert not parked.done()
        await server.abort_all_requests(reject_request=True)
        await server.sleep()
        late = await server.generate("late", [3, 4, 5], dict(PARAMS))
        await load(server, 1)
        await server.wake_up()
        await server.resume_generation()
        return [await parked, late, await server.generate("again", [3, 4, 5], dict(PARAMS))]

    parked, late, again = asyncio.run(run())
    assert [o.stop_reason for o in (parked, late, again)] == ["aborted", "aborted", "completed"]
    assert parked.token_ids == late.token_ids == []
    assert again.token_ids


def test_requests_held_back_do_not_keep_a_replica_awake(server: RolloutServer) -> None:
    """verl aborts, puts to sleep, trains, wakes up and resumes; what came in between waits for the end of it."""

    async def run() -> Any:
        await load(server)
        await server.abort_all_requests()
        held = asyncio.create_task(server.generate("held", [3, 4, 5], dict(PARAMS)))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(server.sleep(), 5)
        await load(server, 1)
        await server.wake_up()
        await asyncio.sleep(0.05)
        assert not held.done()
        await server.resume_generation()
        return await held

    assert asyncio.run(run()).extra_fields["global_steps"] == 1


def test_verls_eager_rollout_captures_no_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def engine(hf_config: Any, recipe: Any, config: Any, *_: Any) -> Any:
        sizes.append(config)
        raise TracefpError("sizes are known")

    monkeypatch.setattr(replica, "RolloutEngine", engine)
    for eager in (False, True):
        with pytest.raises(TracefpError, match="sizes are known"):
            make_server(tmp_path / str(eager), enforce_eager=eager)
    assert [c.cuda_graphs for c in sizes] == [True, False]
