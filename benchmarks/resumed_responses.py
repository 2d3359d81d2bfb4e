"""A response generated in two pieces under two versions of the weights: how near can one forward come to both?

python benchmarks/resumed_responses.py [--prompts 24] [--after 20,28,36] [--change 4e-4] [--no-band]

The built-in model answers running sums; after so many steps of the engine every unfinished response is aborted, all
weight matrices move by ``change`` in random directions (four updates of Adam at 1e-4), and the responses are resumed.
The trainer holds the new weights. Mean |log-prob difference| over the tokens of the first and of the second piece, by
where K and V of the first piece's rows come from: its own record (own), the second piece's (last), or the record of the
piece that read them more often (readers, as the verl adapter does it). bf16 and qat have no such choice.
--no-band: records of the old weights are followed everywhere, not near a rounding border only.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tracefp4.adapters.verl.guided import GuidedForward, Row
from tracefp4.adapters.verl.segments import Piece, Segment, join_pieces, key_value_sources, make_note
from tracefp4.adapters.verl.settings import read_settings
from tracefp4.assets import builtin_model_path
from tracefp4.guidance.disk import ShardStore
from tracefp4.methods import QuantConfig, get_method
from tracefp4.nn.loading import read_config, read_tokenizer
from tracefp4.rollout.engine import RolloutConfig, RolloutEngine
from tracefp4.tasks.running_sums import RunningSums, RunningSumsConfig
from tracefp4.types import Request, SamplingParams, Trajectory

MODEL = builtin_model_path("sums-moe")
Weights = dict[str, Tensor]
Pair = tuple[Trajectory, Trajectory]
RULES: dict[str, Callable[[Sequence[Segment]], list[int]]] = {
    "readers": key_value_sources,
    "own": lambda segments: list(range(len(segments))),
    "last": lambda segments: [len(segments) - 1] * len(segments),
}


def load() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager").eval()


def moved(weights: Weights, change: float) -> Weights:
    g = torch.Generator().manual_seed(1)
    out = {n: w + change * torch.sign(torch.randn(w.shape, generator=g)) if w.ndim > 1 else w
           for n, w in weights.items()}  # fmt: skip
    if "lm_head.weight" in out:
        out["lm_head.weight"] = out["model.embed_tokens.weight"]  # tied
    return out


def roll_out(method: str, store: ShardStore, versions: list[Weights], after: int, prompts: int) -> list[Pair]:
    """Responses that were unfinished after so many steps: what they had then, and the rest under the next version."""
    config = read_config(MODEL)
    tokenizer, eos = read_tokenizer(MODEL, config), config.eos_token_id
    recipe = get_method(method).recipe(QuantConfig(), config.num_hidden_layers)
    engine = RolloutEngine(config, recipe, RolloutConfig(dtype="bfloat16", max_num_seqs=64, max_model_len=160), store)
    engine.update_weights(((n, w.bfloat16()) for n, w in versions[0].items()), 0)
    ids = [tuple(tokenizer(p.text)["input_ids"]) for p in RunningSums(RunningSumsConfig()).train_prompts(0, prompts)]
    for i, prompt in enumerate(ids):
        engine.add_request(
            Request(f"first{i}", prompt, SamplingParams(max_new_tokens=70, seed=i, stop_token_ids=(eos,)))
        )
    done = {t.request_id for _ in range(after) for t in engine.step()}
    first = [engine.abort(f"first{i}") for i in range(prompts) if f"first{i}" not in done]
    engine.update_weights(((n, w.bfloat16()) for n, w in versions[1].items()), 1)
    rest = [
        Request(f"rest of {t.request_id}", t.token_ids, SamplingParams(1.0, 1.0, 50, (eos,), seed=100 + i))
        for i, t in enumerate(first)
    ]
    second = engine.generate(rest)
    assert store.flush()
    return list(zip(first, second, strict=True))


def distances(forward: GuidedForward, model: torch.nn.Module, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """|log-prob difference| of all tokens of the first pieces, and of the second ones."""
    out: tuple[list[Tensor], list[Tensor]] = ([], [])
    for first, second in pairs:
        pieces = [Piece(t.token_ids, len(t.response_ids), make_note(t, forward.recipe.hash), t.routed_experts)
                  for t in (first, second)]  # fmt: skip
        joined = join_pieces(second.token_ids, pieces)
        tokens, prompt = torch.tensor(second.token_ids), len(first.prompt_ids)
        micro, _, _ = forward.micro_batch([Row(tokens, prompt, joined.note, torch.as_tensor(joined.routed))], 1)
        with torch.no_grad(), forward.context.armed(micro) as inputs:
            logits = model(input_ids=tokens[None], use_cache=False, **inputs).logits[0].float()
        own = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[prompt - 1 :, 0]
        for to, part, t in zip(out, own.split([p.generated for p in pieces]), (first, second), strict=True):
            to.append((part - t.logprobs).abs())
    return torch.cat(out[0]), torch.cat(out[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--after", default="20,28,36")
    parser.add_argument("--change", type=float, default=4e-4)
    parser.add_argument("--no-band", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    old = load().state_dict()
    versions = [old, moved(old, options.change)]
    print(f"{'after':>5} {'method':10} {'K, V':8} {'tokens':>11} {'first':>8} {'second':>8} {'both':>8}")
    for after in map(int, options.after.split(",")):
        for method in ("bf16", "qat", "trace-all"):
            with tempfile.TemporaryDirectory() as folder, ShardStore(folder) as store:
                pairs = roll_out(method, store, versions, after, options.prompts)
                guidance = {"url": folder} | ({"band": "none"} if options.no_band else {})
                settings = read_settings({"model_config": {}, "tracefp4": {"method": method, "guidance": guidance}})
                assert settings is not None
                model = load()
                model.load_state_dict(versions[1])
                for p in model.parameters():
                    p.data = p.data.bfloat16()
                forward = GuidedForward(model, settings)
                for name, rule in RULES.items() if settings.mode.forward.guided else [("", key_value_sources)]:
                    forward.builder.sources = rule
                    a, b = distances(forward, model, pairs)
                    figures = " ".join(f"{x.mean():8.5f}" for x in (a, b, torch.cat([a, b])))
                    print(f"{after:5} {method:10} {name:8} {len(a):5}+{len(b):5} {figures}", flush=True)


if __name__ == "__main__":
    main()
