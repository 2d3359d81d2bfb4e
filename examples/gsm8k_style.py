"""Training on a file in GSM8K's format as it is, by the recipe recipes/gsm8k_style.toml, from Python.

    python examples/gsm8k_style.py [MODEL_DIR]

MODEL_DIR: a Qwen3-MoE or dense Qwen3 checkpoint; left out, a random model of 0.2 million weights takes one short step,
which shows that everything fits together and solves nothing. Prints what was read, one problem as the policy sees it,
how two responses to it are scored, and the run folder's figures.
"""

import sys
import tempfile
from pathlib import Path

from own_model import build

from tracefp4.config import load_config
from tracefp4.loop import RunConfig, preflight, run_training
from tracefp4.report import read_jsonl

ROOT = Path(__file__).parents[1]
SHORT = ["run.steps=1", "sampling.prompts_per_step=2", "sampling.samples_per_prompt=2", "sampling.max_new_tokens=16"]
SHORT += [
    "run.eval_prompts=2",
    "run.eval_every=0",
    "run.tensorboard=false",
    "run.threads=1",
    "rollout.max_model_len=384",
]


def main(model: str | None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [f"task.path={ROOT / 'examples/data/word_sums.jsonl'}"]
        overrides += [f"model.path={model or build(Path(scratch) / 'model')}", *([] if model else SHORT)]
        config = load_config(ROOT / "recipes/gsm8k_style.toml", overrides, RunConfig)

        parts = preflight(config)  # everything but the weights: checks the data, the model's sizes, the settings
        print(parts.task.description.rpartition("/")[2])
        prompt = parts.task.test_prompts(1)[0]
        print(f"prompt: {prompt.text!r}")
        for response in (f"So it is {prompt.answer}.0\n#### {prompt.answer}.0", "I do not know.\n#### -1"):
            print(f"reward {parts.task.score(prompt, response)} for {response!r}")
        parts.close()

        folder = Path(scratch) / "run"
        folder.mkdir()
        final = run_training(config, folder)
        step = read_jsonl(folder / "metrics.jsonl")[-1]
        print(f"prompts of {step['prompt/length_mean']:.0f} tokens, {step['prompt/dropped']:.0f} dropped", end="; ")
        print(
            f"pass rate {final['eval/pass_rate_start']} -> {final['eval/pass_rate_end']} on {final['eval/n']} held out"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
