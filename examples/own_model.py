"""A Qwen3-MoE of one's own: built from scratch, saved as a Hugging Face directory, trained a few steps in FP4.

    python examples/own_model.py [DIR]

Prints of each step the mean reward (share of digits in a response; one that was cut off scores 0) and the share of FP4
slots that differ from the rollout's by nearest rounding and after guidance; plain transformers loads what was saved.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracefp4.loop import RunConfig, TrainingRun
from tracefp4.tasks import Prompt, build_text_tokenizer


def build(directory: Path) -> str:
    """A random policy of 0.2 million weights that reads and writes printable ASCII, one token a character."""
    torch.manual_seed(0)
    tokenizer = build_text_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,  # widths are multiples of 16, the block of NVFP4 (of 32 for MXFP4)
        moe_intermediate_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


class Digits:
    """The smallest task: whatever is asked, digits are rewarded."""

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        return [Prompt(f"train-{step}-{i}", f"Number {i}: ", "") for i in range(n)]

    def test_prompts(self, n: int) -> list[Prompt]:
        return [Prompt(f"test-{i}", f"Test {i}: ", "") for i in range(n)]

    def score(self, prompt: Prompt, response_text: str) -> float:
        return sum(c.isdigit() for c in response_text) / max(1, len(response_text))


def main(directory: Path, steps: int = 8) -> None:
    settings = {
        "model": {"path": build(directory / "start")},
        "method": {"name": "trace-all"},
        "sampling": {"prompts_per_step": 8, "samples_per_prompt": 6, "max_new_tokens": 20},
        "rollout": {"max_model_len": 64, "max_num_seqs": 64},
        "train": {"lr": 5e-3, "updates_per_rollout": 3},
        "run": {"threads": 1, "probe_trajectories": 4},
    }
    run = TrainingRun(RunConfig.model_validate(settings), task=Digits())
    for step in range(steps):
        metrics, _ = run.step(step)
        print(f"step {step}: reward {metrics['reward/mean']:.3f}", end="; ")
        print(f"slots off {metrics['code_mismatch/before']:.2%} -> {metrics['code_mismatch/after']:.2%}")
    run.save(directory / "trained")
    loaded = AutoModelForCausalLM.from_pretrained(directory / "trained")
    print(f"saved and loaded again: {sum(p.numel() for p in loaded.parameters()):,} weights")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
