"""The same product of FP4 experts over and over, on several streams and processes at once: does any bit ever change?

    benchmarks/with_mps.sh python benchmarks/soak_experts.py --seconds 60 --processes 8 --streams 4
    PYTHONPATH=src python benchmarks/soak_experts.py --rows 32,64 ...      one process, two batch sizes

`soak.py` repeats whole rollouts and names the operation; this repeats the one that a loaded tensor core can disturb
(docs/LOG.md), thousands of times a second, by captured graphs, at every range of `default_config` below a few hundred
rows. Output is compared on the device with the first one's, row by row. Per process and number of rows: calls, those
with a difference, and the rows (of a token's expert) that differed in the worst of them. Exit code: 0 no difference,
1 some, 2 it could not run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from tracefp4 import signals
from tracefp4.bench.workers import DIFFERENT, run_workers, told_failure
from tracefp4.kernels.grouped_experts import PackedExperts, routed_experts
from tracefp4.recipe import quantize_expert_weights

REPEATS = 16
"""Calls of a graph."""


class Case:
    """One batch of N rows over given experts, its reference output, and what has differed from it since."""

    def __init__(self, rows: int, weights: tuple[PackedExperts, PackedExperts], top: int, seed: int) -> None:
        gate_up = weights[0]
        device = gate_up.words.device
        g = torch.Generator().manual_seed(seed)
        hidden, experts = gate_up.inputs, gate_up.experts
        self.rows, self.weights = rows, weights
        self.x = torch.randn(rows, hidden, generator=g).bfloat16().to(device)
        self.chosen = torch.rand(rows, experts, generator=g).topk(top, dim=1).indices.to(device)
        self.gates = torch.full((rows, top), 1 / top, device=device)
        self.calls = 0
        self.different, self.worst = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.reference = self.output()

    def output(self) -> Tensor:
        """BF16 [N, K, hidden]."""
        backend = "triton" if self.x.is_cuda else "torch"
        return routed_experts(
            self.x, self.chosen, self.gates, *self.weights, backend=backend, activations="nvfp4",
            encode_scale="row-pow2", summed=False,
        )  # fmt: skip

    def call(self) -> None:
        """Once more, compared bit for bit; asks the host nothing."""
        found = (self.output().view(torch.int16) != self.reference.view(torch.int16)).any(-1).sum()
        self.different += found > 0
        torch.maximum(self.worst, found, out=self.worst)

    def capture(self) -> None:
        self.call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(REPEATS):
                self.call()

    def repeat(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            for _ in range(REPEATS):
                self.call()
        self.calls += REPEATS


def packed(experts: int, outputs: int, inputs: int, device: str) -> PackedExperts:
    g = torch.Generator().manual_seed(outputs)
    w = torch.randn(experts, outputs, inputs, generator=g).bfloat16() * 0.05
    return PackedExperts.pack(quantize_expert_weights(w.to(device), "nvfp4", True))


def soak(args: argparse.Namespace) -> list[Case]:
    """Cases of one process, every one on a stream of its own, ``args.seconds`` long."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, width, experts, top = args.shape
    weights = packed(experts, 2 * width, hidden, device), packed(experts, hidden, width, device)
    cases = [Case(n, weights, top, seed) for n in args.rows for seed in range(args.streams)]
    streams: list[torch.cuda.Stream] = []
    if device == "cuda":
        for case in cases:
            case.capture()
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in cases]
    stop = time.monotonic() + args.seconds
    while time.monotonic() < stop:
        for i, case in enumerate(cases):
            if streams:
                with torch.cuda.stream(streams[i]):
                    case.repeat()
            else:
                case.repeat()
        if streams:
            torch.cuda.synchronize()
    return cases


def summary(cases: Sequence[Case], name: str) -> int:
    """Prints a line for every number of rows; returns the calls that differed."""
    bad = 0
    for rows in dict.fromkeys(case.rows for case in cases):
        of = [case for case in cases if case.rows == rows]
        different, worst = sum(int(c.different) for c in of), max(int(c.worst) for c in of)
        print(f"{name} {rows} rows: {sum(c.calls for c in of)} calls, {different} differ, {worst} rows at most")
        bad += different
    return bad


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of every process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--streams", type=int, default=4, help="batches of a number of rows at the same time")
    parser.add_argument("--rows", type=numbers, default=numbers("24,32,64,128,256,512"))
    parser.add_argument("--shape", type=numbers, default=numbers("256,256,8,2"), help="hidden, width, experts, top")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if len(args.shape) != 4 or min(args.shape) < 1 or args.shape[0] % 128 or args.shape[1] % 128:
        parser.error(f"--shape takes hidden, width, experts and top, widths multiples of 128, got {args.shape}")
    for name, least in (("processes", args.processes), ("streams", args.streams), ("rows", min(args.rows))):
        if least < 1:
            parser.error(f"--{name} must be at least 1, got {least}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.worker is not None:
        signals.end_with_stdin()
        return DIFFERENT if summary(soak(args), f"process {args.worker},") else 0
    if not torch.cuda.is_available():
        print("no GPU: repeats the kernels' torch references, which no load disturbs", file=sys.stderr)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        codes = run_workers([[sys.executable, __file__, *given, "--worker", str(i)] for i in range(args.processes)])
    except signals.Stopped as stop:
        print(f"stopped by {stop}", file=sys.stderr)
        return stop.exit_code
    return 2 if told_failure(codes) else int(DIFFERENT in codes)


if __name__ == "__main__":
    sys.exit(main())
