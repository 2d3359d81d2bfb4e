"""Recipes: what loads, and the sentence that each wrong input gets."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from pydantic import Field, ValidationError, model_validator

from tracefp4.config import (
    ConfigError,
    StrictModel,
    config_hash,
    load_config,
    parse_override,
    resolved,
    with_overrides,
)
from tracefp4.errors import TracefpError
from tracefp4.loop.config import RunConfig


class Train(StrictModel):
    lr: float = Field(default=1e-3, gt=0, le=1)
    steps: int = Field(default=10, ge=1)
    cap: Annotated[float, Field(ge=1, le=100)] | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    centered: bool = False

    @model_validator(mode="after")
    def _even(self) -> Self:
        if self.steps == 77:
            raise ValueError("steps must not be 77")
        if self.steps == 78:
            raise ValueError("train.steps must not be 78, and train.lr not either")
        if self.steps == 79:
            raise ValueError("train is not to take 79 steps")
        if self.steps == 80:
            raise ValueError("training takes 80 steps")
        return self


class Quant(StrictModel):
    format: Literal["nvfp4", "mxfp4"] = "nvfp4"
    encode_scale: float | Literal["row", "tensor"] = "row"
    layers: list[int] = Field(default=[], max_length=3)


class Run(StrictModel):
    seed: int = 0
    dir: Path = Path("runs")


class Recipe(StrictModel):
    name: str
    train: Train = Train()
    quant: Quant = Quant()
    run: Run = Run()


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A good recipe, at a relative path so that the expected sentences are short."""
    monkeypatch.chdir(tmp_path)
    Path("r.toml").write_text('name = "a"\n[train]\nlr = 0.1\nsteps = 5\n')
    return "r.toml"


def test_file_defaults_and_overrides_in_order(recipe: str) -> None:
    config = load_config(
        recipe,
        [
            "run.seed=3",
            "run.seed=4",
            "name=bare-word",
            "run.dir=a/b#1",
            "train.betas=[0.5, 0.25]",
            "train={cap=5}",
        ],
        Recipe,
    )
    assert config.run == Run(seed=4, dir=Path("a/b#1"))
    assert config.name == "bare-word"
    # The inline table is merged: the file's lr and steps stay.
    assert config.train == Train(lr=0.1, steps=5, cap=5.0, betas=(0.5, 0.25))
    assert load_config(recipe, [], Recipe).quant == Quant()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a = 1e-4", 1e-4),
        ("a=true", True),
        ("a=trace", "trace"),
        ("a=ptq:nvfp4", "ptq:nvfp4"),
        ("a='1'", "1"),
        ('a=""', ""),
        ("a=[1, 2]", [1, 2]),
        ("a={b=1}", {"b": 1}),
        ("a=x=y", "x=y"),
        # No value loses its tail: neither a comment, nor a second item, nor a second line.
        ("a=1 # c", "1 # c"),
        ("a=1, 2", "1, 2"),
        ("a=1\nb=2", "1\nb=2"),
    ],
)
def test_override_values(text: str, value: object) -> None:
    assert parse_override(text) == (("a",), value)


FILE_ERRORS = [
    ("[train]\nlr = -1\n", "train.lr must be greater than 0 and at most 1, got -1 in r.toml"),
    ('[train]\nlr = "0.1"\n', 'train.lr must be a number, got "0.1" in r.toml'),
    (
        "[train]\nlearning_rat = 1\n",
        "unknown key train.learning_rat in r.toml; known here: train.lr, train.steps, ",
    ),
    ("[trian]\nlr = 1\n", "unknown key trian in r.toml; did you mean train?"),
    ("seed = 1\n", "unknown key seed in r.toml; it exists as run.seed"),
    ("[train]\nseed = 1\n", "unknown key train.seed in r.toml; it exists as run.seed"),
    ("[run]\nsede = 1\n", "unknown key run.sede in r.toml; did you mean run.seed?"),
    ("train = 3\n", "train must be a section with keys of its own, got 3 in r.toml"),
    ("[quant]\nlayers = [1, 2, 3, 4]\n", "quant.layers must be a list of at most 3 values, got [1, 2, 3, 4]"),
    ("[quant]\nlayers = [1, 2.5]\n", "quant.layers[1] must be an integer, got 2.5 in r.toml"),
    ("[train]\nsteps = nan\n", "train.steps must be a finite number, got NaN in r.toml"),
    ("[train]\nlr = inf\n", "train.lr must be a finite number, got Infinity in r.toml"),
]


