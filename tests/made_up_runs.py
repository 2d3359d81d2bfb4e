"""A short script in place of a training run of a reproduction."""

import sys

from tracefp4.reproduce.plan import Spec

RUN = """
import json, os, pathlib, signal, sys, time
run, evaluation, mode, seed, steps, forms, pause, config = sys.argv[1:9]
run, evaluation, steps = pathlib.Path(run), pathlib.Path(evaluation), int(steps)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
(run / "states").mkdir(parents=True, exist_ok=True)
done = len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0
print(mode, seed, "from", done, flush=True)
(run / "config.json").write_text(config)
(run / "run.json").write_text(json.dumps({"method": mode, "seed": int(seed)}))
far = {"bf16": 1.0, "trace": 1.5}.get(mode, 5.0)
for step in range(done, steps):
    line = {"step": step, "reward/mean": min(1.0, 0.3 + step / 10), "mismatch/logprob_abs_diff_max": 3 * far,
            "mismatch/logprob_abs_diff_mean": 1e-3 * far * (1 + int(seed) / 10), "train/entropy": 0.5,
            "response/length_mean": 20.0}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + chr(10))
    with open(run / "timing.jsonl", "a") as file:
        timing = {"step": step, "rollout_seconds": 1.5, "train_seconds": 0.5, "weight_sync_seconds": 0}
        file.write(json.dumps(timing) + chr(10))
    time.sleep(float(pause))
    if stopped:
        state = run / "states" / f"step-{step + 1:08d}"
        state.mkdir()
        (state / "state.json").write_text("{}")
        (state / "state.safetensors").write_bytes(os.urandom(200_000))
        sys.exit(143)
(run / "final.json").write_text(json.dumps({"steps": steps}))
(run / "checkpoint").mkdir(exist_ok=True)
(run / "checkpoint" / "weights").write_bytes(bytes(1000))
evaluation.mkdir(parents=True, exist_ok=True)
for form in forms.split(","):
    passed = 0.9 if form == "bf16" else 0.9 - 0.1 * (mode != "bf16" and far > 2)
    with open(evaluation / f"responses-{form}.jsonl", "w") as file:
        for problem in range(10):
            reward = float(problem < 10 * passed - 0.5)
            file.write(json.dumps({"id": problem, "samples": [{"reward": reward}] * 2}) + chr(10))
(evaluation / "timing.jsonl").write_text(json.dumps({"seconds": 4.0}) + chr(10))
(evaluation / "eval.json").write_text(json.dumps({"complete": True}))
"""


MADE = '{"pass_rate": {"value": 0.3125, "n": 64}, "steps": 20, "seconds": 2.0}'
"""A warmstart.json."""


def script(spec: Spec, source: str, pause: float) -> list[str]:
    """A command that acts as a run of ``spec``."""
    folders = [str(spec.run_dir), str(spec.eval_dir)]
    facts = [spec.arm.mode, str(spec.seed), str(spec.steps), ",".join(spec.forms), str(pause), spec.config]
    return [sys.executable, "-S", "-c", source, *folders, *facts]
