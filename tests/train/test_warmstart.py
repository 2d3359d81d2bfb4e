import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tracefp4.assets import builtin_model_path
from tracefp4.config import ConfigError, load_config
from tracefp4.errors import TracefpError
from tracefp4.files import StorageError
from tracefp4.tasks import Prompt, build_tokenizer, make_task
from tracefp4.tasks.running_sums import RunningSums, RunningSumsConfig
from tracefp4.train import warmstart
from tracefp4.train.teaching import sample_responses
from tracefp4.train.warmstart import (
    IGNORED_LABEL,
    Teacher,
    WarmstartConfig,
    WarmstartError,
    balance_loss,
    main,
    run_warmstart,
    sha256_of,
    supervised_batch,
)

TINY = WarmstartConfig.model_validate(
    {
        "threads": 1,
        "model": {
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "num_experts": 4,
            "moe_intermediate_size": 16,
        },
        "optimizer": {"batch_size": 4, "max_steps": 3},
        "stop": {"pass_rate_low": 0.0, "pass_rate_high": 0.5, "eval_every": 3, "eval_problems": 4},
    }
)


def test_three_steps_write_a_complete_checkpoint(tmp_path):
    record = run_warmstart(TINY, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "warmstart.json").read_text()) == json.loads(json.dumps(record))
    assert WarmstartConfig.model_validate(record["recipe"]) == TINY
    assert record["steps"] == 3
    assert record["sha256"]["model.safetensors"] == sha256_of(tmp_path / "out" / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16


def test_same_recipe_gives_the_same_bytes(tmp_path):
    hashes = {run_warmstart(TINY, tmp_path / name)["sha256"]["model.safetensors"] for name in "ab"}
    assert len(hashes) == 1


def test_missing_the_band_writes_nothing(tmp_path):
    hard = TINY.model_copy(update={"stop": TINY.stop.model_copy(update={"pass_rate_low": 0.5})})
    with pytest.raises(WarmstartError, match="outside"):
        run_warmstart(hard, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(warmstart, "_write_checkpoint", fail)
    with pytest.raises(StorageError, match=r"out cannot be written \(disk full\)"):
        run_warmstart(TINY, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_jump_over_the_band_goes_back_and_halves_the_rate(monkeypatch, capsys):
    rates = iter([0.1, 0.9, 0.3])
    monkeypatch.setattr(warmstart, "pass_rate", lambda *_: (next(rates), 10.0))
    config = TINY.model_copy(
        update={
            "optimizer": TINY.optimizer.model_copy(update={"max_steps": 9}),
            "stop": TINY.stop.model_copy(update={"pass_rate_low": 0.2}),
        }
    )
    tokenizer = build_tokenizer()
    model = warmstart.build_model(config, tokenizer)
    outcome = warmstart.train(model, tokenizer, make_task(config.task), config)
    assert (outcome.steps, outcome.pass_rate, outcome.reached_band) == (6, 0.3, True)
    assert "back to step 3 at learning rate 1.0e-03" in capsys.readouterr().out


def test_non_empty_output_is_refused_in_one_sentence(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "keep").write_text("mine")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("seed = 1\n")
    assert main([str(recipe), str(tmp_path / "out")]) == 2
    assert "exists and is not an empty directory" in capsys.readouterr().err
    assert (tmp_path / "out" / "keep").read_text() == "mine"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("sead = 1", "sead.*did you mean seed"),
        ("[model]\nhiden_size = 64", r"hiden_size.*did you mean model.hidden_size"),
        ("[task]\nmin_term = 3", r"task.min_term.*did you mean task.min_terms"),
        ("[model]\nhidden_size = 60", "model.hidden_size must be a multiple of 16, got 60"),
        ("[model]\nnum_kv_heads = 3", "num_heads = 4 is no multiple of 3 = num_kv_heads"),
        ("[stop]\npass_rate_low = 0.9", "pass_rate_low is above pass_rate_high"),
        ("seed = ", "not valid TOML"),
    ],
)
def test_recipe_errors_name_the_key(tmp_path, toml, message):
    path = tmp_path / "recipe.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError, match=message):
        load_config(path, [], WarmstartConfig)


def test_missing_recipe_and_wrong_usage(tmp_path, capsys):
    assert main([str(tmp_path / "none.toml"), str(tmp_path / "out")]) == 2
    assert main([]) == 2
    assert "there is no recipe at" in capsys.readouterr().err


def test_the_teacher_errs_as_often_as_it_is_told():
    task = RunningSums(RunningSumsConfig())
    prompts = task.train_prompts(3, 400)
    for share in (0.0, 0.5):
        wrong = sum(task.score(p, Teacher(task, share).solution(p)) == 0.0 for p in prompts) / 400
        assert abs(wrong - share) <= 4 * (share * (1 - share) / 400) ** 0.5  # four standard errors


def test_labels_cover_the_response_only():
    task = make_task(RunningSumsConfig(free_letters=0))
    prompts = [Prompt("a", "14+27-5=", "36"), Prompt("b", "10+10=", "20")]
    batch = supervised_batch(task, prompts, build_tokenizer())
    assert [tuple(batch[key].shape) for key in ("input_ids", "attention_mask", "labels")] == [(2, 29)] * 3
    assert (batch["labels"][0] == IGNORED_LABEL).sum() == 8
    assert batch["labels"][0, -1] == batch["labels"][1, 18] == 1
    assert (batch["labels"][1, 19:] == IGNORED_LABEL).all()
    assert batch["attention_mask"].sum(-1).tolist() == [29, 19]


def test_left_padding_does_not_change_what_is_sampled():
    model = AutoModelForCausalLM.from_pretrained(builtin_model_path("sums-moe"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_path("sums-moe"))
    prompts = [Prompt("a", "14+27-50+38=", "29"), Prompt("b", "14+27-50+38-10-11=", "8")]
    # A temperature near 0 is greedy, so the random draws of other rows do not matter.
    alone = sample_responses(model, tokenizer, prompts[:1], seed=0, temperature=1e-3, max_new_tokens=40)
    padded = sample_responses(model, tokenizer, prompts, seed=0, temperature=1e-3, max_new_tokens=40)
    assert padded[0] == alone[0]


def test_builtin_checkpoint_is_the_recorded_one():
    path = builtin_model_path("sums-moe")
    record = json.loads((path / "warmstart.json").read_text())
    assert record["sha256"]["model.safetensors"] == sha256_of(path / "model.safetensors")
    assert sum(file.stat().st_size for file in path.iterdir()) <= 5 * 2**20
    assert 0.2 <= record["pass_rate"]["value"] <= 0.5
    assert WarmstartConfig.model_validate(record["recipe"]).task == RunningSumsConfig()


def test_unknown_builtin_names_the_nearest():
    with pytest.raises(TracefpError, match="did you mean sums-moe"):
        builtin_model_path("sum-moe")


def test_balance_loss_is_one_when_even_and_sees_each_layer():
    mask = torch.ones(1, 4, dtype=torch.int64)
    even = 9.0 * torch.eye(4)
    assert balance_loss((even,), mask, top_k=1).item() == pytest.approx(1.0, abs=1e-3)
    # Each layer uses two of its four experts; pooled over layers all four would look equally busy.
    left, right = even[[0, 1, 0, 1]], even[[2, 3, 2, 3]]
    assert balance_loss((left, right), mask, top_k=1).item() == pytest.approx(2.0, abs=1e-2)
    # A padded row changes nothing.
    padded = torch.cat([even, even[:1]])
    padded_mask = torch.tensor([[1, 1, 1, 1, 0]])
    assert balance_loss((padded,), padded_mask, top_k=1) == balance_loss((even,), mask, top_k=1)


def test_the_shipped_recipe_is_the_one_behind_the_checkpoint():
    recipe = Path(__file__).parents[2] / "recipes" / "warmstart.toml"
    record = json.loads((builtin_model_path("sums-moe") / "warmstart.json").read_text())
    assert load_config(recipe, [], WarmstartConfig) == WarmstartConfig.model_validate(record["recipe"])


def test_a_folder_that_cannot_be_written_shows_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WarmstartError, match="cannot be written"):
        run_warmstart(TINY, tmp_path / "file" / "out")