@pytest.mark.parametrize(("body", "sentence"), FILE_ERRORS)
def test_wrong_file(recipe: str, body: str, sentence: str) -> None:
    Path(recipe).write_text('name = "a"\n' + body)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [], Recipe)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, TracefpError)
    assert isinstance(caught.value, ValueError)


OVERRIDE_ERRORS = [
    ("train.lr", "the override 'train.lr' has no '=': write it as section.key=value"),
    ("train.lr=", "the override 'train.lr=' has no value: write train.lr='\"\"' for an empty string"),
    ("=1", "the override '=1' needs a dotted key such as train.lr before the '='"),
    ("a b=1", "the override 'a b=1' needs a dotted key such as train.lr before the '='"),
    ("train..lr=1", "the override 'train..lr=1' needs a dotted key such as train.lr before the '='"),
    (
        "train.betas=[1",
        "the value in the override 'train.betas=[1' is not valid TOML: check its brackets and quotes",
    ),
    ("train.lr.x=1", "the override 'train.lr.x=1' needs train.lr to be a section, but it is a value"),
    ("train.lr=2", "train.lr must be greater than 0 and at most 1, got 2 in the override 'train.lr=2'"),
    (
        "train.cap=0.5",
        "train.cap must be at least 1 and at most 100, got 0.5 in the override 'train.cap=0.5'",
    ),
    ("train.steps=0", "train.steps must be at least 1, got 0 in the override 'train.steps=0'"),
    ("train.steps=1.5", "train.steps must be an integer, got 1.5 in the override 'train.steps=1.5'"),
    ("train.steps='5'", "train.steps must be an integer, got \"5\" in the override 'train.steps='5''"),
    ("train.steps=1e99", "train.steps must be a smaller integer, got 1e+99 in the override 'train.steps=1e99'"),
    ("train.steps=ten", "train.steps must be an integer, got \"ten\" in the override 'train.steps=ten'"),
    ("train.lr=true", "train.lr must be a number, got true in the override 'train.lr=true'"),
    (
        "train.centered=yes",
        "train.centered must be true or false, got \"yes\" in the override 'train.centered=yes'",
    ),
    (
        "train.betas=[1,'.5']",
        "train.betas[1] must be a number, got \".5\" in the override 'train.betas=[1,'.5']'",
    ),
    ("train.centered=1", "train.centered must be true or false, got 1 in the override 'train.centered=1'"),
    ("train.betas=[1]", "train.betas has too few values in the override 'train.betas=[1]'"),
    ("train.lrr=1", "unknown key train.lrr in the override 'train.lrr=1'; did you mean train.lr?"),
    ("trian.lr=1", "unknown key trian.lr in the override 'trian.lr=1'; did you mean train?"),
    ("lr=1", "unknown key lr in the override 'lr=1'; it exists as train.lr"),
    ("quant.steps=1", "unknown key quant.steps in the override 'quant.steps=1'; it exists as train.steps"),
    ("zz=1", "unknown key zz in the override 'zz=1'; known here: name, train, quant, run"),
    ("name=1", "name must be a string, got 1 in the override 'name=1'"),
    (
        "quant.format=nvfp5",
        "quant.format must be one of 'nvfp4' or 'mxfp4', got \"nvfp5\" in the override 'quant.format=nvfp5'; "
        "did you mean nvfp4?",
    ),
    (
        "quant.encode_scale=rwo",
        "quant.encode_scale must be a number or one of 'row' or 'tensor', got \"rwo\" in the override "
        "'quant.encode_scale=rwo'; did you mean row?",
    ),
    ("train.steps=77", "train: steps must not be 77 (in the override 'train.steps=77')"),
]


@pytest.mark.parametrize(("override", "sentence"), OVERRIDE_ERRORS)
def test_wrong_override(recipe: str, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [override], Recipe)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (78, "train.steps must not be 78, and train.lr not either (in the override 'train.steps=78')"),
        (79, "train is not to take 79 steps (in the override 'train.steps=79')"),
        (80, "train: training takes 80 steps (in the override 'train.steps=80')"),
    ],
)
def test_a_rule_that_names_its_section_has_no_prefix_of_it(recipe: str, steps: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, ["train.cap=2", f"train.steps={steps}"], Recipe)
    assert str(caught.value) == sentence


