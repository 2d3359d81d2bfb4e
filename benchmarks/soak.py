"""The same rollout and the same training forward over and over: does any bit ever change?

    PYTHONPATH=src python benchmarks/soak.py RECIPE [KEY=VALUE ...] --out DIR --seconds 120 --processes 8
    benchmarks/with_mps.sh python benchmarks/soak.py ...            several processes that share a GPU at the same time

With the same weights and seeds the engine draws the same tokens, log-probs, experts and records, whatever the device's
load, and a forward gives the same log-probs: a difference is a race, in a kernel or between host and device. Every
process (they are spread over the visible GPUs) compares each round with the first one's reference and writes what
differs to DIR/worker<i>.jsonl: the trajectories, each one's first row or token that differs, and in which order sites
and layers do, so that the first of them names the operation. ``method.bits=4.5`` records whole codes. Exit code: 0 no
difference, 1 some, 2 it could not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4 import signals
from tracefp4.bench.workers import DIFFERENT, run_workers, told_failure
from tracefp4.config import load_config
from tracefp4.errors import TracefpError
from tracefp4.guidance.store import MemoryStore, TrajectoryGuidance
from tracefp4.loop import RunConfig
from tracefp4.loop.parts import Parts, preflight
from tracefp4.report import ensure_dir
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.types import Request, Trajectory

ORDER = ("key", "value", "expert_input")
"""Sites of a layer in the order in which they are computed."""
MOST_TOLD = 20


@dataclass(frozen=True)
class Kept:
    """What is compared of one response. sites: in the order of computation, the bytes of every row."""

    tokens: tuple[int, ...]
    logprobs: Tensor
    experts: Tensor | None
    sites: dict[tuple[int, str], Tensor]


def kept(t: Trajectory, record: TrajectoryGuidance | None) -> Kept:
    """Of a trajectory and its record."""
    sites: dict[tuple[int, str], Tensor] = {}
    for i, layer in enumerate(record.layers if record is not None else ()):
        for name in ORDER:
            rows = record.sites.get(name) if record is not None else None
            if rows is None:
                continue
            found = rows.payload[i]
            if rows.encode_scale is not None and rows.encode_scale.ndim == 2:
                found = torch.cat([found, rows.encode_scale[i].contiguous().view(torch.uint8).view(len(found), 4)], 1)
            sites[layer, name] = found
    return Kept(t.token_ids, t.logprobs, t.routed_experts, sites)


def differences(reference: Kept, other: Kept) -> dict[str, Any] | None:
    """Where two responses to the same request part; None where they are the same, bit for bit.

    first_token, first_row: of the response and of the record; sites: those that differ in that row, in order;
    rows: how many rows differ.
    """
    n = min(len(reference.tokens), len(other.tokens))
    token = next((i for i in range(n) if reference.tokens[i] != other.tokens[i]), None)
    if token is None and len(reference.tokens) != len(other.tokens):
        token = n
    logprob = _first(reference.logprobs, other.logprobs)
    per_site = {where: _rows(rows, other.sites[where]) for where, rows in reference.sites.items()}
    experts = None
    if reference.experts is not None and other.experts is not None:
        experts = _rows(reference.experts.flatten(1), other.experts.flatten(1))
    parts = [*per_site.values(), *([] if experts is None else [experts])]
    anywhere = torch.zeros(max(map(len, parts), default=0))
    for found in parts:
        anywhere[: len(found)] += found
    rows = anywhere.nonzero()[:, 0].tolist()
    if token is None and logprob is None and not rows:
        return None
    at = rows[0] if rows else None
    return {
        "tokens": len(reference.tokens),
        "first_token": token,
        "first_logprob": logprob,
        "first_row": at,
        "rows": len(rows),
        "sites": [
            f"{layer} {name}" for (layer, name), x in per_site.items() if at is not None and at < len(x) and x[at]
        ],
        "experts": bool(experts is not None and at is not None and at < len(experts) and experts[at]),
    }


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """bool [rows of both]: whether a row differs."""
    n = min(len(a), len(b))
    return (a[:n] != b[:n]).any(1)


def _first(a: Tensor, b: Tensor) -> int | None:
    n = min(len(a), len(b))
    where = (a[:n].view(torch.int32) != b[:n].view(torch.int32)).nonzero()
    return int(where[0]) if len(where) else None


class Soak:
    """An engine and a trainer of one recipe over the same checkpoint."""

    def __init__(self, config: RunConfig) -> None:
        self.parts: Parts = preflight(config)
        self.store = MemoryStore()
        self.engine: RolloutEngine = self.parts.make_engine(self.store)
        self.trainer = self.parts.make_trainer(self.store)
        self.engine.update_weights(self.trainer.named_weights(), 0)
        s = config.sampling
        prompts, encoded = self.parts.encode(self.parts.task.train_prompts(0, s.prompts_per_step))
        self.requests: list[Request] = self.parts.requests(prompts, s.samples_per_prompt, "soak", encoded=encoded)

    def rollout(self) -> tuple[list[Trajectory], list[Kept]]:
        """One round; the records stay in the store until ``discard``."""
        out = self.engine.generate(self.requests)
        records = [None if t.guidance is None else self.store.get(t.guidance) for t in out]
        return out, [kept(t, r) for t, r in zip(out, records, strict=True)]

    def discard(self, trajectories: Sequence[Trajectory]) -> None:
        self.store.discard([t.guidance for t in trajectories if t.guidance is not None])

    def forward(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Log-probs of every micro-batch by the trainer's guided forward, f32 [B, T - 1]."""
        return [x.cpu() for x in self.trainer.logprobs(trajectories)]


