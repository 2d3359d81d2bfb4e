"""Writes running sums as verl reads data: train.parquet, test.parquet, and the tokenizer/ with what verl asks of it.

python recipes/verl/sums_data.py FOLDER [--train 320] [--test 64]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tracefp4.assets import builtin_model_path
from tracefp4.nn.loading import read_config, read_tokenizer
from tracefp4.tasks.base import Prompt
from tracefp4.tasks.running_sums import RunningSums, RunningSumsConfig


def rows(prompts: list[Prompt]) -> pa.Table:
    """One row a problem: what verl's RLHFDataset and reward manager read."""
    return pa.Table.from_pylist(
        [
            {
                "data_source": "running_sums",
                "prompt": [{"role": "user", "content": p.text}],
                "reward_model": {"style": "rule", "ground_truth": p.answer},
                "extra_info": {"index": i, "id": p.id},
            }
            for i, p in enumerate(prompts)
        ]
    )


def write_tokenizer(folder: Path) -> None:
    """The builtin model's tokenizer with a template that shows the sum alone.

    verl looks for a line feed and <|im_end|> in the tokenizer of every Qwen model; they take two of the spare ids.
    """
    model = builtin_model_path("sums-moe")
    tokenizer = read_tokenizer(model, read_config(model))
    tokenizer.add_tokens(["\n"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=320)
    parser.add_argument("--test", type=int, default=64)
    options = parser.parse_args()
    task = RunningSums(RunningSumsConfig())
    options.folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows(task.train_prompts(0, options.train)), options.folder / "train.parquet")
    write_tokenizer(options.folder / "tokenizer")
    pq.write_table(rows(task.test_prompts(options.test)), options.folder / "test.parquet")


if __name__ == "__main__":
    main()
