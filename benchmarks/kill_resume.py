"""Kills a run with SIGKILL again and again, resumes it each time, and compares its files byte for byte with those of a
run that was never killed.

python benchmarks/kill_resume.py [--kills 20] [--seed 0] [--when random|saves] [--command train|compare]

--when saves: each kill falls into the writing of a state or checkpoint, as soon as its half-written folder shows.
--command compare: the comparison's process is killed; its two runs must end by themselves. They save a state then, so
the moments of the kills matter less.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = """
[method]
name = "trace-all"
[sampling]
prompts_per_step = 2
samples_per_prompt = 8
max_new_tokens = 48
[train]
updates_per_rollout = 2
micro_batch_size = 8
[run]
steps = {steps}
eval_prompts = 8
eval_every = 4
keep_best = 1
save_every = 1
state_every = 1
threads = 1
"""
FILES = (
    "metrics.jsonl",
    "checkpoint/model.safetensors",
    "checkpoint-best/best.json",
    "checkpoint-best/model.safetensors",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--when", choices=["random", "saves"], default="random")
    parser.add_argument("--command", choices=["train", "compare"], default="train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sys.exit(0 if Check(Path(name), options).passes() else 1)


class Check:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.moments = random.Random(options.seed)
        recipe = folder / "r.toml"
        recipe.write_text(RECIPE.format(steps=options.steps))
        self.command = [sys.executable, "-m", "tracefp4", options.command, str(recipe), "--resume"]
        if options.command == "compare":
            self.command += ["--modes", "bf16,trace-all", "--seeds", "0"]

    def passes(self) -> bool:
        started = time.monotonic()
        self.finish("whole")
        whole = time.monotonic() - started
        print(f"unbroken run: {whole:.0f} s", flush=True)
        kills = 0
        while kills < self.options.kills and self.start_and_kill(whole):
            kills += 1
            print(f"kill {kills}: {self.lines()} steps logged", flush=True)
        self.finish("killed")
        runs = [p.parent for p in (self.folder / "whole").rglob("metrics.jsonl")]
        names = [run.relative_to(self.folder / "whole") / file for run in runs for file in FILES]
        different = [str(n) for n in names if self.read("killed", n) != self.read("whole", n)]
        left_over = [
            str(p) for p in (self.folder / "killed").rglob("*") if p.name.startswith(".") or p.suffix == ".lock"
        ]
        print(f"{kills} kills, {len(names)} files compared; different: {different}; left over: {left_over}")
        return not different and not left_over

    def read(self, out: str, name: Path) -> bytes:
        return (self.folder / out / name).read_bytes()

    def start(self, out: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{out}.log").open("ab") as log:
            command = [*self.command, "--out", str(self.folder / out)]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def finish(self, out: str) -> None:
        if self.start(out).wait():
            sys.exit((self.folder / f"{out}.log").read_text()[-2000:])

    def start_and_kill(self, whole: float) -> bool:
        """False where the run ended before it could be killed."""
        child = self.start("killed")
        if self.options.when == "random":
            # Mostly while it trains, sometimes while it starts.
            time.sleep(self.moments.uniform(0.1, 8 + 2 * whole / self.options.kills))
        else:
            goal = self.lines() + self.moments.randint(0, 3)  # not always the first save of a process
            while child.poll() is None and not (self.lines() >= goal and self.is_writing()):
                time.sleep(0.0005)
            time.sleep(self.moments.uniform(0, 0.02))
        if child.poll() is not None:
            print("the run ended before it could be killed")
            return False
        child.send_signal(signal.SIGKILL)
        child.wait()
        deadline = time.monotonic() + 60
        while self.options.command == "compare" and self.orphans():
            if time.monotonic() > deadline:
                sys.exit(f"these runs outlived their comparison: {self.orphans()}")
            time.sleep(0.1)
        return True

    def lines(self) -> int:
        return sum(p.read_bytes().count(b"\n") for p in (self.folder / "killed").rglob("metrics.jsonl"))

    def is_writing(self) -> bool:
        out = self.folder / "killed"
        return any(out.glob("**/.step-*")) or any(out.glob("**/.checkpoint*"))

    def orphans(self) -> list[str]:
        """Processes whose command line names the folder of the killed comparison."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(self.folder / "killed").encode() in line:
                found.append(entry.name)
        return found


if __name__ == "__main__":
    main()
