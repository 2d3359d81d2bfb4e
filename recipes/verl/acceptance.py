"""GRPO through verl in several modes, one Ray job after another, and the bounds that a working adapter keeps.

    python recipes/verl/acceptance.py runs/verl [--steps 20] [--modes bf16,qat,trace] [--shapes sync:1] [--device cpu]
        [--seconds 0] [key=value ...]

Prints one row a shape and mode, writes them to OUT/table.json and OUT/table.md, and exits with 1 where a bound is
broken: guided rows at least 99 % of the eligible ones; in sync shapes TRACE's mean |log-prob difference| at most 1.5
times that of bf16, vanilla QAT's at least 3 times. Arguments with a "=" go to verl.

--device gpu runs on this machine's GPUs, with a larger policy (run_gpu.sh). --seconds ends everything after so long: a
run that is stopped then, or not begun since the longest so far would not fit, is a broken bound too.

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
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import mean

from tracefp4.report.provenance import provenance

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


def run(
    folder: Path, mode: str, steps: int, overrides: list[str], device: str = "cpu", seconds: float | None = None
) -> list[dict[str, float]]:
    """Metrics of every step of one run; its output goes to FOLDER/log.txt.

    Raises SystemExit where verl fails, after the ends of its logs, and TimeoutError where it runs past ``seconds``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    command = [str(Path(__file__).with_name(f"run_{device}.sh")), str(folder), f"{METHOD_KEY}={mode}"]
    command += [f"trainer.total_training_steps={steps}", *overrides]
    begun = time.time()
    with (folder / "log.txt").open("w") as log:
        environment = os.environ | {"PYTHON": sys.executable}
        if device == "gpu":  # one policy for all modes
            environment.setdefault("SUMS_MODEL", str(folder.parent.resolve() / "policy"))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            raise TimeoutError(f"mode {mode} was stopped after {seconds:.0f} s") from None
    if code:
        print(log_ends(folder, begun), file=sys.stderr)
        raise SystemExit(f"mode {mode} ended with code {code}; see {folder / 'log.txt'}")
    return read_metrics(folder / "metrics.jsonl")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks verl's driver to end, which takes its Ray cluster along; kills it where it does not."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


RAY_LOGS = Path("/tmp/ray/session_latest/logs")


def log_ends(folder: Path, since: float, ray_logs: Path = RAY_LOGS, lines: int = 60) -> str:
    """The last lines of a run's log, and of each log of a Ray worker that was written ``since`` (seconds of the epoch)
    and has a traceback."""
    texts = [folder / "log.txt"]
    for path in sorted(ray_logs.glob("worker-*.err")) + sorted(ray_logs.glob("worker-*.out")):
        if path.stat().st_mtime >= since and "Traceback (most" in path.read_text(errors="replace"):
            texts.append(path)
    ends = [(path, path.read_text(errors="replace").splitlines()[-lines:]) for path in texts[:6]]
    return "\n".join(line for path, end in ends for line in (f"==> {path} <==", *end))


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


@dataclass(frozen=True)
class Row:
    """One run: diff, mean |log-prob difference|; over_bf16, its ratio to bf16's; guided, least share of any step;
    segments and lag, pieces a response and most versions a row was behind; rewards of the first and the last five
    steps; step_seconds, of one step without the first; minutes of the whole run."""

    shape: str
    mode: str
    steps: int
    diff: float
    over_bf16: float | None
    guided: float | None
    segments: float
    lag: float
    reward_first: float
    reward_last: float
    step_seconds: float | None
    minutes: float

    @staticmethod
    def of(shape: str, mode: str, lines: list[dict[str, float]], floor: float | None, minutes: float) -> Row:
        diff = mean(s[DIFF] for s in lines)
        rewards = [s.get("critic/score/mean", float("nan")) for s in lines]
        seconds = [s["timing_s/step"] for s in lines[1:] if "timing_s/step" in s]
        return Row(
            shape=shape,
            mode=mode,
            steps=len(lines),
            diff=diff,
            over_bf16=diff / floor if floor else None,
            guided=min((s[SHARE] for s in lines if SHARE in s), default=None),
            segments=mean(s.get(SEGMENTS, 1.0) for s in lines),
            lag=max(s.get(LAG, 0.0) for s in lines),
            reward_first=mean(rewards[:5]),
            reward_last=mean(rewards[-5:]),
            step_seconds=mean(seconds) if seconds else None,
            minutes=minutes,
        )

    def cells(self) -> list[str]:
        ratio = "" if self.over_bf16 is None else f"{self.over_bf16:.2f}x"
        guided = "" if self.guided is None else f"{self.guided:.2%}"
        pieces, lag = f"{self.segments:.2f}", f"{self.lag:.0f}"
        reward = f"{self.reward_first:.2f} -> {self.reward_last:.2f}"
        numbers = [str(self.steps), f"{self.diff:.5f}", ratio, guided, pieces, lag, reward]
        step = "" if self.step_seconds is None else f"{self.step_seconds:.1f}"
        return [self.shape, self.mode, *numbers, step, f"{self.minutes:.1f}"]


