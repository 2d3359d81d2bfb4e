"""How far trainer and rollout in FP32 lie from each other, and each from the trainer's model in FP64, on the demo.

python benchmarks/fp32_control.py [key=value ...]
"""

from __future__ import annotations

import sys

import torch

from tracefp4.config import load_config
from tracefp4.loop import RunConfig, TrainingRun
from tracefp4.train.slices import RowCounts
from tracefp4.types import TrainBatch


def main() -> None:
    config = load_config(
        "recipes/demo.toml", ["method.name=fp32", "run.seed=2", "run.device=cpu", *sys.argv[1:]], RunConfig
    )
    run = TrainingRun(config)
    run.step(0)
    prompts = run.task.train_prompts(1, config.sampling.prompts_per_step)
    trajectories = run.engine.generate(run.parts.requests(prompts, config.sampling.samples_per_prompt, "step1"))
    batch = TrainBatch.collate(trajectories, run.tokenizer.pad_token_id)
    rows = run.trainer.builder.build(batch, run.trainer.version, RowCounts())

    def logprobs() -> torch.Tensor:
        with torch.no_grad(), run.trainer.context.armed(rows) as kwargs:
            logits = run.trainer.model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **kwargs
            ).logits[:, :-1]
        logp = torch.log_softmax(logits / config.sampling.temperature, dim=-1)
        return logp.gather(-1, batch.input_ids[:, 1:, None])[..., 0].double()[batch.response_mask]

    fp32 = logprobs()
    run.trainer.model.double()
    fp64 = logprobs()
    rollout = batch.rollout_logprobs.double()[batch.response_mask]
    for name, delta in (
        ("trainer FP32 - rollout FP32", fp32 - rollout),
        ("trainer FP32 - trainer FP64", fp32 - fp64),
        ("rollout FP32 - trainer FP64", rollout - fp64),
    ):
        print(f"{name}: mean |difference| {float(delta.abs().mean()):.2e}, max {float(delta.abs().max()):.2e}")


if __name__ == "__main__":
    main()
