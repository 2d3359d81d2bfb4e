"""Harms an asynchronous run again and again, at random moments: kills one of its two processes, the supervisor alone,
or all three with SIGKILL, or stops one for ever with SIGSTOP; resumes the run where it ended, and checks what is left.

python benchmarks/async_kill.py [--kills 20] [--seed 0] [--steps 80] [--max-lag 2] [--on-stale wait|drop]

Every step must be in the files once, no step may lag by more than --max-lag, no process may outlive its supervisor, and
no weights, records or half-written files may be left at the end. A kill counts where it hit a process that ran.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

RECIPE = """
[method]
name = "trace-all"
[sampling]
prompts_per_step = 2
samples_per_prompt = 4
max_new_tokens = 48
[rollout]
max_num_seqs = 16
max_model_len = 96
[train]
updates_per_rollout = 2
micro_batch_size = 8
[run]
asynchronous = true
steps = {steps}
max_lag = {max_lag}
on_stale = "{on_stale}"
eval_prompts = 8
eval_every = 4
state_every = 2
threads = 1
tensorboard = false
hang_seconds = 20
start_seconds = 120
"""
ORPHAN_SECONDS = 10.0
WHO = ("rollout", "trainer")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--max-lag", type=int, default=2)
    parser.add_argument("--on-stale", choices=["wait", "drop"], default="wait")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sys.exit(0 if Check(Path(name), options).passes() else 1)


class Check:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.out = folder, options, folder / "run"
        self.random = random.Random(options.seed)
        self.killed: Counter[str] = Counter()
        self.problems: list[str] = []
        recipe = folder / "r.toml"
        recipe.write_text(
            RECIPE.format(steps=options.steps, max_lag=options.max_lag, on_stale=options.on_stale), encoding="utf-8"
        )
        command = [sys.executable, "-m", "tracefp4", "train", str(recipe), "--resume", "--out", str(self.out)]
        self.command = command
        self.log = folder / "log"

    def passes(self) -> bool:
        run = self.start()
        while self.killed.total() < self.options.kills:
            self.pause(run)
            if run.poll() is not None:
                if self.is_done(run.returncode):
                    break
                run = self.start()
                continue
            run = self.kill(run)
        while not self.is_done(run.wait()):
            run = self.start()
        self.check_files()
        said = self.log.read_text(encoding="utf-8")
        ends = {"killed": "process was killed by signal 9; ", "hung": "process showed no progress for "}
        replaced = {f"{who} {how}": said.count(f"the {who} {text}") for how, text in ends.items() for who in WHO}
        print(f"{self.killed.total()} kills: {dict(self.killed)}; replaced: {replaced}; problems: {self.problems}")
        if self.killed.total() < self.options.kills:
            print(f"the run was done before {self.options.kills} kills: give more --steps")
        if self.problems:
            print(said[-4000:])
        return not self.problems

    def pause(self, run: subprocess.Popen[bytes]) -> None:
        """Until some steps were logged and a random while longer; each fifth time not until then: at the start."""
        if self.random.random() < 0.8:
            goal = max(1, self.lines()) + self.random.randint(0, 3)
            while run.poll() is None and not goal <= self.lines():
                time.sleep(0.01)
            time.sleep(self.random.uniform(0, 2.0))
        else:
            time.sleep(self.random.uniform(0, 12.0))

    def start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command, env=environment, stdout=log, stderr=log)

    def is_done(self, code: int) -> bool:
        """False where deaths in a row ended the run, as they may. Any other end is a problem, and the last."""
        if code == 0:
            return True
        if "processes in a row ended so" in self.log.read_text(encoding="utf-8")[-1000:]:
            return False
        if code != -signal.SIGKILL:
            print(self.log.read_text(encoding="utf-8")[-4000:])
            sys.exit(f"the run ended with exit code {code}")
        return False

    def kill(self, run: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Kills one of the processes or all, or stops one; the run as it goes on."""
        children = self.children(run.pid)
        what = self.random.choice(["child", "child", "stopped child", "supervisor", "all"])
        if what in ("child", "stopped child"):
            signum = signal.SIGKILL if what == "child" else signal.SIGSTOP
            if children and _send(self.random.choice(children), signum):
                self.killed[what] += 1
            return run
        doomed = [run.pid, *children] if what == "all" else [run.pid]
        hit = [_send(pid, signal.SIGKILL) for pid in doomed]
        run.wait()
        self.killed[what] += any(hit)
        print(f"{self.killed.total()} kills, {self.lines()} steps logged", flush=True)
        wait = self.random.random() < 0.5  # else resume at once, beside what has not ended yet
        if wait:
            self.check_orphans(children)
        run = self.start()
        if not wait:
            self.check_orphans(children)
        return run

    def children(self, parent: int) -> list[int]:
        """Rollout and trainer of a supervisor, which are spawned; not Python's resource tracker."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes()
                above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if above == parent and b"spawn_main" in line:
                found.append(int(entry.name))
        return found

    def check_orphans(self, pids: list[int]) -> None:
        deadline = time.monotonic() + ORPHAN_SECONDS
        while left := [pid for pid in pids if _state(pid) != "Z"]:
            if time.monotonic() > deadline:
                self.problems.append(f"processes {left} outlived their supervisor by {ORPHAN_SECONDS:.0f} s")
                return
            time.sleep(0.05)

    def lines(self) -> int:
        metrics = self.out / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def check_files(self) -> None:
        for name in ("metrics.jsonl", "timing.jsonl"):
            lines = [json.loads(line) for line in (self.out / name).read_text(encoding="utf-8").splitlines()]
            if [line["step"] for line in lines] != list(range(self.options.steps)):
                self.problems.append(f"{name} holds steps {[line['step'] for line in lines]}")
        lines = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        lag = max(line["policy/lag_max"] for line in lines)
        if not 0 <= lag <= self.options.max_lag:
            self.problems.append(f"a step lagged by {lag:.0f}")
        if self.options.on_stale == "wait" and any(line["async/dropped_groups"] for line in lines):
            self.problems.append("groups were dropped")
        print(f"guided share of rows: at least {min(line['guidance/guided_share'] for line in lines):.2f}")
        kept = {"states", "checkpoint"}
        left = [
            str(p.relative_to(self.out))
            for p in self.out.rglob("*")
            if p.name.startswith(".") or p.suffix == ".lock" or (p.is_dir() and p.parent == self.out)
        ]
        if extra := sorted(set(left) - kept):
            self.problems.append(f"left over: {extra}")


def _send(pid: int, signum: int) -> bool:
    """Whether there was a process to hit, one that is not stopped already."""
    if _state(pid) in ("Z", "T"):
        return False
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def _state(pid: int) -> str:
    """A letter of proc(5): Z also for a process that is gone, T for one that is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


if __name__ == "__main__":
    main()
