"""GRPO through verl in several modes, one Ray job after another, and the bounds that a working adapter keeps.

    python recipes/verl/acceptance.py runs/verl [--steps 20] [--modes bf16,qat,trace] [--shapes sync:1] [key=value ...]

Prints one row a shape and mode and exits with 1 where a bound is broken: guided rows at least 99 % of the eligible
ones; in sync shapes TRACE's mean |log-prob difference| at most 1.5 times that of bf16, vanilla QAT's at least 3 times.
Arguments with a "=" go to verl.

A shape is a trainer mode of verl (sync, colocate_async, separate_async, or turns: colocate_async with an agent loop of
two turns) and a number of trainer ranks. "--shapes all" is every mode on 1 and on 2 ranks, turns on 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

DIFF, SHARE = "mismatch/logprob_abs_diff_mean", "guidance/guided_share"
METHOD_KEY = "actor_rollout_ref.model.override_config.tracefp4.method"
TRACE_AT_MOST, QAT_AT_LEAST, GUIDED_AT_LEAST = 1.5, 3.0, 0.99
SEGMENTS, LAG = "guidance/segments_mean", "guidance/version_lag_max"
MODES = ("sync", "colocate_async", "separate_async", "turns")
ALL = ("sync:1", "sync:2", "colocate_async:1", "colocate_async:2", "separate_async:1", "separate_async:2", "turns:1")


def shape_overrides(shape: str) -> list[str]:
    """verl's keys for a shape. Raises SystemExit for one that is none."""
    mode, _, ranks = shape.partition(":")
    if mode not in MODES or not ranks.isdigit() or not int(ranks):
        raise SystemExit(f"{shape!r} is no shape: name one of {', '.join(MODES)}, a colon, and a number of ranks")
    rollout, stock = "actor_rollout_ref.rollout", "colocate_async" if mode == "turns" else mode
    keys = [
        f"trainer.v1.trainer_mode=tracefp4_{stock}",
        f"trainer.n_gpus_per_node={ranks}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={max(1, 16 // int(ranks))}",
    ]
    if mode != "sync":  # few at a time and enough to do, so that weight updates find responses half done
        keys += [f"{rollout}.max_num_seqs=8", f"trainer.v1.{stock}.num_warmup_batches=2"]
    if mode == "separate_async":  # one rank more, for a rollout of its own; a mini-batch of 16 at a time
        keys += [f"{rollout}.log_prob_micro_batch_size_per_gpu={max(1, 16 // int(ranks))}"]
        keys += [f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=1", f"{rollout}.checkpoint_engine.backend=tracefp4"]
        keys += [f"ray_kwargs.ray_init.num_gpus={int(ranks) + 1}"]
    if mode == "turns":
        agents = Path(__file__).with_name("agents.yaml")
        keys += [f"{rollout}.agent.agent_loop_config_path={agents}", f"{rollout}.agent.default_agent_loop=two_turns"]
    return keys


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


def broken_bounds(steps: dict[str, list[dict[str, float]]], lagging: bool = False) -> list[str]:
    """A sentence for each bound that these runs break; bounds of modes that did not run are not checked.

    lagging: of an asynchronous shape, where differences hold the policy's own movement too: they are not compared.
    """
    diff = {mode: mean(s[DIFF] for s in lines) for mode, lines in steps.items()}
    out = []
    for mode, lines in steps.items():
        worst = min((s[SHARE] for s in lines if SHARE in s), default=None)
        if mode.startswith("trace") and worst is None:
            out.append(f"{mode} logged no {SHARE}")
        elif worst is not None and worst < GUIDED_AT_LEAST:
            out.append(f"{mode}: only {worst:.2%} of the eligible rows were guided in one step")
    if "bf16" in diff and not lagging:
        for mode in [m for m in diff if m.startswith("trace") and diff[m] > TRACE_AT_MOST * diff["bf16"]]:
            out.append(f"{mode}: {diff[mode] / diff['bf16']:.2f} times the difference of bf16, over {TRACE_AT_MOST}")
        if "qat" in diff and diff["qat"] < QAT_AT_LEAST * diff["bf16"]:
            out.append(f"qat: {diff['qat'] / diff['bf16']:.2f} times the difference of bf16, under {QAT_AT_LEAST}")
    return out


def row(shape: str, mode: str, lines: list[dict[str, float]], floor: float | None, minutes: float) -> str:
    """Shape, mode, steps, mean difference, ratio to bf16, least guided share, segments and lag, reward, minutes."""
    diff = mean(s[DIFF] for s in lines)
    ratio = f"{diff / floor:8.2f}x" if floor else f"{'':9}"
    share = min((s[SHARE] for s in lines if SHARE in s), default=None)
    guided = f"{'':10}" if share is None else f"{share:10.2%}"
    segments, lag = mean(s.get(SEGMENTS, 1.0) for s in lines), max(s.get(LAG, 0.0) for s in lines)
    reward = " -> ".join(f"{lines[i].get('critic/score/mean', float('nan')):.3f}" for i in (0, -1))
    return (
        f"{shape:18}{mode:12}{len(lines):6}{diff:14.5f}{ratio}{guided}{segments:10.2f}{lag:5.0f}   {reward:16}"
        f"{minutes:6.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--modes", default="bf16,qat,trace")
    parser.add_argument("--shapes", default="sync:1")
    parser.add_argument("overrides", nargs="*", help="key=value for verl")
    options = parser.parse_intermixed_args()  # overrides may follow options
    shapes = ALL if options.shapes == "all" else options.shapes.split(",")
    keys = {shape: shape_overrides(shape) for shape in shapes}
    broken = []
    heads = f"{'steps':>6}{'mean |dlogp|':>14}{'over bf16':>9}{'guided':>10}{'segments':>10}{'lag':>5}"
    print(f"{'shape':18}{'mode':12}{heads}   {'reward':16}{'min':>6}")
    for shape in shapes:
        steps: dict[str, list[dict[str, float]]] = {}
        for mode in options.modes.split(","):
            folder = options.out / (mode if len(shapes) == 1 else f"{shape.replace(':', '-')}-{mode}")
            started = time.monotonic()
            steps[mode] = run(folder, mode, options.steps, [*keys[shape], *options.overrides])
            floor = mean(s[DIFF] for s in steps["bf16"]) if "bf16" in steps else None
            print(row(shape, mode, steps[mode], floor, (time.monotonic() - started) / 60), flush=True)
        lagging = not shape.startswith("sync:")
        broken += [f"{shape}: {sentence}" for sentence in broken_bounds(steps, lagging)]
    for sentence in broken:
        print(f"broken: {sentence}", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
