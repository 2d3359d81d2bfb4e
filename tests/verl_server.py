"""What the tests of the verl adapter share. Imports verl: import it after ``pytest.importorskip("verl")``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_PLATFORM", "cpu")

from verl.workers.config import HFModelConfig, RolloutConfig

from tiny import tiny_checkpoint, tiny_config, tiny_weights
from tracefp4.adapters.verl.replica import RolloutServer

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def make_server(folder: Path, **rollout: Any) -> RolloutServer:
    """rollout: more of verl's rollout config."""
    path = tiny_checkpoint(folder / "model", tiny_config())
    model = HFModelConfig(
        path=str(path),
        override_config={
            "attn_implementation": "eager",
            "model_config": {},
            "tracefp4": {"method": "trace-all", "guidance": {"url": str(folder / "g")}},
        },
    )
    config = RolloutConfig(
        name="tracefp4", prompt_length=16, response_length=12, max_num_seqs=8, tensor_model_parallel_size=1, **rollout
    )
    return RolloutServer(config, model, 0, "cpu")


async def load(server: RolloutServer, version: int = 0, recipe_hash: str | None = None) -> None:
    """Random weights that differ from version to version, put in use."""
    weights = tiny_weights(tiny_config(), seed=version)
    await server.receive_weights({name: w.bfloat16() for name, w in weights.items()})
    await server.commit_weights(version, recipe_hash or server.recipe.hash)
