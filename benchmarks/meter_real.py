"""What `tracefp4 meter traces` says of log-probs of a real model, as they should be and with faults planted.

python benchmarks/meter_real.py CHECKPOINT [--samples 6] [--tokens 48] [--out runs/meter_real]

CHECKPOINT: a Hugging Face directory of an instruct model (examples/gap_everyday makes one of SmolLM2-135M in its
cache). transformers samples in FP32; trainer: log-probs in FP32, rollout: the same tokens under BF16 autocast. One
trace file for each line of the table is left in --out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tracefp4.meter.traces.run import TraceRequest, meter_traces

QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short story about a fox.",
    "What is 17*23? Think step by step.",
    "List three fruits and their colors.",
    "How do I reset my password?",
    "Give me a recipe for pancakes.",
    "Translate 'good morning' to French and German.",
    "Why do cats purr?",
)
SAMPLING = ((1.0, 1.0), (0.7, 1.0), (1.0, 0.9))
"""(temperature, top_p)"""
Line = dict[str, Any]
Change = Callable[[int, Line], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("runs/meter_real"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    rows = {s: sampled(model, tokenizer, *s, options.samples, options.tokens) for s in SAMPLING}
    for name, sampling, fields, change in CASES:
        path = options.out / f"{name.replace(' ', '_')}.jsonl"
        write(path, rows[sampling], fields, change)
        found = meter_traces(TraceRequest(path)).as_dict()
        mean = found["metrics"]["mismatch/logprob_abs_diff_mean"]
        print(f"{name:<36} {mean:.4f}  " + ("; ".join(f["title"] for f in found["findings"]) or "nothing"))


@torch.no_grad()
def sampled(model: Any, tokenizer: Any, temperature: float, top_p: float, samples: int, tokens: int) -> list[Line]:
    """Responses with four log-probs: train and roll (BF16), under the sampler's temperature, and raw; nucleus: of the
    rollout after top-p."""
    torch.manual_seed(int(100 * temperature + 10 * top_p))
    rows: list[Line] = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        drawn = model.generate(
            torch.tensor([prompt] * samples), attention_mask=torch.ones(samples, len(prompt), dtype=torch.int64),
            do_sample=True, temperature=temperature, top_p=top_p, top_k=0, max_new_tokens=tokens,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        for sequence in drawn.tolist():
            response = until(sequence[len(prompt) :], tokenizer.eos_token_id)
            ids, logits = torch.tensor([prompt + response]), []
            for narrow in (False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                    logits.append(model(ids).logits[0, len(prompt) - 1 : -1].float())
            train, rollout = logits
            rows.append(
                {
                    "prompt_token_ids": prompt,
                    "token_ids": response,
                    "train": picked(train / temperature, response),
                    "train raw": picked(train, response),
                    "rollout": picked(rollout / temperature, response),
                    "rollout raw": picked(rollout, response),
                    "nucleus": picked(nucleus(rollout / temperature, top_p), response),
                }
            )
    return rows


def until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def picked(logits: torch.Tensor, ids: list[int]) -> list[float]:
    values = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return [max(v, -9999.0) for v in values.tolist()]  # JSON has no infinity


def nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered = logits.softmax(-1).sort(-1, descending=True)
    kept = torch.zeros_like(logits, dtype=torch.bool)
    kept.scatter_(-1, ordered.indices, ordered.values.cumsum(-1) - ordered.values < top_p)
    return logits.masked_fill(~kept, -1e30)


def write(path: Path, rows: list[Line], fields: tuple[str, str], change: Change | None) -> None:
    with path.open("w", encoding="utf-8") as file:
        for i, row in enumerate(rows):
            line = {"id": str(i), **{k: row[k] for k in ("prompt_token_ids", "token_ids")}}
            line |= {
                "train_logprobs": row[fields[0]],
                "rollout_logprobs": list(row[fields[1]]),
                "raw": row["train raw"],
            }
            if change is not None:
                change(i, line)
            file.write(json.dumps(line) + "\n")


def shift(i: int, line: Line) -> None:
    line["rollout_logprobs"] = [*line["rollout_logprobs"][1:], -1.0]


def shift_every_fourth(i: int, line: Line) -> None:
    if i % 4 == 1:
        shift(i, line)


def raw_every_fourth(i: int, line: Line) -> None:
    if i % 4 == 1:
        line["train_logprobs"] = line["raw"]


def noise_from_30(i: int, line: Line) -> None:
    noise = np.random.default_rng(i).normal(0, 0.6, len(line["token_ids"]))
    noise[:30] = 0.0
    line["rollout_logprobs"] = (np.array(line["rollout_logprobs"]) + noise).tolist()


FULL, WARM, TOP_P = SAMPLING
CASES: tuple[tuple[str, tuple[float, float], tuple[str, str], Change | None], ...] = (
    ("as it should be, T 1", FULL, ("train", "rollout"), None),
    ("as it should be, T .7", WARM, ("train", "rollout"), None),
    ("as it should be, top-p .9", TOP_P, ("train", "rollout"), None),
    ("T .7, trainer raw", WARM, ("train raw", "rollout"), None),
    ("T .7, rollout raw", WARM, ("train", "rollout raw"), None),
    ("top-p .9, rollout after it", TOP_P, ("train", "nucleus"), None),
    ("rollout one early", FULL, ("train", "rollout"), shift),
    ("one early in every 4th row", FULL, ("train", "rollout"), shift_every_fourth),
    ("T .7, trainer raw in every 4th row", WARM, ("train", "rollout"), raw_every_fourth),
    ("noise of .6 from position 30 on", FULL, ("train", "rollout"), noise_from_30),
)


if __name__ == "__main__":
    main()
