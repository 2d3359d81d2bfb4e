"""Ways to cut the work of experts and attention, checked and timed on one GPU: what the defaults are chosen by.

    PYTHONPATH=src python benchmarks/h200_kernels_sweep.py --out DIR [--seconds 60] [--commit HASH] [--only TEXT]

A group is one shape. Its reference is computed once; every candidate is held to it before it is timed, and compared bit
for bit with the group's first, which is the present default. A line each: median and quartiles of graph replays with a
cold L2, the share of the roofline (the longer of fewest bytes over the measured copy bandwidth, and operations over the
measured matrix rate), and the speed over the default. The three fastest of a group and its default are profiled kernel
by kernel. DIR/sweep.json is written after every group.

Kernels are compiled beforehand by as many processes as there are cores (--compile, used by the script itself).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.bench import attention, experts
from tracefp4.bench.registry import Timer, environment
from tracefp4.kernels.grouped_experts import routed_experts
from tracefp4.kernels.grouped_experts.triton import ExpertsConfig
from tracefp4.kernels.paged_attention import paged_decode
from tracefp4.kernels.paged_attention.triton import AttentionConfig

DEVICE = torch.device("cuda")
QWEN = (experts.HIDDEN, experts.WIDTH, experts.EXPERTS, experts.TOP)
SMS = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


@dataclass
class Group:
    """Candidates at one shape, the default first; check: raises AssertionError or says how far off a result is."""

    name: str
    make: Callable[[], Any]
    candidates: dict[str, Callable[[Any], Any]]
    reference: Callable[[Any], Any]
    check: Callable[[Any, Any], str]
    bytes_moved: int
    operations: int
    profile: bool = False
    compiled: bool = False  # its kernels are those of a group before it


# -- experts ---------------------------------------------------------------------------------------------------------


def strips(outputs: int, rows: int, warps: int, stages: int, down: int, tails: int, **more: Any) -> ExpertsConfig:
    return ExpertsConfig(outputs, rows, warps, stages, down=down, tails=tails, strips=True, **more)


def pieces(outputs: int, rows: int, warps: int, stages: int, **more: Any) -> ExpertsConfig:
    return ExpertsConfig(outputs, rows, warps, stages, **more)


def label(c: Any) -> str:
    """The settings of a config that are not its class's defaults."""
    plain = {name: f.default for name, f in type(c).__dataclass_fields__.items()}
    return " ".join(f"{k}={v}" for k, v in asdict(c).items() if v != plain[k])


def check_experts(got: Tensor, want: Tensor) -> str:
    """Limits of `tracefp4.bench.experts.check`."""
    got, want = got.float(), want.float()
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(torch.inf)
    worst, median = float(error.max()), float(error.median())
    assert worst < 2e-2, f"worst row off by {worst:.2g}"
    assert median < 5e-3, f"median row off by {median:.2g}"
    return f"rows off by {median:.1e}, worst {worst:.1e}"


def expert_group(N: int, kind: str, configs: list[ExpertsConfig]) -> Group:
    candidates: dict[str, Callable[[Any], Any]] = {"default": partial(experts.run)}
    candidates |= {label(c): partial(experts.run, config=c) for c in configs}
    return Group(
        f"experts {kind} {N} tokens",
        lambda: experts.make(N, kind, DEVICE, QWEN),
        candidates,
        lambda inputs: routed_experts(**inputs, backend="torch"),
        check_experts,
        experts._bytes(N, kind, QWEN),
        6 * N * QWEN[3] * QWEN[0] * QWEN[1],
        profile=True,
    )


