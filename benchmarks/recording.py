"""What guidance costs: decoding with recording over decoding without, and a training step that reads guidance from disk
over one that has it in memory. Ratios of alternating runs on the CPU engine.

    python benchmarks/recording.py [--rounds 9] [--layers 4] [--hidden 512]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracefp4.guidance.disk import ShardStore
from tracefp4.guidance.store import GuidanceStore, MemoryStore
from tracefp4.methods import QuantConfig, get_method
from tracefp4.recipe import QuantRecipe
from tracefp4.report.provenance import commit, cpu_model
from tracefp4.rollout.engine import RolloutConfig, RolloutEngine
from tracefp4.train.trainer import GRPOTrainer, TrainConfig
from tracefp4.types import GuidanceHandle, Request, RolloutBatch, SamplingParams, Trajectory

TARGET = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=options.hidden, intermediate_size=options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, moe_intermediate_size=options.hidden // 2,
        num_experts=32, num_experts_per_tok=4, norm_topk_prob=True, max_position_embeddings=1024,
    )  # fmt: skip
    print(f"{cpu_model()}, {options.threads} thread, torch {torch.__version__}, commit {commit()}")
    print(f"{options}")
    decode(config, options)
    train(config, options)


def recipe(name: str, layers: int) -> QuantRecipe:
    return get_method(name).recipe(QuantConfig(), layers)


def decode(config: Qwen3MoeConfig, options: argparse.Namespace) -> None:
    weights = dict(Qwen3MoeForCausalLM(config).named_parameters())
    sizes = RolloutConfig(max_num_seqs=options.sequences, max_model_len=16 + options.new_tokens)
    engines = {}
    for name in ("naive", "trace", "trace-all"):  # naive: the same FP4 rollout without a recorder
        engines[name] = RolloutEngine(config, recipe(name, options.layers), sizes, MemoryStore())
        engines[name].update_weights(weights.items(), 0)
    rounds: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(options.rounds + 1):
        for name, engine in engines.items():
            seconds, trajectories = timed(lambda e=engine, i=i: e.generate(requests(options, i)))
            engine.store.discard(handles(trajectories))
            if i:  # the first warms up
                rounds[name].append(seconds)
    for name in ("trace", "trace-all"):
        show(f"decoding, {name} recorded / not recorded", rounds[name], rounds["naive"])


def train(config: Qwen3MoeConfig, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, GuidanceStore] = {"memory": MemoryStore(), "disk": ShardStore(folder)}
        method = get_method("trace-all")
        sizes = RolloutConfig(max_num_seqs=options.sequences, max_model_len=16 + options.new_tokens)
        batches, trainers = {}, {}
        for name, store in stores.items():
            torch.manual_seed(1)
            model = Qwen3MoeForCausalLM(config)
            engine = RolloutEngine(config, recipe("trace-all", options.layers), sizes, store)
            engine.update_weights(model.named_parameters(), 0)
            batches[name] = engine.generate(requests(options, 0))
            if isinstance(store, ShardStore):
                store.flush()
            settings = TrainConfig(updates_per_rollout=1, lr=1e-9, max_version_diff=10**6)
            trainers[name] = GRPOTrainer(model, engine.recipe, method.forward, settings, reader(store, folder))
        rounds: dict[str, list[float]] = {name: [] for name in stores}
        for i in range(options.rounds + 1):
            for name, trainer in trainers.items():
                for k, t in enumerate(batches[name]):
                    t.group, t.reward = k // 8, float(k % 2)
                seconds, metrics = timed(lambda t=trainer, n=name: t.update(RolloutBatch(batches[n], 0)))
                assert metrics["guidance/guided_share"] == 1.0
                if i:
                    rounds[name].append(seconds)
        show("training step, guidance from disk / in memory", rounds["disk"], rounds["memory"])


def reader(store: GuidanceStore, folder: str) -> GuidanceStore:
    """A store that really reads: the writer's own would serve what it still holds in its queue."""
    return ShardStore(folder, create=False) if isinstance(store, ShardStore) else store


def requests(options: argparse.Namespace, tag: int) -> list[Request]:
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 512, (options.sequences, 16), generator=g).tolist()
    sampling = [SamplingParams(max_new_tokens=options.new_tokens, seed=i) for i in range(options.sequences)]
    return [Request(f"{tag}/{i}", tuple(p), s) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))]


def handles(trajectories: list[Trajectory]) -> list[GuidanceHandle]:
    return [t.guidance for t in trajectories if t.guidance is not None]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def show(what: str, ours: list[float], theirs: list[float]) -> None:
    """The median of the rounds' own ratios: a slow round slows both."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    quarter = len(ratios) // 4
    print(
        f"{what}: {statistics.median(ratios):.3f} (quartiles {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}, "
        f"medians {statistics.median(ours):.3f} s / {statistics.median(theirs):.3f} s, target {TARGET})"
    )


if __name__ == "__main__":
    main()
