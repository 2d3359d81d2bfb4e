"""What a benchmark case is, how it is checked and timed, and how results are written.

No time is printed for a case whose check failed. A case that raises is reported with its error and the rest goes on.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    op: kernel; name: shape and variant; bytes_moved, operations: the fewest that the work needs; make: inputs on a
    device; run: the timed call; check: raises AssertionError, or returns what was compared (one phrase); None where the
    case is somebody else's kernel, timed for comparison. group: rows compared with each other; baseline: this row is
    what the others of its group are divided by; graph: the call asks the host nothing and may be captured.
    """

    op: str
    name: str
    bytes_moved: int
    operations: int
    make: Callable[[torch.device], Inputs]
    run: Callable[[Inputs], Any]
    check: Callable[[Inputs], str] | None
    group: str = ""
    baseline: bool = False
    graph: bool = True


@dataclass
class Result:
    op: str
    name: str
    group: str
    baseline: bool
    bytes_moved: int
    operations: int
    checked: str | None = None
    error: str | None = None
    median_us: float | None = None
    quartiles_us: tuple[float, float] | None = None
    graph: bool | None = None
    seconds: float = 0.0
    derived: dict[str, float] = field(default_factory=dict)


class Timer:
    """Median device time of a call with a cold L2, by CUDA events around a replayed graph."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.repeats = repeats
        # Several times the L2 of any current GPU; writing it also covers the launch of what is timed.
        self.flush = torch.empty(512 << 20, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], Any], graph: bool = True) -> tuple[float, tuple[float, float], bool]:
        """(median, (first, third quartile)) in microseconds, and whether a graph was captured."""
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        captured, call = False, run
        if graph:
            recorded = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(recorded):
                    run()
                captured, call = True, recorded.replay
            except RuntimeError:
                torch.cuda.synchronize()
                # The failed capture keeps the default generator; its next use outside a capture would raise.
                fresh = torch.Generator(self.flush.device)
                index = self.flush.device.index or 0
                torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())
        call()
        times = []
        for _ in range(self.repeats):
            self.flush.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            times.append((start, stop))
        torch.cuda.synchronize()
        us = sorted(a.elapsed_time(b) * 1e3 for a, b in times)
        quartiles = statistics.quantiles(us, n=4)
        return statistics.median(us), (quartiles[0], quartiles[2]), captured


def run_case(case: Case, device: torch.device, timer: Timer | None) -> Result:
    """Checks, then times (with a timer); errors end up in the result."""
    result = Result(case.op, case.name, case.group, case.baseline, case.bytes_moved, case.operations)
    start = time.perf_counter()
    try:
        inputs = case.make(device)
        if case.check is not None:
            result.checked = case.check(inputs)
        if timer is not None:
            result.median_us, result.quartiles_us, result.graph = timer(lambda: case.run(inputs), graph=case.graph)
    except Exception as error:  # the report must list every case
        result.error = f"{type(error).__name__}: {error}".strip()
        traceback.print_exc(limit=-6)
    result.seconds = time.perf_counter() - start
    return result


def derive(results: list[Result], limits: dict[str, float]) -> None:
    """Adds bandwidth, rate, their share of the measured limits, and the ratio to the group's fastest baseline."""
    baselines: dict[str, float] = {}
    for r in results:
        if r.median_us is not None and r.baseline:
            baselines[r.group] = min(baselines.get(r.group, r.median_us), r.median_us)
    for r in results:
        if r.median_us is None:
            continue
        bandwidth, rate = r.bytes_moved / r.median_us * 1e6, r.operations / r.median_us * 1e6
        r.derived = {"bytes_per_s": bandwidth, "flop_per_s": rate}
        if limits:
            r.derived["share_of_copy"] = bandwidth / limits["copy_bytes_per_s"]
            r.derived["share_of_bf16"] = rate / limits["bf16_flop_per_s"]
        if r.group in baselines:
            r.derived["speedup"] = baselines[r.group] / r.median_us


def table(results: list[Result]) -> str:
    """Markdown: one row a case."""
    lines = [
        "| op | case | check | median us | quartiles | TB/s | of copy | TFLOP/s | of bf16 | speedup |",
        "|---|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        d = r.derived
        if r.error is not None:
            lines.append(f"| {r.op} | {r.name} | FAILED: {r.error.splitlines()[0][:90]} | | | | | | | |")
        elif r.median_us is None or r.quartiles_us is None:
            lines.append(f"| {r.op} | {r.name} | {r.checked or '-'} | | | | | | | |")
        else:
            timed = f"{r.median_us:.1f} | {r.quartiles_us[0]:.1f}-{r.quartiles_us[1]:.1f}{'' if r.graph else ' eager'}"
            speedup = f"{d['speedup']:.2f}" if "speedup" in d else ""
            share = [f"{100 * d[k]:.0f} %" if k in d else "" for k in ("share_of_copy", "share_of_bf16")]
            lines.append(
                f"| {r.op} | {r.name} | {r.checked or 'not ours'} | {timed} "
                f"| {d['bytes_per_s'] / 1e12:.2f} | {share[0]} "
                f"| {d['flop_per_s'] / 1e12:.1f} | {share[1]} | {speedup} |"
            )
    return "\n".join(lines)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Commit, versions and hardware of this run."""
    if commit is None:
        root = Path(__file__).resolve().parents[3]
        done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
        commit = done.stdout.strip() or None
    cuda = device.type == "cuda"
    return {
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if cuda else None,
    }


def write(out: Path, environment: dict[str, Any], limits: dict[str, float], results: list[Result]) -> None:
    """results.json and results.md in a folder, which is made if missing."""
    out.mkdir(parents=True, exist_ok=True)
    document = {"environment": environment, "limits": limits, "results": [asdict(r) for r in results]}
    (out / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / "results.md").write_text(markdown(environment, limits, results) + "\n", encoding="utf-8")


def facts_list(environment: dict[str, Any], limits: dict[str, float]) -> str:
    """Where the numbers come from, and the limits measured beside them, as a Markdown list."""
    return "\n".join(f"- {k}: {v}" for k, v in {**environment, **{k: f"{v:.4g}" for k, v in limits.items()}}.items())


def markdown(environment: dict[str, Any], limits: dict[str, float], results: list[Result]) -> str:
    """Facts and table."""
    return f"{facts_list(environment, limits)}\n\n{table(results)}"
