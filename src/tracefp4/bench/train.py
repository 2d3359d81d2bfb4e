"""Time a training step: BF16, rounded to nearest (vanilla QAT), and guided, in one model.

    tracefp4 bench train --device cuda --out DIR         8 layers of Qwen3-30B-A3B's shape, 8K tokens
    tracefp4 bench train --device cpu --layers 2 ...     the same on small sizes (--help lists them)

A step is a forward and a backward pass through transformers' Qwen3MoeForCausalLM as `prepare_model` leaves it. Modes
take turns, so that what drifts hits all alike. Exit status 1 if a check failed; then nothing is timed.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from tracefp4.bench.options import bench_device, bench_parser, refuse_unmatched, run_module
from tracefp4.bench.registry import environment, facts_list
from tracefp4.bench.train_checks import check_all
from tracefp4.bench.train_model import GUIDED, QAT, UNQUANTIZED, TrainShape, TrainStep
from tracefp4.config import ConfigError
from tracefp4.nn.weights import drop_kept_weights
from tracefp4.recipe import resolve_guided_layers

BF16, STOCK = "bf16", "bf16, transformers' own modules"
FIRST, KEPT = "weights quantized in the step", "weights kept from the step before"
MODES = ("qat", "guided, deeper half", "guided, all layers")
TARGETS = ((BF16, 1.25), ("qat", 1.05))
"""A guided step over the same in BF16, and over vanilla QAT, at most."""


@dataclass
class Case:
    """A row. run: one step; quantizes: weights are made anew in it; times: seconds of each round."""

    name: str
    run: Callable[[], Any]
    quantizes: bool = False
    over: tuple[str, ...] = ()
    times: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    error: str | None = None


def make_cases(step: TrainStep) -> list[Case]:
    """Every mode; quantized ones as the first micro-batch after an update, and as a later one."""
    records = step.records()
    half = resolve_guided_layers("deeper-half", step.shape.layers)
    deeper = {where: record for where, record in records.items() if where[1] in half}
    runs = (lambda: step.run(QAT), lambda: step.run(GUIDED, deeper), lambda: step.run(GUIDED, records))
    cases = [Case(BF16, lambda: step.run(UNQUANTIZED)), Case(STOCK, step.run_stock, over=(BF16,))]
    for when in (FIRST, KEPT):
        for mode, run in zip(MODES, runs, strict=True):
            over = (BF16,) if mode == "qat" else (BF16, f"qat, {when}")
            cases.append(Case(f"{mode}, {when}", run, when == FIRST, over))
    return cases


def _once(case: Case, step: TrainStep) -> float:
    """Seconds of one step, the device's work included."""
    if case.quantizes:
        step.context.weights_changed()
    if step.device.type != "cuda":
        begun = time.perf_counter()
        case.run()
        return time.perf_counter() - begun
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    case.run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def warm_up(cases: list[Case], step: TrainStep) -> int | None:
    """Runs every case alone, from no kept weights, and notes its peak; returns the bytes of kept weights."""
    kept = None
    for case in cases:
        try:
            if step.device.type == "cuda":
                drop_kept_weights(step.model)
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            _once(case, step)
            if step.device.type == "cuda":
                torch.cuda.synchronize()
                case.peak_bytes = torch.cuda.max_memory_allocated()
                if case.name.startswith("qat"):
                    kept = torch.cuda.memory_allocated() - before
        except Exception as error:  # the report must list every case
            case.error = f"{type(error).__name__}: {error}".splitlines()[0]
            traceback.print_exc(limit=-6)
    return kept


def measure(
    cases: list[Case], step: TrainStep, rounds: int, seconds: float, done: Callable[[int], None] | None = None
) -> None:
    """Up to ``rounds`` rounds in which the cases take turns; none is begun once ``seconds`` are over. done(n) after
    each."""
    good = [c for c in cases if c.error is None]
    begun = time.monotonic()
    for n in range(rounds):
        if n and time.monotonic() - begun > seconds:
            break
        for case in good:
            case.times.append(_once(case, step))
        if done is not None:
            done(n + 1)


