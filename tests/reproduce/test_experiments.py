"""What each command compares, and which rows are left of it."""

import pytest
import torch

from tracefp4.config import ConfigError
from tracefp4.loop import RunConfig
from tracefp4.methods import get_method
from tracefp4.reproduce.experiments import EXPERIMENTS, LADDER, Arm, chosen, on_rung
from tracefp4.reproduce.rung import FOLDER, TINY, load_rung
from tracefp4.rollout.config import resolve
from tracefp4.rollout.model import ModelShape
from tracefp4.tasks import ToolTask, build_text_tokenizer, build_tokenizer, make_task
from tracefp4.tasks.sandbox import sandbox_support
from tracefp4.train.teaching import Teacher
from tracefp4.train.warmstart import build_config, build_model

MODES = ["bf16", "fp32", "naive", "qat", "trace", "trace-all"]
RECIPES = sorted(path.stem for path in FOLDER.glob("*.toml"))
FOR_A_CPU = (TINY, "sums-small")  # as small as they can be, and so too small for the kernels


def names(experiment: str, wanted: list[str], modes: list[str] = MODES) -> dict[str, list[str]]:
    found = chosen(EXPERIMENTS[experiment], wanted, modes)
    return {table.key: [arm.name for arm in table.arms] for table in found.tables}


def test_rows_are_chosen_by_label_or_mode() -> None:
    assert names("main", ["trace", "bf16"]) == {"decoupled": ["bf16", "trace"], "bypass": ["bf16", "trace"]}
    assert names("bits", ["1.125 bits"]) == {"bits": ["1.125 bits"]}
    assert names("bits", ["bf16"]) == {"bits": ["bf16"], "parts": ["bf16"]}
    assert names("bits", ["trace-all"])["bits"][:2] == ["4.5 bits", "1.5 bits"]
    assert names("bits", ["trace-all"])["parts"] == ["trace-all"]


def test_a_mode_of_no_table_joins_all() -> None:
    assert names("main", ["bf16", "fp32"]) == {"decoupled": ["bf16", "fp32"], "bypass": ["bf16", "fp32"]}


def test_a_rung_of_an_experiment_that_climbs() -> None:
    layers = EXPERIMENTS["layers"]
    assert [t.key for t in on_rung(layers, "ladder-12").tables] == ["layers-12"]
    assert on_rung(layers, None) is layers
    assert on_rung(EXPERIMENTS["bits"], "sums-small") is EXPERIMENTS["bits"]


def test_the_policy_that_is_evaluated_is_trained() -> None:
    assert names("ptq", ["ptq:nvfp4"]) == {"ptq": ["bf16", "ptq:nvfp4"]}


def test_unknown_and_missing_modes() -> None:
    with pytest.raises(ConfigError, match="there is no mode 'trase'; did you mean trace"):
        names("main", ["trase"])
    with pytest.raises(ConfigError, match="--modes names qat twice"):
        names("main", ["qat", "qat"])
    missing = "reproduce main compares qarl, quads, quads-kv, trace-paper, which this version does not have"
    with pytest.raises(ConfigError, match=missing):
        names("main", [])


def test_folders_are_plain_names() -> None:
    for experiment in EXPERIMENTS.values():
        for table in experiment.tables:
            folders = [arm.folder for arm in table.arms]
            assert len(set(folders)) == len(folders)
            assert not set("".join(folders)) & set("/: ,")
    assert Arm("bf16", "ptq:4over6").folder == "ptq-4over6"


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_of_the_ladder_fit_their_task(name: str) -> None:
    """Prompt and solution, careless ones too, fit the limits; every rung but the wide one has a state under 60 MB."""
    rung = load_rung(name)
    weak = {"isolation": "weak"} if rung.task.name == "programs" and not sandbox_support().full else {}
    task = make_task(rung.task.model_copy(update=weak))
    try:
        tokenizer = build_text_tokenizer() if rung.start.tokenizer == "text" else build_tokenizer()
        assert len(tokenizer) <= rung.start.model.vocab_size
        teacher = Teacher(task, rung.start.optimizer.mistake_share)
        for prompt in task.train_prompts(0, 64):
            turns, replies = teacher.turns(prompt), []
            if isinstance(task, ToolTask):
                replies = [task.respond(prompt, turns[:n]) or "" for n in range(1, len(turns))]
            tokens = len(tokenizer("".join([*turns, *replies])).input_ids) + len(turns)
            assert tokens <= rung.sampling.max_new_tokens
            assert max(len(turn) for turn in turns) < rung.start.stop.max_new_tokens
            assert len(prompt.text) + rung.sampling.max_new_tokens <= rung.rollout.max_model_len
        assert rung.rollout.max_model_len <= rung.start.model.max_position_embeddings
        RunConfig.model_validate(rung.recipe("somewhere"))
        with torch.device("meta"):
            weights = sum(p.numel() for p in build_model(rung.warmstart(), tokenizer).parameters())
        # FP32 masters and two moments: a state. Runs of the larger ones end on the machine that they began on.
        assert 12 * weights <= 60e6 or name == "wide" or name in LADDER
    finally:
        getattr(task, "close", lambda: None)()


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FOR_A_CPU])
def test_the_kernels_take_every_rung(name: str) -> None:
    """On a GPU a rollout in plain torch takes several times as long."""
    rung = load_rung(name)
    config = build_config(rung.warmstart(), build_tokenizer())
    for mode in ("bf16", "naive", "qat", "trace", "trace-paper", "trace-all", "w4a16", "quads", "quads-kv", "resq"):
        recipe = get_method(mode).recipe(rung.quant, rung.start.model.num_layers)
        assert resolve(rung.rollout, "cuda", ModelShape.from_hf(config), recipe).backend == "triton"
    for mode in ("qat@mxfp4-w4a4", "trace-all@mxfp4-w4a8"):
        recipe = get_method(mode).recipe(rung.quant, rung.start.model.num_layers)
        assert resolve(rung.rollout, "cuda", ModelShape.from_hf(config), recipe).backend == "triton"
