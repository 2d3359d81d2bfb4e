"""A loop of one's own: engine and trainer by hand, without a recipe, a run folder or `TrainingRun`.

    python examples/own_loop.py

Each step: prompts to requests, FP4 responses, rewards, update, weights back to the engine. Prints each step's reward
and the distance between trainer and rollout, with guidance and then without it.
"""

import torch

from tracefp4.assets import builtin_model_path
from tracefp4.guidance.store import MemoryStore
from tracefp4.methods import QuantConfig, get_method
from tracefp4.nn.loading import load_policy, read_config, read_tokenizer
from tracefp4.rollout.engine import RolloutConfig, RolloutEngine
from tracefp4.tasks.running_sums import RunningSums, RunningSumsConfig
from tracefp4.train.trainer import GRPOTrainer, TrainConfig
from tracefp4.types import Request, RolloutBatch, SamplingParams

PROMPTS, SAMPLES, STEPS = 4, 4, 2


def train(method_name: str) -> None:
    path = builtin_model_path("sums-moe")
    hf_config = read_config(path)
    tokenizer = read_tokenizer(path, hf_config)
    task = RunningSums(RunningSumsConfig())

    # The recipe is what both sides agree on; the store is where records wait for the trainer.
    method, store = get_method(method_name), MemoryStore()
    recipe = method.recipe(QuantConfig(), hf_config.num_hidden_layers)
    engine = RolloutEngine(hf_config, recipe, RolloutConfig(max_model_len=128, max_num_seqs=32), store)
    policy = load_policy(path, "bfloat16")
    trainer = GRPOTrainer(policy, recipe, method.forward, TrainConfig(lr=1e-4, updates_per_rollout=2), store)
    engine.update_weights(trainer.named_weights(), trainer.version)

    for step in range(STEPS):
        prompts = [p for p in task.train_prompts(step, PROMPTS) for _ in range(SAMPLES)]
        requests = [
            Request(
                request_id=f"{step}/{i}",
                prompt_ids=tuple(tokenizer(p.text)["input_ids"]),
                sampling=SamplingParams(
                    max_new_tokens=80, stop_token_ids=(tokenizer.eos_token_id,), seed=1000 * step + i
                ),
            )
            for i, p in enumerate(prompts)
        ]
        trajectories = engine.generate(requests)
        for i, (prompt, t) in enumerate(zip(prompts, trajectories, strict=True)):
            t.reward = task.score(prompt, tokenizer.decode(t.response_ids, skip_special_tokens=True))
            t.group = i // SAMPLES  # advantages are relative to the samples of one prompt
        metrics = trainer.update(RolloutBatch(trajectories, engine.version))
        store.discard([t.guidance for t in trajectories if t.guidance is not None])  # a record is used for one update
        engine.update_weights(trainer.named_weights(), trainer.version)
        reward = sum(t.reward for t in trajectories) / len(trajectories)
        distance = metrics["mismatch/logprob_abs_diff_mean"]
        print(f"{method_name}, step {step}: reward {reward:.2f}, |log p difference| {distance:.5f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train("trace-all")
    train("qat")
