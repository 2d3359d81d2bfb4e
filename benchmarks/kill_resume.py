"""Kills a training run with SIGKILL at random moments, resumes it each time, and compares its metrics file byte for
byte with that of a run that was never killed.

python benchmarks/kill_resume.py [--kills 20] [--seed 0]
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
steps = 60
eval_prompts = 8
state_every = 1
threads = 1
"""


def run(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as stream:
        return subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = folder / "r.toml"
        recipe.write_text(RECIPE)
        command = [sys.executable, "-m", "tracefp4", "train", str(recipe), "--resume", "--out"]
        started = time.monotonic()
        if run([*command, str(folder / "whole")], folder / "whole.log").wait():
            sys.exit((folder / "whole.log").read_text()[-2000:])
        whole = time.monotonic() - started
        print(f"unbroken run: {whole:.0f} s", flush=True)
        kills, metrics = 0, folder / "killed" / "metrics.jsonl"
        while kills < options.kills:
            child = run([*command, str(folder / "killed")], folder / "killed.log")
            # Mostly while it trains, sometimes while it starts.
            time.sleep(moments.uniform(0.1, 8 + 2 * whole / options.kills))
            if child.poll() is not None:
                print(f"the run ended after {kills} kills")
                break
            child.send_signal(signal.SIGKILL)
            child.wait()
            kills += 1
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            print(f"kill {kills}: {lines} steps logged", flush=True)
        if run([*command, str(folder / "killed")], folder / "killed.log").wait():
            sys.exit((folder / "killed.log").read_text()[-2000:])
        same = metrics.read_bytes() == (folder / "whole" / "metrics.jsonl").read_bytes()
        print(f"{kills} kills; metrics files byte-equal: {same}")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
