"""Check and time the kernels.

    tracefp4 bench kernels --device cuda --out DIR   all checks and timings, a sweep of attention's settings
    tracefp4 bench kernels --check-only              small shapes; under Triton's interpreter on the CPU

Exit status 1 if a case failed its check or raised.
"""

from __future__ import annotations

import gc
import os
import time

import torch

from tracefp4.bench.options import bench_device, bench_parser, refuse_unmatched, run_module
from tracefp4.config import ConfigError


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser("kernels", "Check and time the kernels.")
    parser.add_argument("--no-sweep", action="store_true", help="default settings only")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls a case")
    args = parser.parse_args(arguments)
    device = bench_device(args.device)
    if device.type == "cpu":
        if not args.check_only:
            raise ConfigError("on the CPU the kernels run under Triton's interpreter only: add --check-only")
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

    from tracefp4.bench import attention, experts, quantize, rounding
    from tracefp4.bench.registry import Result, Timer, derive, environment, markdown, run_case, table, write

    small = device.type == "cpu"
    cases = attention.cases(small, sweep=False) + quantize.cases(small)
    cases += experts.cases(small, sweep=False) + rounding.cases(small)
    if not (args.no_sweep or args.check_only):
        cases += attention.cases(small, sweep=True) + experts.cases(small, sweep=True)
    names = [f"{c.op}, {c.name}" for c in cases]
    cases = [c for c in cases if args.only in f"{c.op}, {c.name}"]
    if not cases:
        raise refuse_unmatched(args.only, names)
    timer = None if args.check_only else Timer(device, args.repeats)
    limits = {}
    if timer is not None:
        from tracefp4.bench.bandwidth import ceilings

        limits = ceilings(timer, device)
    about = environment(device, args.commit)
    print(about, limits, flush=True)
    results: list[Result] = []
    begun = time.monotonic()
    for case in cases:
        if time.monotonic() - begun > args.seconds:
            print(f"{len(cases) - len(results)} cases left out: {args.seconds:g} seconds are over")
            break
        results.append(run_case(case, device, timer))
        derive(results, limits)
        last = results[-1]
        timed = (
            "" if last.median_us is None else f"{last.median_us:.1f} us, {last.derived['bytes_per_s'] / 1e12:.2f} TB/s"
        )
        print(f"[{last.seconds:.1f} s] {last.op}, {last.name}: {last.error or last.checked}; {timed}", flush=True)
        if args.out is not None:
            write(args.out, about, limits, results)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(markdown(about, limits, results) if args.markdown else table(results))
    return int(any(r.error is not None for r in results))


if __name__ == "__main__":
    run_module(main)