FP4 = {
    4096: [
        strips(64, 256, 8, 3, 128, 2, parts=4),
        strips(64, 128, 4, 2, 128, 2),
        strips(64, 128, 4, 3, 128, 2, parts=4),
    ],
    1024: [
        strips(64, 64, 4, 3, 128, 2, registers=168, parts=4),
        strips(64, 128, 4, 2, 128, 2),
        strips(64, 96, 4, 2, 128, 1),
    ],
    499: [
        strips(64, 48, 4, 3, 128, 1, registers=128, parts=4),
        strips(64, 48, 4, 3, 64, 1, registers=128, parts=4),
        strips(64, 48, 4, 4, 128, 1, registers=168),
        strips(64, 48, 4, 3, 128, 1, registers=168, parts=1),
        strips(64, 48, 4, 4, 128, 1, registers=168, parts=1),
        strips(64, 48, 4, 2, 128, 1, registers=168, unroll=2),
        strips(128, 48, 8, 3, 256, 1, registers=128, parts=4),
        strips(64, 32, 4, 3, 128, 1, registers=128, parts=4),
        strips(64, 64, 4, 3, 128, 2, registers=168),
    ],
    256: [
        strips(64, 32, 4, 3, 128, 1, registers=128),
        strips(64, 32, 4, 3, 128, 1, registers=128, parts=4),
        strips(64, 48, 4, 3, 128, 1, registers=128, parts=4),
        strips(64, 16, 4, 3, 128, 0),
    ],
    121: [
        strips(32, 16, 4, 3, 64, 0),
        strips(64, 16, 4, 4, 128, 0),
        strips(64, 16, 4, 3, 128, 0, registers=96, parts=4),
        strips(64, 16, 4, 4, 128, 0, registers=96, parts=4),
        strips(64, 16, 4, 3, 64, 0),
    ],
    31: [
        pieces(64, 8, 2, 3),
        strips(64, 8, 4, 4, 128, 0),
        strips(64, 8, 4, 4, 64, 0),
        strips(32, 8, 2, 4, 64, 0),
    ],
}
BF16 = {
    4096: [strips(64, 128, 4, 3, 128, 2, bulk=True), strips(128, 128, 8, 4, 256, 1, bulk=True)],
    85: [pieces(64, 16, 4, 4, dense_inner=128, down=128, bulk=True), pieces(64, 16, 4, 3, dense_inner=128, down=128)],
}


# -- attention -------------------------------------------------------------------------------------------------------


def cut(tile: int, warps: int, stages: int, per_sm: int, **more: Any) -> AttentionConfig:
    return AttentionConfig(tile, warps, stages, per_sm * SMS, **more)


