"""Which responses keep their full codes, and that the trainer finds them. The server's part is skipped without verl."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import tiny_checkpoint, tiny_config, tiny_weights
from tracefp4.adapters.verl.probes import PROBED, Probes, probe_handle
from tracefp4.adapters.verl.rows import FIELD, read_trajectory
from tracefp4.guidance.disk import ShardStore

os.environ.setdefault("VERL_PLATFORM", "cpu")


def test_probes_are_of_distinct_prompts_under_every_nth_version() -> None:
    probes = Probes(every=2, responses=2)
    assert [probes.take(0, (i // 2,), 1.0) for i in range(6)] == [True, False, True, False, False, False]
    assert not probes.take(1, (0,), 1.0)
    assert not probes.take(2, (0,), 0.0)  # greedy
    assert probes.take(2, (0,), 1.0)
    assert not Probes(every=0, responses=2).take(0, (0,), 1.0)


def test_a_probed_response_is_found_by_what_travels_with_it(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    from verl.workers.config import HFModelConfig, RolloutConfig

    from tracefp4.adapters.verl.replica import RolloutServer

    settings = {"method": "qat", "guidance": {"url": str(tmp_path / "g")}, "probe": {"every": 1, "responses": 1}}
    model = HFModelConfig(
        path=str(tiny_checkpoint(tmp_path / "model", tiny_config())),
        override_config={"attn_implementation": "eager", "model_config": {}, "tracefp4": settings},
    )
    config = RolloutConfig(
        name="tracefp4", prompt_length=16, response_length=12, max_num_seqs=8, tensor_model_parallel_size=1
    )
    server = RolloutServer(config, model, 0, "cpu")
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}

    async def run() -> list[Any]:
        await server.receive_weights({k: v.bfloat16() for k, v in tiny_weights(tiny_config()).items()})
        await server.commit_weights(0, server.recipe.hash)
        return [await server.generate(f"r{i}", [2 + i, 5, 7], dict(params)) for i in range(2)]

    outputs = asyncio.run(run())
    server.host.close()
    assert server.store.flush()  # type: ignore[attr-defined]
    store = ShardStore(str(tmp_path / "g"), create=False)
    handles = []
    for i, output in enumerate(outputs):
        tokens = torch.tensor([2 + i, 5, 7, *output.token_ids])
        trajectory = read_trajectory(tokens, 3, output.extra_fields[FIELD], None, server.recipe.hash)
        assert trajectory.request_id.endswith(PROBED) == (i == 0)
        handles.append(probe_handle(trajectory, server.recipe.hash))
    assert handles[1] is None
    assert handles[0] is not None
    record = store.get(handles[0])
    assert record.bits == 4.5
    assert record.layers == (0, 1)