def results(cases: list[Case], shape: TrainShape, bf16_rate: float | None) -> list[dict[str, Any]]:
    """Rows of results.json: medians, quartiles, ratios of medians and their spread over rounds, rates, peaks."""
    times = {c.name: c.times for c in cases}
    rows = []
    for c in cases:
        row: dict[str, Any] = {"name": c.name, "rounds": len(c.times), "error": c.error, "peak_bytes": c.peak_bytes}
        if c.times:
            median = statistics.median(c.times)
            row |= {
                "median_ms": median * 1e3,
                "quartiles_ms": [t * 1e3 for t in _quartiles(c.times)],
                "tokens_per_s": shape.tokens / median,
                "flop_per_s": shape.operations / median,
            }
            if bf16_rate is not None:
                row["share_of_bf16"] = row["flop_per_s"] / bf16_rate
            for base in c.over:
                if times.get(base):
                    ratios = [a / b for a, b in zip(c.times, times[base], strict=False)]
                    key = BF16 if base == BF16 else "qat"
                    row[f"over_{key}"] = median / statistics.median(times[base])
                    row[f"over_{key}_quartiles"] = list(_quartiles(ratios))
        rows.append(row)
    return rows


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    q = statistics.quantiles(values, n=4)
    return q[0], q[2]


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every guided row against its limits."""
    return [
        {"what": f"{row['name']}, over {base}", "value": row[f"over_{base}"], "limit": limit,
         "met": row[f"over_{base}"] <= limit}
        for row in rows if row["name"].startswith("guided")
        for base, limit in TARGETS if f"over_{base}" in row
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one row a case."""
    lines = [
        "| step | median ms | quartiles | over BF16 | over QAT | tokens/s | TFLOP/s | of bf16 | peak GiB |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        if r["error"] is not None or "median_ms" not in r:
            why = "not timed" if r["error"] is None else f"FAILED: {r['error'][:90]}"
            lines.append(f"| {r['name']} | {why} |" + " |" * 7)
            continue
        ratios = [f"{r[f'over_{k}']:.3f}" if f"over_{k}" in r else "" for k in (BF16, "qat")]
        share = f"{100 * r['share_of_bf16']:.0f} %" if "share_of_bf16" in r else ""
        peak = "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.1f}"
        low, high = r["quartiles_ms"]
        lines.append(
            f"| {r['name']} | {r['median_ms']:.1f} | {low:.1f}-{high:.1f} | {ratios[0]} | {ratios[1]} "
            f"| {r['tokens_per_s']:.0f} | {r['flop_per_s'] / 1e12:.4g} | {share} | {peak} |"
        )
    return "\n".join(lines)


def _bf16_rate(device: torch.device) -> float | None:
    """FLOP/s of a BF16 product of 8192 x 8192 x 8192; None on the CPU."""
    if device.type != "cuda":
        return None
    from tracefp4.bench.registry import Timer

    x, y = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * 8192**3 / Timer(device, 10)(lambda: torch.mm(x, y), graph=False)[0] * 1e6


def _shape(args: Any) -> TrainShape:
    return TrainShape(**{f.name: getattr(args, f.name) for f in fields(TrainShape)})


def _write(out: Path | None, document: dict[str, Any]) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / "results.md").write_text(markdown(document) + "\n", encoding="utf-8")


def markdown(document: dict[str, Any]) -> str:
    """What docs/benchmarks.md shows of a results.json: facts, checks and table."""
    facts = {**document["environment"], "step": document["step"], "checks": "; ".join(document["checks"])}
    if document["kept_bytes"] is not None:
        facts["kept weights"] = f"{document['kept_bytes'] / 2**30:.2f} GiB"
    return f"{facts_list(facts, document['limits'])}\n\n{table(document['results'])}"


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser("train", "Check and time a training step.")
    parser.add_argument("--repeats", type=int, default=20, help="rounds, in each of which every case runs once")
    for f in fields(TrainShape):
        name = f"--{f.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=f.default, metavar="N", help=f"{f.default} unless told")
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {args.repeats}")
    device, shape = bench_device(args.device), _shape(args)
    document: dict[str, Any] = {
        "environment": environment(device, args.commit),
        "shape": asdict(shape),
        "step": f"{shape.name}, no gradient checkpointing, {shape.operations / 1e12:.4g} TFLOP",
        "limits": {},
        "checks": [],
        "kept_bytes": None,
        "results": [],
        "targets": [],
    }
    print(document["environment"], document["step"], flush=True)
    try:
        document["checks"] = check_all(device)
    except AssertionError as error:
        print(f"FAILED: {error}")
        _write(args.out, document | {"checks": [f"FAILED: {error}"]})
        return 1
    print("; ".join(document["checks"]), flush=True)
    _write(args.out, document)
    if args.check_only:
        return 0
    cases = _timed(shape, device, args, document)
    print(markdown(document) if args.markdown else table(document["results"]))
    for t in document["targets"]:
        print(f"{t['what']}: {t['value']:.3f}, at most {t['limit']}: {'met' if t['met'] else 'NOT met'}")
    return int(any(c.error is not None for c in cases))


def _timed(shape: TrainShape, device: torch.device, args: Any, document: dict[str, Any]) -> list[Case]:
    """Runs the cases; the document is complete and written after every round."""
    step = TrainStep(shape, device)
    every = make_cases(step)
    cases = [c for c in every if args.only in c.name]
    if not cases:
        raise refuse_unmatched(args.only, [c.name for c in every])
    rate = _bf16_rate(device)
    if rate is not None:
        document["limits"] = {"bf16_flop_per_s": rate}
    document["kept_bytes"] = warm_up(cases, step)

    def done(round_: int) -> None:
        document["results"] = results(cases, shape, rate)
        if device.type == "cuda":  # on the CPU the references run, whose speed nobody asked for
            document["targets"] = targets(document["results"])
        _write(args.out, document)
        print(f"round {round_} of {args.repeats}", flush=True)

    measure(cases, step, args.repeats, args.seconds, done)
    if not document["results"]:  # every case failed
        document["results"] = results(cases, shape, rate)
        _write(args.out, document)
    return cases


if __name__ == "__main__":
    run_module(main)