def exact_attention(inputs: dict[str, Any]) -> list[tuple[int, Tensor]]:
    """(sequence, its FP32 output) of a few sequences."""
    found = []
    for b in sorted({0, len(inputs["q_BHD"]) // 2, len(inputs["q_BHD"]) - 1}):
        pages = -(-int(inputs["lengths_B"][b]) // inputs["cache"].page_size)
        one = {k: v[b : b + 1] if k in ("q_BHD", "block_tables_BP", "lengths_B") else v for k, v in inputs.items()}
        one |= {"block_tables_BP": one["block_tables_BP"][:, :pages], "q_BHD": one["q_BHD"].float()}
        found.append((b, paged_decode(**one, backend="torch")[0]))
    return found


def check_attention(got: Tensor, want: list[tuple[int, Tensor]]) -> str:
    """Limits of `tracefp4.bench.attention.check`; sequences that the reference leaves out must be finite."""
    assert bool(torch.isfinite(got).all()), "values that are not finite"
    worst, relative = 0.0, 0.0
    for b, exact in want:
        error = got[b].float() - exact
        worst = max(worst, float(error.abs().max()))
        relative = max(relative, float((error.norm(dim=-1) / exact.norm(dim=-1)).max()))
    assert worst <= 3 * 2.0**-9 * 6, f"off by {worst:.3g}"
    assert relative <= 2.0**-7, f"a head is off by {relative:.3g} of its norm"
    return f"off by {worst:.1e}, {relative:.1e} of a head's norm"


def attention_group(name: str, lengths: list[int], kind: str, configs: list[AttentionConfig], D: int = 128) -> Group:
    heads = (32, 4) if D == 128 else (16, 2)
    shape: attention.Shape = (lengths, *heads, D, 64)
    candidates: dict[str, Callable[[Any], Any]] = {"default": partial(attention.run)}
    candidates |= {label(c): partial(attention.run, config=c) for c in configs}

    return Group(
        f"attention {kind} {name}, heads of {D}",
        lambda: attention.make(shape, kind, DEVICE),
        candidates,
        exact_attention,
        check_attention,
        attention._bytes(shape, kind),
        4 * sum(lengths) * heads[0] * D,
        profile=True,
    )


def layers_group(name: str, lengths: list[int], layers: int, configs: list[AttentionConfig]) -> Group:
    """FP4 attention over one cache after the other, as in a step: each finds its pages' addresses untranslated.

    Times are those of all calls together; the share of the bound is that of one.
    """
    shape: attention.Shape = (lengths, 32, 4, 128, 64)

    def run(all_inputs: list[dict[str, Any]], config: AttentionConfig | None = None) -> Tensor:
        return [attention.run(inputs, config) for inputs in all_inputs][-1]

    return Group(
        f"attention fp4 {name}, {layers} caches in turn",
        lambda: [attention.make(shape, "fp4", DEVICE) for _ in range(layers)],
        {"default": run} | {label(c): partial(run, config=c) for c in configs},
        lambda all_inputs: exact_attention(all_inputs[-1]),
        check_attention,
        layers * attention._bytes(shape, "fp4"),
        layers * 4 * sum(lengths) * 32 * 128,
        profile=True,
        compiled=True,
    )


# A scheduler has 16384 registers: 168 of a thread let 3 warps stay on it, 128 let 4, so 12 or 16 programs of one warp.
FP4_CUTS = [
    cut(64, 1, 2, 16, even=True, registers=128, lazy=True),
    cut(64, 1, 2, 16, even=True, registers=128, lazy=True, fused=True),
    cut(64, 1, 2, 16, even=True, registers=128),
    cut(64, 1, 2, 12, even=True, registers=168, lazy=True),
    cut(64, 1, 2, 12, even=True, registers=168, lazy=True, fused=True),
    # Two tiles on their way: 12 times 18 KB and 1 KB each are all the shared memory there is.
    cut(64, 1, 3, 12, even=True, registers=168, lazy=True),
    cut(32, 1, 2, 16, even=True, registers=128, lazy=True),
    cut(32, 1, 3, 16, even=True, registers=128, lazy=True),
    # More parts than places: a multiprocessor that is done early takes another.
    cut(64, 1, 2, 32, even=True, registers=128, lazy=True),
    cut(64, 1, 2, 48, even=True, registers=128, lazy=True),
    cut(64, 1, 2, 24, even=True, registers=168, lazy=True),
    cut(64, 1, 2, 16, registers=128, lazy=True),
]
BF16_CUTS = [cut(64, 4, 2, 4), cut(64, 4, 2, 8, even=True)]


def groups() -> list[Group]:
    """Most wanted first: the defaults beside their neighbours, at the sizes of a whole decode step and of prefill."""
    return [
        attention_group("499 x 8K", [8192] * 499, "fp4", FP4_CUTS),
        layers_group("499 x 8K", [8192] * 499, 12, FP4_CUTS[:5]),
        expert_group(499, "W4A4", FP4[499]),
        expert_group(121, "W4A4", FP4[121]),
        expert_group(31, "W4A4", FP4[31]),
        expert_group(256, "W4A4", FP4[256]),
        expert_group(1024, "W4A4", FP4[1024]),
        expert_group(4096, "W4A4", FP4[4096]),
        attention_group("121 x 32K", [32768] * 121, "fp4", FP4_CUTS),
        attention_group("31 x 128K", [131072] * 31, "fp4", FP4_CUTS),
        attention_group("85 x 8K", [8192] * 85, "bf16", BF16_CUTS),
        expert_group(85, "BF16", BF16[85]),
        expert_group(4096, "BF16", BF16[4096]),
    ]


# -- running ---------------------------------------------------------------------------------------------------------


def compile_part(part: int, of: int, only: str) -> None:
    """Runs some candidates once, so that Triton's cache has their kernels. A failure is reported when it is timed."""
    jobs = [(g, name) for g in groups() if only in g.name and not g.compiled for name in g.candidates]
    inputs: dict[str, Any] = {}
    for group, name in jobs[part::of]:
        try:
            if group.name not in inputs:
                inputs.clear()
                inputs[group.name] = group.make()
            group.candidates[name](inputs[group.name])
            torch.cuda.synchronize()
        except Exception:
            traceback.print_exc(limit=1)


def compile_all(only: str, seconds: float) -> None:
    n = max(1, min(14, (os.cpu_count() or 2) - 1))
    command = [sys.executable, __file__, "--only", only, "--compile"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen([*command, f"{i}/{n}"], **quiet) for i in range(n)]
    stop = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, stop - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def limits(timer: Timer) -> dict[str, float]:
    a = torch.randint(0, 255, (1 << 32,), dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    copy = min(timer(partial(b.copy_, a), graph=graph)[0] for graph in (False, True))
    x, y = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    product = timer(partial(torch.mm, x, y))[0]
    return {"copy_bytes_per_s": 2 * a.numel() / copy * 1e6, "bf16_flop_per_s": 2 * 8192**3 / product * 1e6}


def kernels_of(run: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of a call, by torch's profiler, over five calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    rows = [(e.key, e.device_time_total / 5, e.count / 5) for e in profiler.key_averages() if e.device_time_total]
    return {f"{name[:60]} x{n:g}": round(us, 1) for name, us, n in sorted(rows, key=lambda r: -r[1])}


def measure(group: Group, timer: Timer, ceilings: dict[str, float]) -> list[dict[str, Any]]:
    inputs = group.make()
    want = group.reference(inputs)
    bound = max(group.bytes_moved / ceilings["copy_bytes_per_s"], group.operations / ceilings["bf16_flop_per_s"])
    rows: list[dict[str, Any]] = []
    default: Tensor | None = None
    for name, run in group.candidates.items():
        row: dict[str, Any] = {"candidate": name}
        rows.append(row)
        begun = time.monotonic()
        try:
            got = run(inputs)
            row["check"] = group.check(got, want)
            if default is not None:
                row["equal_bits"] = bool(torch.equal(got, default))
            if name == "default":
                default = got
            median, quartiles, graph = timer(partial(run, inputs))
            row |= {"median_us": median, "quartiles_us": quartiles, "graph": graph, "of_bound": bound * 1e6 / median}
            row["speedup"] = rows[0].get("median_us", median) / median
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc(limit=-3)
        row["seconds"] = round(time.monotonic() - begun, 2)
        print(line(group.name, row), flush=True)
    timed = [r for r in rows if r.get("median_us")]
    if group.profile and timed:
        fastest = sorted(timed, key=lambda r: float(r["median_us"]))[:3]
        for row in [rows[0], *(r for r in fastest if r is not rows[0])]:
            row["kernels_us"] = kernels_of(partial(group.candidates[row["candidate"]], inputs))
            print(f"    {row['candidate']}: {row['kernels_us']}", flush=True)
    return rows


def line(group: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{group} | {row['candidate']} | FAILED {row['error'][:160]}"
    low, high = row["quartiles_us"]
    equal = {True: "equal bits", False: "other bits", None: ""}[row.get("equal_bits")]
    return (
        f"{group} | {row['candidate']} | {row['median_us']:.1f} us ({low:.1f}-{high:.1f})"
        f"{'' if row['graph'] else ' eager'} | {row['of_bound']:.0%} of bound | x{row['speedup']:.3f}"
        f" | {row['check']} {equal}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="no group is begun after this long")
    parser.add_argument("--commit")
    parser.add_argument("--only", default="", metavar="TEXT", help="groups whose name contains this")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: kernels are timed on one", file=sys.stderr)
        return 2
    if args.compile:
        part, of = map(int, args.compile.split("/"))
        compile_part(part, of, args.only)
        return 0
    begun = time.monotonic()
    compile_all(args.only, args.seconds / 3)
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    timer = Timer(DEVICE, 15)
    about, ceilings = environment(DEVICE, args.commit), limits(timer)
    print(about, ceilings, flush=True)
    everything = [g for g in groups() if args.only in g.name]
    done: dict[str, list[dict[str, Any]]] = {}
    for group in everything:
        if time.monotonic() - begun > args.seconds:
            print(f"left out: {group.name}")
            continue
        try:
            done[group.name] = measure(group, timer, ceilings)
        except Exception as error:
            done[group.name] = [{"candidate": "all", "error": f"{type(error).__name__}: {error}"[:300]}]
            traceback.print_exc(limit=-4)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            document = {"environment": about, "limits": ceilings, "groups": done}
            (args.out / "sweep.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - begun:.0f} s")
    return int(any("error" in row for rows in done.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
