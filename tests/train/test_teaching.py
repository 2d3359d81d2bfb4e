"""The warm start's batches and samples of tasks with several turns, and a warm start that is interrupted."""

import os
from pathlib import Path

import pytest
import torch

from tiny import tiny_config, tiny_model
from tracefp4.errors import TracefpError
from tracefp4.tasks import Prompt, build_text_tokenizer, make_task
from tracefp4.tasks.calculator import Calculator, CalculatorConfig
from tracefp4.tasks.reasoning import ReasoningGymConfig
from tracefp4.train import warmstart
from tracefp4.train.average import Average
from tracefp4.train.teaching import (
    EXPERTS_NAME,
    IGNORED_LABEL,
    Batches,
    Teacher,
    pass_rate,
    sample_exchanges,
    supervised_batch,
)
from tracefp4.train.warmstart import WarmstartConfig, WarmstartError, run_warmstart

TINY = WarmstartConfig.model_validate(
    {
        "tokenizer": "text",
        "task": {"name": "calculator", "max_terms": 3, "max_digits": 2},
        "model": {
            "vocab_size": 112,
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "num_experts": 4,
            "moe_intermediate_size": 16,
        },
        "optimizer": {"batch_size": 4, "max_steps": 6, "easy_share": 0.0, "mistake_share": 0.5},
        "stop": {"pass_rate_low": 0.9, "pass_rate_high": 1.0, "eval_every": 3, "eval_problems": 4, "max_new_tokens": 6},
    }
)
CALCULATOR = Calculator(CalculatorConfig(min_terms=3, max_terms=3))


def test_a_row_of_several_turns_learns_the_policys_tokens_only() -> None:
    tokenizer, prompt = build_text_tokenizer(), CALCULATOR.train_prompts(0, 1)[0]
    batch = supervised_batch(Teacher(CALCULATOR, 0.0), [prompt], tokenizer)
    turns = CALCULATOR.solution_turns(prompt, False)
    replies = [CALCULATOR.respond(prompt, turns[:n]) or "" for n in (1, 2)]
    eos = tokenizer.eos_token
    whole = f"{prompt.text}{turns[0]}{eos}{replies[0]}{turns[1]}{eos}{replies[1]}{turns[2]}{eos}"
    assert tokenizer.decode(batch["input_ids"][0]) == whole
    learned = batch["input_ids"][0][batch["labels"][0] != IGNORED_LABEL]
    assert tokenizer.decode(learned) == "".join(turn + eos for turn in turns)


def test_a_task_without_solutions_is_refused() -> None:
    task = make_task(ReasoningGymConfig(families=["chain_sum"]))
    with pytest.raises(TracefpError, match=r"task.name reasoning_gym writes no solutions"):
        Teacher(task, 0.0)


class Scripted:
    """A model that writes given texts, a turn each, whatever it reads."""

    device = torch.device("cpu")

    def __init__(self, texts: list[str]) -> None:
        self.tokenizer = build_text_tokenizer()
        self.turns = [[*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id] for text in texts]
        self.read: list[str] = []
        self.place = 0

    def __call__(self, input_ids: torch.Tensor, **_: object) -> object:
        if input_ids.shape[1] > 1:
            self.read.append(self.tokenizer.decode(input_ids[0]))
            self.now, self.place = self.turns.pop(0), 0
        logits = torch.full((*input_ids.shape, len(self.tokenizer)), -1e9)
        logits[:, -1, self.now[self.place]] = 0.0
        self.place += 1
        return type("Output", (), {"logits": logits, "past_key_values": None})()

    def eval(self) -> None:
        pass


def test_an_exchange_is_sampled_turn_by_turn() -> None:
    prompt = Prompt("p", "2 + 3 + 4?", "9", {"expression": "2 + 3 + 4"})
    model = Scripted(["<calc>2+3</calc>", "<calc>5+4</calc>", "#### 9"])
    turns = sample_exchanges(model, model.tokenizer, CALCULATOR, [prompt], 0, 40)  # type: ignore[arg-type]
    assert turns == [["<calc>2+3</calc>", "<calc>5+4</calc>", "#### 9"]]
    assert model.read[1].endswith("<result>5</result>")
    assert CALCULATOR.score(prompt, turns[0][-1]) == 1.0
    cut = Scripted(["<calc>2+3</calc>"])
    assert sample_exchanges(cut, cut.tokenizer, CALCULATOR, [prompt], 0, 4) == [[]]  # type: ignore[arg-type]


