"""Text tasks through the whole loop, on a tiny random policy that reads text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiny import tiny_config, tiny_model
from tracefp4.errors import TracefpError
from tracefp4.loop import RunConfig, TrainingRun, run_training
from tracefp4.tasks import Prompt, build_text_tokenizer
from tracefp4.tasks.tokenizer import CHAT_TEMPLATE

WORD_SUMS = Path(__file__).parents[1] / "data" / "word_sums.jsonl"
BASE: dict[str, dict[str, Any]] = {
    "method": {"name": "trace-all"},
    "task": {"name": "dataset", "path": str(WORD_SUMS), "test_size": 8, "check": {"kind": "exact"}},
    "sampling": {"prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 6},
    "rollout": {"max_model_len": 300, "max_num_seqs": 8},
    "train": {"updates_per_rollout": 1, "micro_batch_size": 8},
    "run": {"steps": 2, "tensorboard": False, "eval_prompts": 4, "state_every": 0},
}


def checkpoint(folder: Path, chat_template: str | None) -> str:
    tiny_model(tiny_config(vocab_size=112)).save_pretrained(folder)
    build_text_tokenizer(chat_template).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("plain"), None)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("chat"), CHAT_TEMPLATE)


def config(model: str, **sections: dict[str, Any]) -> RunConfig:
    merged = {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {*BASE, *sections}}
    return RunConfig.model_validate({**merged, "model": {"path": model}})


class Longest:
    """A task of one's own: counts how many characters were written, up to 4."""

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        return [Prompt(f"train-{step}-{i}", f"Write {'much ' * i}", "") for i in range(n)]

    def test_prompts(self, n: int) -> list[Prompt]:
        return self.train_prompts(2**20, n)

    def score(self, prompt: Prompt, response_text: str) -> float:
        return min(4, len(response_text)) / 4


def test_a_gsm8k_file_trains_without_conversion(plain: str, tmp_path: Path) -> None:
    summary = run_training(config(plain, task={"check": None}), tmp_path)
    assert summary["eval/n"] == 4
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert (line["prompt/dropped"], line["prompt/truncated"]) == (0, 0)
        assert 60 < line["prompt/length_mean"] <= line["prompt/length_max"] < 294
    description = json.loads((tmp_path / "run.json").read_text())["task"]
    assert "52 training and 8 held-out problems" in description
    assert "check math" in description