def rounds(soak: Soak, seconds: float) -> Iterator[dict[str, Any]]:
    """What each round found, the first being the reference; each forward reads the records of its own round."""
    first, reference = soak.rollout()
    logprobs = soak.forward(first)
    yield {"round": 0, "responses": len(first), "tokens": sum(len(t.response_ids) for t in first)}
    soak.discard(first)
    stop, n = time.monotonic() + seconds, 0
    while n == 0 or time.monotonic() < stop:
        n += 1
        started = time.monotonic()
        out, again = soak.rollout()
        found = [(i, d) for i, (a, b) in enumerate(zip(reference, again, strict=True)) if (d := differences(a, b))]
        forward = []
        if not found:  # other responses are other batches
            forward = [i for i, (a, b) in enumerate(zip(logprobs, soak.forward(out), strict=True)) if not same(a, b)]
        soak.discard(out)
        yield {
            "round": n,
            "seconds": time.monotonic() - started,
            "different": len(found),
            "where": [{"response": i, **d} for i, d in found[:MOST_TOLD]],
            "forward": forward,
        }


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def work(args: argparse.Namespace) -> int:
    """One process; ``DIFFERENT`` where something differed."""
    bad = 0
    with (args.out / f"worker{args.worker}.jsonl").open("w") as log:
        for facts in rounds(Soak(load_config(args.recipe, args.overrides, RunConfig)), args.seconds):
            bad += bool(facts.get("different") or facts.get("forward"))
            log.write(json.dumps(facts) + "\n")
            log.flush()
    return DIFFERENT if bad else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="of `tracefp4 train`")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60, help="of every process, after its first round")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(arguments)
    if args.processes < 1:
        parser.error(f"--processes must be at least 1, got {args.processes}")
    if not args.seconds > 0:
        parser.error(f"--seconds must be more than 0, got {args.seconds:g}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if args.worker is not None:
            signals.end_with_stdin()
            return work(args)
        preflight(load_config(args.recipe, args.overrides, RunConfig))
        ensure_dir(args.out)
        return run_processes(args)
    except signals.Stopped as stop:
        print(f"stopped by {stop}; what was compared until then is in {args.out}", file=sys.stderr)
        return stop.exit_code
    except (TracefpError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_processes(args: argparse.Namespace) -> int:
    """All processes, and a summary."""
    given = [args.recipe, *args.overrides, "--out", str(args.out), "--seconds", str(args.seconds), "--worker"]
    codes = run_workers([[sys.executable, __file__, *given, str(i)] for i in range(args.processes)])
    total, bad = summary([args.out / f"worker{i}.jsonl" for i, code in enumerate(codes) if code in (0, DIFFERENT)])
    failure = told_failure(codes)
    return 2 if failure or not total else int(bad > 0)


def summary(paths: Sequence[Path]) -> tuple[int, int]:
    """Prints what all processes found; returns (rounds, those with a difference)."""
    total, bad = 0, 0
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if path == paths[0] and lines:
            print(f"a round: {lines[0]['responses']} responses, {lines[0]['tokens']} tokens")
        for facts in lines[1:]:
            total += 1
            if facts["different"] or facts["forward"]:
                bad += 1
                print(
                    f"{path.stem}, round {facts['round']}: {facts['different']} responses, forward {facts['forward']}"
                )
                for where in facts["where"][:3]:
                    print(f"  {where}")
    print(f"{total} rounds of {len(paths)} processes, {bad} with a difference")
    return total, bad


if __name__ == "__main__":
    sys.exit(main())