def test_a_pass_rate_of_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt("p", "2 + 3?", "5", {"expression": "2 + 3"})
    monkeypatch.setattr(CALCULATOR, "test_prompts", lambda n: [prompt])
    model = Scripted(["<calc>2+3</calc>", "#### 5"])
    assert pass_rate(model, model.tokenizer, CALCULATOR, 1, 0, 40) == (1.0, 22.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_an_interrupted_warm_start_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decay: float
) -> None:
    stop, optimizer = TINY.stop.model_copy(update={"pass_rate_low": 0.0}), TINY.optimizer
    config = TINY.model_copy(update={"stop": stop, "optimizer": optimizer.model_copy(update={"average": decay})})
    rates = iter([2.0, 0.5, 2.0, 0.5])  # a jump over the band, then within

    def at_random(*_: object) -> tuple[float, float]:
        return next(rates), 3.0

    monkeypatch.setattr(warmstart, "pass_rate", at_random)
    monkeypatch.setattr(warmstart, "_write_checkpoint", lambda d, model, *_: _weights(d, model))
    run_warmstart(config, tmp_path / "whole")
    calls = 0
    original = warmstart._update

    def killed(*arguments: object) -> float:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(warmstart, "_update", killed)
    with pytest.raises(KeyboardInterrupt):
        run_warmstart(config, tmp_path / "broken", resumable=True)
    assert (tmp_path / ".broken.progress").is_file()
    run_warmstart(config, tmp_path / "broken", resumable=True)
    assert (tmp_path / "broken/weights").read_bytes() == (tmp_path / "whole/weights").read_bytes()
    assert not (tmp_path / ".broken.progress").exists()


def _weights(directory: Path, model: torch.nn.Module) -> dict[str, object]:
    (directory / "weights").write_bytes(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return {}


def test_a_small_vocabulary_and_a_missing_device_are_one_sentence(tmp_path: Path) -> None:
    small = TINY.model_copy(update={"model": TINY.model.model_copy(update={"vocab_size": 32})})
    with pytest.raises(WarmstartError, match="vocab_size 32 is below the tokenizer's 98"):
        run_warmstart(small, tmp_path / "out")
    if not torch.cuda.is_available():
        with pytest.raises(TracefpError, match="device = cuda needs a GPU"):
            run_warmstart(TINY.model_copy(update={"device": "cuda"}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # no GPU is touched: only processes make the batches
def test_batches_come_in_order_from_here_or_from_processes(device: str) -> None:
    def make(step: int) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor([step, os.getpid()])}

    made = [(step, *batch["step"].tolist()) for step, batch in Batches(make, device).of(range(3, 12))]
    assert [row[:2] for row in made] == [(step, step) for step in range(3, 12)]
    here = {maker == os.getpid() for *_, maker in made}
    assert here == {device == "cpu"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_that_cannot_be_made_is_one_sentence(device: str) -> None:
    def make(step: int) -> dict[str, torch.Tensor]:
        raise TracefpError("no such step")

    with pytest.raises(TracefpError, match=r"^no such step$"):
        next(Batches(make, device).of(range(4)))


def test_the_average_is_an_exponential_one_and_starts_anew_from_given_weights() -> None:
    model = tiny_model(tiny_config())
    average, name = Average(model, 0.75), "model.norm.weight"
    weight, held = model.get_parameter(name), average.model.get_parameter(name)
    for value in (1.0, 5.0, 9.0):
        torch.nn.init.constant_(weight, value)
        average.add(model)
    assert held.unique().tolist() == [0.75 * (0.75 * 1 + 0.25 * 5) + 0.25 * 9]
    average.start_from({n: torch.full_like(p, 2.0) for n, p in average.model.state_dict().items()})
    average.add(model)
    assert held.unique().tolist() == [0.75 * 2 + 0.25 * 9]
    assert weight.unique().tolist() == [9.0]
    assert Average(model, 0.0).model is model


def test_experts_of_a_gpus_warm_start_are_transformers_in_bf16(tmp_path: Path) -> None:
    """Roundings of 2^-9 at a few places of outputs of size 1; a gradient for every weight; the choice is not saved."""
    plain, bf16 = tiny_model(tiny_config()), tiny_model(tiny_config())
    bf16.set_experts_implementation(EXPERTS_NAME)
    ids = torch.randint(2, 32, (3, 11), generator=torch.Generator().manual_seed(0))
    want, got = (m.model(ids, use_cache=False).last_hidden_state for m in (plain, bf16))
    assert got.dtype == torch.float32
    assert not torch.equal(got, want)
    assert (got - want).norm() < 0.02 * want.norm()
    for out in (want, got):
        out.square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), bf16.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert (q.grad - p.grad).norm() <= 0.05 * p.grad.norm(), name
    bf16.save_pretrained(tmp_path)
    assert EXPERTS_NAME not in (tmp_path / "config.json").read_text()