def test_a_rule_that_names_its_keys_blames_the_override_of_one(recipe: str) -> None:
    for order in (["train.steps=78", "train.cap=2"], ["train.cap=2", "train.steps=78"]):
        with pytest.raises(ConfigError, match=r"either \(in the override 'train\.steps=78'\)$"):
            load_config(recipe, order, Recipe)


RULES = [
    ["run.lag=1", "run.asynchronous=true"],
    ["run.eval_every=5"],
    ["run.keep_best=1"],
    ["train.triage.severe_below=-0.1"],
    ["method.bits=3"],
    ["method.name=quads", "run.asynchronous=true", "run.lag=2"],
    ["quant.kv=mxfp8-rceil"],
    ["quant.kv=fp5"],
    ["task.min_terms=9", "task.max_terms=8"],
    ["task.name=dataset", "task.path=x", "task.check.kind=math", "task.check.function=f.py:g"],
    ["task.name=text_search", "task.path=x"],
    ["task.name=reasoning_gym", 'task.families=["a", "a"]'],
    ["rollout.dtype=float32"],
    ["run.lag=9"],
    ["run.lag=1", "run.asynchronous=true", "run.keep_best=1", "train.triage.severe_below=-0.1", "method.bits=3"],
]
"""Settings that rules of a section, of a key, or across sections refuse."""


@pytest.mark.parametrize("overrides", RULES, ids=" ".join)
def test_no_sentence_says_a_section_twice(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        with_overrides({}, overrides, RunConfig, "a recipe")
    for sentence in str(caught.value).split("; "):
        assert re.match(r"([a-z_.]+): \1\b", sentence) is None, sentence


def test_all_problems_are_named(recipe: str) -> None:
    Path(recipe).write_text("[train]\nlr = -1\n[quantt]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [], Recipe)
    assert str(caught.value) == (
        "name is required and missing in r.toml; "
        "train.lr must be greater than 0 and at most 1, got -1 in r.toml; "
        "unknown key quantt in r.toml; did you mean quant?"
    )


def test_a_file_that_is_no_recipe_does_not_flood(recipe: str) -> None:
    Path(recipe).write_text('name = "a"\n' + "".join(f"[zz{number}]\n" for number in range(9)))
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [], Recipe)
    assert str(caught.value).count("unknown key") == 3
    assert str(caught.value).endswith("; and 6 more problems")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ("a =\n", "line 1, column "),
        ("a = 1\na = 2\n", "line 2"),
        ("a = 1\n[x\n", "line 2, column 3: "),
        ('a = 1\nb = "abc', "line 2"),
        ("a = 1\n\nb = [1,\n2\n", "line 4"),
    ],
)
def test_broken_toml_names_the_line(recipe: str, body: str, where: str) -> None:
    Path(recipe).write_text(body)
    with pytest.raises(ConfigError, match=rf"^r\.toml is not valid TOML: {where}"):
        load_config(recipe, [], Recipe)


def test_unreadable_files(recipe: str) -> None:
    Path("latin.toml").write_bytes(b'name = "\xe4"\n')
    cases = {
        "rr.toml": "there is no recipe at rr.toml; did you mean r.toml?",
        "no/r.toml": "there is no recipe at no/r.toml (the folder no does not exist either)",
        ".": ". is a folder, not a recipe file",
        "latin.toml": "latin.toml is not UTF-8 text, as TOML must be",
    }
    for path, sentence in cases.items():
        with pytest.raises(ConfigError) as caught:
            load_config(path, [], Recipe)
        assert str(caught.value) == sentence


def test_sections_are_frozen_and_check_their_defaults() -> None:
    class Wrong(StrictModel):
        steps: Annotated[int, Field(ge=1)] = 0

    with pytest.raises(ValidationError):
        Wrong()
    with pytest.raises(ValidationError):
        Train().steps = 3  # type: ignore[misc]


def test_hash_is_of_the_settings_not_of_their_spelling(recipe: str) -> None:
    plain = load_config(recipe, [], Recipe)
    spelled = load_config(recipe, ["train.betas=[0.9, 0.95]", "quant.format='nvfp4'", "train.lr=1e-1"], Recipe)
    other = load_config(recipe, ["run.seed=1"], Recipe)
    assert config_hash(plain) == config_hash(spelled) != config_hash(other)
    assert len(config_hash(plain)) == 16
    assert Recipe.model_validate(resolved(plain)) == plain
