"""One GPU run of all that concerns training: checks, the training step, and `compare` against two CPU cores.

    python benchmarks/h200_train.py OUT_DIR [--seconds 480] [--cpu-prompts 8] [--commit SHA] [--dry]

Writes OUT_DIR/summary.json after every part; a part that fails is noted there and the rest goes on. The CPU's run of
recipes/large.toml starts first and has two cores to itself, with fewer prompts a step, as a whole step takes minutes
there; the GPU runs that size too, and the whole one. Each GPU run is made twice: the first, untimed, compiles all
kernels into Triton's cache, since later steps, too, meet batch sizes and shapes of their own; of the second, which does
the same work, the steps from the third on count. All steps are in summary.json and are printed. What a run still
captures into graphs from the third step on is its own, and counts. --dry runs every part on the CPU with small sizes:
it tries the script out. Exit status 1 where a part failed or a target was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tracefp4.report.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
SPEEDUP = 20.0
STEPS, FIRST = 8, 2
"""Steps of a run on the GPU, and the first whose time counts."""
METRICS = (
    "reward/mean",
    "response/length_mean",
    "mismatch/logprob_abs_diff_mean",
    "mismatch/kl_k3",
    "train/entropy",
    "train/grad_norm",
    "guidance/guided_share",
)
DRY_STEP = "--layers 2 --hidden 64 --experts 8 --top 2 --width 32 --heads 4 --kv-heads 2 --head-dim 32 --vocab 64"
DRY_RUN = [
    "model.path=builtin:sums-moe",
    f"run.steps={FIRST + 1}",
    "sampling.prompts_per_step=1",
    "sampling.samples_per_prompt=4",
]
COMMON = ["run.eval_prompts=0", "run.tensorboard=false", "run.state_every=0", "run.probe_every=0"]


class Driver:
    """Parts in order, and what they found."""

    def __init__(self, out: Path, seconds: float, dry: bool) -> None:
        self.out, self.end = out, time.monotonic() + seconds
        self.dry, self.device = dry, "cpu" if dry else "cuda"
        self.commit: str | None = None
        self.summary: dict[str, Any] = {"provenance": provenance(), "failed": {}, "seconds": {}}
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return max(1.0, self.end - time.monotonic())

    def part(self, name: str, run: Callable[[], Any]) -> None:
        begun = time.monotonic()
        print(f"== {name}, {self.left:.0f} s left", flush=True)
        try:
            self.summary[name] = run()
        except Exception as error:  # the parts after it are worth having all the same
            self.summary["failed"][name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        finally:
            self.summary["seconds"][name] = round(time.monotonic() - begun, 1)
            (self.out / "summary.json").write_text(json.dumps(self.summary, indent=1) + "\n", encoding="utf-8")

    def command(self, run: Path, *settings: str) -> list[str]:
        recipe = [str(ROOT / "recipes" / "large.toml"), f"model.path={self.out / 'policy'}", *COMMON, *settings]
        recipe += DRY_RUN if self.dry else []
        return [sys.executable, "-m", "tracefp4", "train", *recipe, "--out", str(run), "--overwrite"]


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path, **more}


def start_on_cpu(driver: Driver, prompts: int) -> subprocess.Popen[bytes]:
    """One step on the two first cores, in the background; this process and its other children keep off them."""
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "larger_policy.py"), str(driver.out / "policy")],
        check=True,
        env=_environment(),
    )
    cores = sorted(os.sched_getaffinity(0))
    settings = ["method.name=trace", "run.device=cpu", "run.threads=2", "run.steps=1"]
    command = driver.command(driver.out / "cpu", *settings, f"sampling.prompts_per_step={prompts}")
    log = (driver.out / "cpu.log").open("wb")
    process = subprocess.Popen(
        command, stdout=log, stderr=log, env=_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="2")
    )
    if len(cores) > 4:
        with suppress(OSError):  # a sandbox may refuse it; run.threads holds all the same
            os.sched_setaffinity(process.pid, cores[:2])
            os.sched_setaffinity(0, cores[2:])
    return process


def on_gpu(driver: Driver, name: str, *settings: str) -> dict[str, Any]:
    """A run that fills Triton's cache, then the same once more, timed from its step ``FIRST`` on."""
    for run in (driver.out / f"{name}-cold", driver.out / name):
        command = driver.command(run, f"run.device={driver.device}", f"run.steps={STEPS}", *settings)
        subprocess.run(command, check=True, env=_environment(), timeout=driver.left)
    found = read_run(run, first=FIRST)
    print(f"{name}: seconds of the steps " + " ".join(f"{s:.2f}" for s in found["all_steps"]), flush=True)
    return found