def test_a_stopped_run_goes_on_in_the_middle_of_a_pass(plain: str, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(index: int, _: dict[str, float]) -> None:
        if index == 1:
            raise Stop

    made = config(
        plain,
        method={"name": "bf16"},
        sampling={"prompts_per_step": 20, "max_new_tokens": 2},
        rollout={"max_num_seqs": 40},
        run={"steps": 3, "eval_prompts": 0, "state_every": 1},
    )
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    run_training(made, tmp_path / "whole")
    with pytest.raises(Stop):
        run_training(made, tmp_path / "broken", stop)
    run_training(made, tmp_path / "broken", resume=True)
    assert (tmp_path / "broken/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_a_chat_template_is_what_the_policy_reads(plain: str, chat: str) -> None:
    runs = TrainingRun(config(plain)), TrainingRun(config(chat))
    first = [run.parts.requests(run.task.train_prompts(0, 1), 1, "x")[0].prompt_ids for run in runs]
    text = runs[0].task.train_prompts(0, 1)[0].text
    assert runs[0].tokenizer.decode(first[0]) == text
    assert runs[1].tokenizer.decode(first[1]) == f"[user] {text}<eos>\n[assistant] "
    metrics, _ = runs[1].step(0)
    assert metrics["prompt/length_mean"] > 60 + len("[user] <eos>\n[assistant] ") - len("<eos>")


@pytest.mark.parametrize("task", ["reasoning_gym", "calculator", "text_search"])
def test_other_tasks_take_a_step(task: str, plain: str) -> None:
    made = config(plain).model_dump()
    made["task"] = {"name": task} | ({"test_size": 8} if task == "reasoning_gym" else {})
    metrics, _ = TrainingRun(RunConfig.model_validate(made)).step(0)
    assert 0 <= metrics["reward/mean"] <= 1


def test_a_task_of_ones_own(plain: str) -> None:
    run = TrainingRun(config(plain), task=Longest())
    metrics, _ = run.step(0)
    assert metrics["prompt/length_max"] == len("Write much much ")
    assert isinstance(run.task, Longest)


def test_dropped_prompts_leave_the_step(plain: str) -> None:
    run = TrainingRun(config(plain, sampling={"max_prompt_tokens": 12}, run={"eval_prompts": 0}), task=Longest())
    seen: list[int] = []
    generate = run.engine.generate
    run.engine.generate = lambda requests, **more: seen.append(len(requests)) or generate(requests, **more)  # type: ignore[method-assign, func-returns-value]
    metrics, _ = run.step(0)
    assert (metrics["prompt/dropped"], metrics["prompt/length_max"]) == (1, 11)
    assert seen == [4]
    # A held-out problem that does not fit counts as failed: 2 of 4 are asked.
    run.config = config(plain, run={"eval_prompts": 4})
    rate = run.evaluate("x")
    assert seen == [4, 2]
    assert rate is not None
    assert rate <= 0.5


def test_truncated_prompts_keep_their_end(plain: str) -> None:
    sampling = {"max_prompt_tokens": 12, "overlong_prompts": "truncate"}
    run = TrainingRun(config(plain, sampling=sampling), task=Longest())
    for _ in range(2):  # counts are the step's, not the run's
        metrics, _ = run.step(0)
        assert (metrics["prompt/dropped"], metrics["prompt/truncated"], metrics["prompt/length_max"]) == (0, 1, 12)


def test_prompts_that_all_exceed_the_limit(plain: str) -> None:
    with pytest.raises(
        TracefpError,
        match=r"every prompt exceeds 3 tokens \(the shortest has 89\): raise rollout\.max_model_len",
    ):
        TrainingRun(config(plain, sampling={"max_prompt_tokens": 3}))
    strict = config(plain, sampling={"max_prompt_tokens": 3, "overlong_prompts": "error"})
    with pytest.raises(TracefpError, match=r"above sampling\.max_prompt_tokens 3; .*sampling\.overlong_prompts"):
        TrainingRun(strict)


ERRORS = [
    (
        {"sampling": {"max_new_tokens": 300}},
        r"^sampling\.max_new_tokens 300 leaves no room for a prompt in rollout\.max_model_len 300: raise it",
    ),
    (
        {"sampling": {"max_prompt_tokens": 295}},
        r"^sampling\.max_prompt_tokens 295 \+ sampling\.max_new_tokens 6 exceed rollout\.max_model_len 300",
    ),
    (
        {"sampling": {"prompts_per_step": 53}},
        r"^sampling\.prompts_per_step = 53 cannot be met: task\.path .* has 52 training problems",
    ),
    ({"run": {"eval_prompts": 9}}, r"^run\.eval_prompts = 9 cannot be met: task\.path .* has 8 held-out problems"),
    ({"sampling": {"chat_template": "on"}}, r"no chat template, which sampling\.chat_template"),
]


@pytest.mark.parametrize(("sections", "sentence"), ERRORS)
def test_what_cannot_work_shows_before_the_first_step(sections: dict[str, Any], sentence: str, plain: str) -> None:
    with pytest.raises(TracefpError, match=sentence):
        TrainingRun(config(plain, **sections))


def test_the_built_in_model_cannot_write_text() -> None:
    with pytest.raises(TracefpError, match=r"the tokenizer cannot write the character .* of problem train-"):
        TrainingRun(config("builtin:sums-moe", rollout={"max_model_len": 256}))
