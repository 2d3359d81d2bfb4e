"""Log-prob traces of a real tiny model: sampled by the engine in BF16, scored again by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiny import make_engine, tiny_config, tiny_model, tiny_weights
from tracefp4.types import Request, SamplingParams

PROMPTS, PER_PROMPT, PROMPT_TOKENS, NEW_TOKENS = 24, 8, 6, 24
SPREAD = 0.2
"""initializer_range: next-token distributions between near-certain and flat, as a trained model's are."""


@dataclass
class Sampled:
    """prompt and response ids; rollout, f64 [R], by the engine in BF16; logits f32 [R, V] of transformers in BF16."""

    prompt: list[int]
    response: list[int]
    rollout: np.ndarray
    logits: np.ndarray
    group: int

    def trainer(self, temperature: float = 1.0) -> np.ndarray:
        return pick(self.logits, self.response, temperature)


def pick(logits: np.ndarray, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """f64 [R]: log-probs of the ids under the tempered distribution."""
    logp = torch.log_softmax(torch.tensor(logits).double() / temperature, -1)
    return logp.gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()


def nucleus(logits: np.ndarray, ids: Sequence[int], top_p: float) -> np.ndarray:
    """f64 [R]: log-probs after top-p and renormalisation; -inf outside the nucleus."""
    probs = torch.softmax(torch.tensor(logits).double(), -1)
    ordered, index = probs.sort(dim=-1, descending=True)
    kept = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
    probs = torch.zeros_like(probs).scatter(-1, index, kept)
    return (probs / probs.sum(-1, keepdim=True)).log().gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()


def top_k(logits: np.ndarray, ids: Sequence[int], k: int) -> np.ndarray:
    values = torch.tensor(logits).double()
    floor = values.topk(k, -1).values[:, -1:]
    return pick(torch.where(values >= floor, values, -torch.inf).numpy(), ids)


@lru_cache(maxsize=8)
def sampled(
    seed: int = 0, method: str = "bf16", temperature: float = 1.0, top_p: float = 1.0, weights: int = 0
) -> tuple[Sampled, ...]:
    """192 responses of 24 tokens to 24 prompts. weights: seed of the scorer's weights where it is another model's."""
    config = tiny_config(initializer_range=SPREAD)
    engine = make_engine(method, config=config, max_num_seqs=64)
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for p in range(PROMPTS):
        prompt = tuple(torch.randint(2, 32, (PROMPT_TOKENS,), generator=generator).tolist())
        for j in range(PER_PROMPT):
            params = SamplingParams(temperature, top_p, NEW_TOKENS, (), seed=1000 * seed + PER_PROMPT * p + j)
            requests.append(Request(f"{p}-{j}", prompt, params))
    done = engine.generate(requests)
    logits = score([t.token_ids for t in done], seed=weights)
    return tuple(
        Sampled(list(t.prompt_ids), list(t.response_ids), t.logprobs.double().numpy(), rows, i // PER_PROMPT)
        for i, (t, rows) in enumerate(zip(done, logits, strict=True))
    )


def score(sequences: Sequence[Sequence[int]], seed: int = 0, model: Any = None) -> list[np.ndarray]:
    """Logits of the response rows by transformers in BF16."""
    model = model or tiny_model(tiny_config(initializer_range=SPREAD), "bfloat16", seed)
    with torch.no_grad():
        logits = model(torch.tensor(sequences)).logits.float()
    return list(logits[:, PROMPT_TOKENS - 1 : -1].numpy())


def drifted_model(steps: int, size: float = 0.01) -> Any:
    """The tiny model after ``steps`` random-walk updates of its weights, in BF16: a policy that moved on."""
    config = tiny_config(initializer_range=SPREAD)
    model = tiny_model(config, "bfloat16")
    state = tiny_weights(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            walk = sum((torch.randn(p.shape, generator=generator) for _ in range(steps)), torch.zeros(p.shape))
            p.copy_((state[name] * (1 + size * walk)).to(p.dtype))
    return model


@lru_cache(maxsize=8)
def crowded(temperature: float = 1.0, noise: float = 0.02, top_k: int = 400) -> tuple[Sampled, ...]:
    """64 responses of 40 tokens, of logits over 400 tokens with many competitors: an entropy that varies with the
    position between near 0 and 4 nats, as a language model's. The rollout's logits have Gaussian noise."""
    rng = np.random.default_rng(int(100 * temperature))
    out = []
    for i in range(64):
        logits = rng.normal(size=(40, 400)) * rng.choice([1.5, 3.0, 5.0, 9.0], (40, 1), p=[0.1, 0.3, 0.3, 0.3])
        rolled = (logits + noise * logits.std(-1, keepdims=True) * rng.normal(size=logits.shape)) / temperature
        floor = np.sort(rolled, -1)[:, -top_k, None]
        scores = np.where(rolled >= floor, rolled + rng.gumbel(size=rolled.shape), -np.inf)
        ids = scores.argmax(-1).tolist()
        kept = np.where(rolled >= floor, rolled, -np.inf)
        out.append(Sampled([1, i], ids, pick(kept, ids), logits.astype(np.float32), i))
    return tuple(out)


@dataclass
class Row:
    """A line of a trace file."""

    ids: list[int]
    logprobs: np.ndarray
    extra: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        values = [None if np.isnan(v) else (float(v) if np.isfinite(v) else "-inf") for v in self.logprobs]
        return json.dumps({**self.extra, "token_ids": self.ids, "logprobs": values})


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(row.line() + "\n" for row in rows), encoding="utf-8")
    return path
