"""GRPO through verl in several modes, one Ray job after another, and the bounds that a working adapter keeps.

    python recipes/verl/acceptance.py runs/verl [--steps 20] [--modes bf16,qat,trace] [key=value ...]

Prints one row a mode and exits with 1 where a bound is broken: guided rows at least 99 % of the eligible ones, TRACE's
mean |log-prob difference| at most 1.5 times that of bf16, vanilla QAT's at least 3 times. Arguments with a "=" go to
verl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

DIFF, SHARE = "mismatch/logprob_abs_diff_mean", "guidance/guided_share"
METHOD_KEY = "actor_rollout_ref.model.override_config.tracefp4.method"
TRACE_AT_MOST, QAT_AT_LEAST, GUIDED_AT_LEAST = 1.5, 3.0, 0.99


def run(folder: Path, mode: str, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """Metrics of every step of one run; its output goes to FOLDER/log.txt. Raises SystemExit where verl fails."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    command = [str(Path(__file__).with_name("run_cpu.sh")), str(folder), f"{METHOD_KEY}={mode}"]
    command += [f"trainer.total_training_steps={steps}", *overrides]
    with (folder / "log.txt").open("w") as log:
        environment = os.environ | {"PYTHON": sys.executable}
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        raise SystemExit(f"mode {mode} ended with code {code}; see {folder / 'log.txt'}")
    return read_metrics(folder / "metrics.jsonl")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of verl's file logger that hold a training step."""
    lines = [json.loads(line)["data"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if DIFF in line]


def broken_bounds(steps: dict[str, list[dict[str, float]]]) -> list[str]:
    """A sentence for each bound that these runs break; bounds of modes that did not run are not checked."""
    diff = {mode: mean(s[DIFF] for s in lines) for mode, lines in steps.items()}
    out = []
    for mode, lines in steps.items():
        worst = min((s[SHARE] for s in lines if SHARE in s), default=None)
        if mode.startswith("trace") and worst is None:
            out.append(f"{mode} logged no {SHARE}")
        elif worst is not None and worst < GUIDED_AT_LEAST:
            out.append(f"{mode}: only {worst:.2%} of the eligible rows were guided in one step")
    if "bf16" in diff:
        for mode in [m for m in diff if m.startswith("trace") and diff[m] > TRACE_AT_MOST * diff["bf16"]]:
            out.append(f"{mode}: {diff[mode] / diff['bf16']:.2f} times the difference of bf16, over {TRACE_AT_MOST}")
        if "qat" in diff and diff["qat"] < QAT_AT_LEAST * diff["bf16"]:
            out.append(f"qat: {diff['qat'] / diff['bf16']:.2f} times the difference of bf16, under {QAT_AT_LEAST}")
    return out


def row(mode: str, lines: list[dict[str, float]], floor: float | None) -> str:
    """Mode, mean difference, ratio to bf16, least guided share, first and last reward."""
    diff = mean(s[DIFF] for s in lines)
    ratio = f"{diff / floor:8.2f}x" if floor else f"{'':9}"
    share = min((s[SHARE] for s in lines if SHARE in s), default=None)
    reward = " -> ".join(f"{lines[i].get('critic/score/mean', float('nan')):.3f}" for i in (0, -1))
    return f"{mode:12}{len(lines):6}{diff:14.5f}{ratio}{'' if share is None else f'{share:10.2%}':>12}   {reward}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--modes", default="bf16,qat,trace")
    parser.add_argument("overrides", nargs="*", help="key=value for verl")
    options = parser.parse_intermixed_args()  # overrides may follow options
    steps: dict[str, list[dict[str, float]]] = {}
    print(f"{'mode':12}{'steps':>6}{'mean |dlogp|':>14}{'over bf16':>9}{'guided':>12}   reward")
    for mode in options.modes.split(","):
        steps[mode] = run(options.out / mode, mode, options.steps, options.overrides)
        floor = mean(s[DIFF] for s in steps["bf16"]) if "bf16" in steps else None
        print(row(mode, steps[mode], floor), flush=True)
    broken = broken_bounds(steps)
    for sentence in broken:
        print(f"broken: {sentence}", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