def read_run(run: Path, first: int) -> dict[str, Any]:
    """Median seconds of a step by part, from step ``first`` on, and the first step's metrics."""
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    parts = ("rollout_seconds", "train_seconds", "weight_sync_seconds")
    found = {part: statistics.median(t[part] for t in timing[first:]) for part in parts}
    steps = [sum(t[part] for part in parts) for t in timing]
    return {
        "step_seconds": statistics.median(steps[first:]),
        **found,
        "first": first,
        "all_steps": steps,
        "metrics": {k: metrics[k] for k in METRICS if k in metrics},
    }


def finish_cpu(driver: Driver, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    try:
        code = process.wait(timeout=driver.left)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    if code:
        raise RuntimeError(f"exit code {code}: {(driver.out / 'cpu.log').read_text()[-500:]}")
    return read_run(driver.out / "cpu", first=0)


def compared(driver: Driver) -> dict[str, Any]:
    """Seconds of a step, CPU over GPU at the same number of prompts, and the first step's metrics side by side."""
    cpu, gpu = driver.summary["cpu, few prompts"], driver.summary["gpu, few prompts"]
    ratio = cpu["step_seconds"] / gpu["step_seconds"]
    metrics = {name: [cpu["metrics"][name], gpu["metrics"].get(name)] for name in cpu["metrics"]}
    return {"speedup": ratio, "limit": SPEEDUP, "met": ratio >= SPEEDUP, "cpu and gpu, first step": metrics}


def bench_train(driver: Driver) -> dict[str, Any]:
    from tracefp4.bench import train

    folder = driver.out / "train"
    small = [*DRY_STEP.split(), "--tokens", "128", "--length", "32", "--repeats", "2"] if driver.dry else []
    small += ["--commit", driver.commit] if driver.commit else []
    seconds = min(60.0, driver.left / 3)
    code = train.main(["--device", driver.device, "--out", str(folder), "--seconds", str(seconds), *small])
    document: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return {"exit code": code, "checks": document["checks"], "targets": document["targets"]}


def tests(driver: Driver) -> str:
    """The tests of the trainer's ops, on the GPU's own kernels."""
    command = [sys.executable, "-m", "pytest", "tests/nn/test_backends.py", "tests/test_device.py", "-q"]
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), timeout=driver.left, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:])
    return done.stdout.strip().splitlines()[-1]


def checks(driver: Driver) -> list[str]:
    from tracefp4.bench.train_checks import check_all

    return check_all(torch.device(driver.device))


def measure_step(driver: Driver) -> None:
    driver.part("checks", lambda: checks(driver))
    driver.part("training step", lambda: bench_train(driver))
    driver.part("tests", lambda: tests(driver))


def compare(driver: Driver, prompts: int, step_too: bool) -> None:
    """The GPU's parts in a row while the CPU works; what is left at the end is the wait for it."""
    few = f"sampling.prompts_per_step={prompts}"
    process: list[subprocess.Popen[bytes]] = []
    driver.part("start", lambda: process.append(start_on_cpu(driver, prompts)))
    if step_too:
        measure_step(driver)
    driver.part("gpu, few prompts", lambda: on_gpu(driver, "gpu-few", "method.name=trace", few))
    for method in ("trace", "bf16"):
        settings = f"method.name={method}"
        driver.part(f"gpu, whole step, {method}", lambda: on_gpu(driver, f"gpu-{method}", settings))  # noqa: B023
    if process:
        driver.part("cpu, few prompts", lambda: finish_cpu(driver, process[0]))
    driver.part("compared", lambda: compared(driver))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--cpu-prompts", type=int, default=8)
    parser.add_argument("--commit", help="commit of this copy, where there is no git checkout")
    parser.add_argument("--only", choices=["step", "compare"], help="the training step, or the comparison with the CPU")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    driver = Driver(args.out.absolute(), args.seconds, args.dry)
    driver.commit = args.commit or driver.summary["provenance"]["commit"]
    driver.summary["provenance"]["commit"] = driver.commit
    if args.only != "step":
        compare(driver, args.cpu_prompts, args.only is None)
    else:
        measure_step(driver)
    step = driver.summary.get("training step") or {"targets": [{"met": False}]}
    met = [t["met"] for t in step["targets"]] if args.only != "compare" else []
    if args.only != "step":
        met.append((driver.summary.get("compared") or {"met": False})["met"])
    print(json.dumps({k: v for k, v in driver.summary.items() if k != "provenance"}, indent=1))
    return int(bool(driver.summary["failed"]) or not all(met))


if __name__ == "__main__":
    sys.exit(main())