HEADS = (
    ("shape", 17), ("mode", 11), ("steps", 5), ("mean |dlogp|", 12), ("over bf16", 9), ("guided", 8), ("segments", 8),
    ("lag", 3), ("reward", 12), ("s/step", 6), ("min", 5),
)  # fmt: skip


def aligned(cells: list[str]) -> str:
    padded = [f"{c:{w}}" if i < 2 else f"{c:>{w}}" for i, (c, (_, w)) in enumerate(zip(cells, HEADS, strict=True))]
    return "  ".join(padded)


def write_tables(out: Path, rows: list[Row]) -> None:
    """OUT/table.json with what the figures were measured on, and OUT/table.md."""
    facts = provenance()
    facts["versions"] |= {name: metadata.version(name) for name in ("verl", "ray", "TransferQueue")}
    text = json.dumps({"rows": [asdict(row) for row in rows], "provenance": facts}, indent=1)
    (out / "table.json").write_text(text + "\n", encoding="utf-8")
    lines = [[head for head, _ in HEADS], ["---"] * 2 + ["---:"] * (len(HEADS) - 2), *(row.cells() for row in rows)]
    (out / "table.md").write_text("".join(f"| {' | '.join(cells)} |\n" for cells in lines), encoding="utf-8")


class Clock:
    """What is left of the time for all runs; 0 seconds: no end."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds if seconds else None
        self._longest = 0.0

    @property
    def left(self) -> float | None:
        return None if self._end is None else self._end - time.monotonic()

    def note(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)

    def allows_another(self) -> bool:
        return self.left is None or self.left > self._longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--modes", default="bf16,qat,trace")
    parser.add_argument("--shapes", default="sync:1")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("overrides", nargs="*", help="key=value for verl")
    options = parser.parse_intermixed_args()  # overrides may follow options
    options.out.mkdir(parents=True, exist_ok=True)
    shapes = ALL if options.shapes == "all" else options.shapes.split(",")
    keys = {shape: shape_overrides(shape) for shape in shapes}
    clock = Clock(options.seconds)
    broken: list[str] = []
    rows: list[Row] = []
    print(aligned([head for head, _ in HEADS]))
    for shape in shapes:
        steps: dict[str, list[dict[str, float]]] = {}
        for mode in options.modes.split(","):
            if not clock.allows_another():
                broken.append(f"{shape}: no time left for {mode}")
                continue
            folder = options.out / (mode if len(shapes) == 1 else f"{shape.replace(':', '-')}-{mode}")
            started = time.monotonic()
            overrides = [*keys[shape], *options.overrides]
            try:
                steps[mode] = run(folder, mode, options.steps, overrides, options.device, clock.left)
            except TimeoutError as error:
                broken.append(f"{shape}: {error}")
                continue
            clock.note(time.monotonic() - started)
            floor = mean(s[DIFF] for s in steps["bf16"]) if "bf16" in steps else None
            rows.append(Row.of(shape, mode, steps[mode], floor, (time.monotonic() - started) / 60))
            write_tables(options.out, rows)
            print(aligned(rows[-1].cells()), flush=True)
        lagging = not shape.startswith("sync:")
        broken += [f"{shape}: {sentence}" for sentence in broken_bounds(steps, lagging)]
    for sentence in broken:
        print(f"broken: {sentence}", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
