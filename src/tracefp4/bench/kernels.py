"""Check and time the kernels.

    python -m tracefp4.bench.kernels --device cuda --out DIR   all checks and timings, a sweep of attention's settings
    python -m tracefp4.bench.kernels --check-only              small shapes; under Triton's interpreter on the CPU

Exit status 1 if a case failed its check or raised.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path

import torch


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tracefp4.bench.kernels", description="Check and time the kernels.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for results.json and results.md")
    parser.add_argument("--check-only", action="store_true", help="no timing; small shapes on the CPU")
    parser.add_argument("--no-sweep", action="store_true", help="default settings only")
    parser.add_argument("--only", default="", help="cases whose op or name contains this")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls a case")
    parser.add_argument("--seconds", type=float, default=480, help="no case is begun after this long")
    parser.add_argument("--commit", help="commit to write into the results, where there is no git checkout")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cpu":
        if not args.check_only:
            parser.error("on the CPU the kernels only run under Triton's interpreter: add --check-only")
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

    from tracefp4.bench import attention, experts, quantize, rounding
    from tracefp4.bench.registry import Result, Timer, derive, environment, run_case, table, write

    small = device.type == "cpu"
    cases = attention.cases(small, sweep=False) + quantize.cases(small)
    cases += experts.cases(small, sweep=False) + rounding.cases(small)
    if not (args.no_sweep or args.check_only):
        cases += attention.cases(small, sweep=True) + experts.cases(small, sweep=True)
    cases = [c for c in cases if args.only in c.op or args.only in c.name]
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
    print(table(results))
    return int(any(r.error is not None for r in results))


if __name__ == "__main__":
    sys.exit(main())
