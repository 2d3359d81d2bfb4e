"""A task and a graded reward of one's own, on problems in a JSON-lines file.

    python examples/own_reward.py [FILE.jsonl]

Each row asks for a number of letters; the reward is the share of letters, less for every character too many or too few.
Prints the mean reward before and after 12 steps of GRPO, on problems that were held out.
"""

import json
import sys
import tempfile
from pathlib import Path

from own_model import build

from tracefp4.loop import RunConfig, TrainingRun
from tracefp4.tasks import Prompt
from tracefp4.tasks.pool import EpochPool

ROWS = [{"question": f"Write {n} letters, please ({i}): ", "letters": n} for n in (4, 5, 6) for i in range(12)]


class Letters:
    """Rows are handed out in shuffled passes; every sixth is held out."""

    description = "Write so many letters."  # kept in run.json

    def __init__(self, path: Path, seed: int = 0) -> None:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        prompts = [Prompt(f"row-{i}", r["question"], str(r["letters"])) for i, r in enumerate(rows)]
        train = [p for i, p in enumerate(prompts) if i % 6]
        self.pool = EpochPool(train, prompts[::6], seed, what=str(path))

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        return self.pool.take(step, n)

    def test_prompts(self, n: int) -> list[Prompt]:
        return self.pool.held_out(n, "add rows")

    def score(self, prompt: Prompt, response_text: str) -> float:
        """In [0, 1], and 1 for what was asked for; never raises on what the policy wrote."""
        wanted, letters = int(prompt.answer), sum(c.isalpha() for c in response_text)
        return letters / max(wanted, len(response_text))


def main(path: Path | None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        if path is None:
            path = Path(scratch) / "letters.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        settings = {
            "model": {"path": build(Path(scratch) / "model")},
            "method": {"name": "trace-all"},
            "sampling": {"prompts_per_step": 8, "samples_per_prompt": 6, "max_new_tokens": 20},
            "rollout": {"max_model_len": 80, "max_num_seqs": 64},
            "train": {"lr": 5e-3, "updates_per_rollout": 3},
            "run": {"eval_prompts": 6, "threads": 1, "probe_every": 0},
        }
        run = TrainingRun(RunConfig.model_validate(settings), task=Letters(path))
        print(f"held-out reward before: {run.evaluate('start'):.2f}")
        for step in range(12):
            metrics, _ = run.step(step)
            if step % 4 == 3:
                print(f"step {step}: reward {metrics['reward/mean']:.2f}")
        print(f"held-out reward after: {run.evaluate('end'):.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
