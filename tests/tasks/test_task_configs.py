"""The `[task]` section of a recipe: whose keys it has, and the sentence that each wrong input gets."""

import re
from pathlib import Path
from typing import Any

import pytest

from tracefp4.config import ConfigError, load_config, resolved
from tracefp4.loop import RunConfig
from tracefp4.tasks.dataset import DatasetConfig
from tracefp4.tasks.running_sums import RunningSumsConfig


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("r.toml")


def test_running_sums_is_the_default(recipe: Path) -> None:
    recipe.write_text("[run]\nsteps = 2\n")
    assert load_config(recipe, [], RunConfig).task == RunningSumsConfig()
    assert load_config(recipe, ["task.max_terms=4"], RunConfig).task == RunningSumsConfig(max_terms=4)
    recipe.write_text("[task]\nseed = 3\n")
    assert load_config(recipe, [], RunConfig).task == RunningSumsConfig(seed=3)


def test_a_name_chooses_the_keys_and_survives_config_json(recipe: Path) -> None:
    recipe.write_text('[task]\nname = "dataset"\npath = "a.jsonl"\n[task.check]\nkind = "exact"\n')
    config = load_config(recipe, ["task.test_size=5"], RunConfig)
    assert isinstance(config.task, DatasetConfig)
    assert (config.task.path, config.task.test_size) == ("a.jsonl", 5)
    assert config.task.check is not None
    assert config.task.check.kind == "exact"
    assert RunConfig.model_validate(resolved(config)) == config


ERRORS = [
    ("", "task.max_terms=99", "task.max_terms must be at least 2 and at most 96, got 99 in the override"),
    ("", "task.min_term=3", "unknown key task.min_term in the override 'task.min_term=3'; did you mean task.min_terms"),
    (
        "",
        "task.path=a",
        "task.path in the override 'task.path=a' belongs to task.name = \"dataset\" or "
        '"text_search", and here task.name is "running_sums"',
    ),
    (
        '[task]\nname = "dataset"\npath = "a"\nmax_terms = 3\n',
        "",
        'task.max_terms in r.toml belongs to task.name = "running_sums" or "calculator", and here task.name is '
        '"dataset"',
    ),
    (
        "[task]\nmax_terms = 3\nfree_letters = 0\nmin_digits = 1\n",
        "task.name=dataset",
        "task.path is required and missing in r.toml; task.max_terms, task.free_letters, task.min_digits in r.toml "
        'belong to task.name = "running_sums", and here task.name is "dataset"',
    ),
    ('[task]\nname = "dataset"\n', "", "task.path is required and missing in r.toml"),
    ('[task]\nname = "dataset"\npath = "a"\ntest_shar = 0.1\n', "", "did you mean task.test_share"),
    (
        '[task]\nname = "dataset"\npath = "a"\ntest_share = 1.5\n',
        "",
        "task.test_share must be at least 0 and less than 1",
    ),
    ('[task]\nname = "dataset"\npath = 3\n', "", "task.path must be a string, got 3 in r.toml"),
    (
        '[task]\nname = "dataset"\npath = "a"\ntest_share = 0.1\ntest_size = 3\n',
        "",
        "task: test_share and test_size both say what is held out; give one of them (in r.toml)",
    ),
    ('[task]\nname = "dataset"\npath = "a"\ntemplate = "x"\n', "", "template 'x' must hold {prompt}"),
    ('[task]\nname = "dataset"\npath = "a"\n[task.check]\nkinds = "math"\n', "", "did you mean task.check.kind"),
    (
        "",
        "task.name=datset",
        'task.name must be one of "running_sums", "dataset", "reasoning_gym", "calculator", "text_search", "euclid", '
        '"programs", got "datset" in the override \'task.name=datset\'; did you mean dataset?',
    ),
    ("", "task.name=3", "task.name must be one of "),
    ("task = 3\n", "", "task must be a section with keys of its own, got 3 in r.toml"),
    (
        "[task]\npath_to = 1\n",
        "",
        "unknown key task.path_to in r.toml; known here: task.name, task.seed, task.min_terms",
    ),
    ("[run]\nfamilies = []\n", "", "unknown key run.families in r.toml; it exists as task.families"),
    ('[task]\nname = "text_search"\npath = "a"\n', "", "path is set without corpus"),
    (
        '[task]\nname = "reasoning_gym"\nfamilies = ["gcd"]\n[task.options.lcm]\nx = 1\n',
        "",
        "options.lcm is set, but lcm is not among the families",
    ),
    ('[task]\nname = "reasoning_gym"\nfamilies = ["gcd", "gcd"]\n', "", "families names gcd twice"),
    (
        '[task]\nname = "reasoning_gym"\n[task.weights]\nchain_sum = 0\n',
        "",
        "task.weights.chain_sum must be greater than 0",
    ),
    ('[task]\nname = "calculator"\nmin_digits = 6\n', "", "min_digits = 6 is above max_digits = 5"),
]


@pytest.mark.parametrize(("body", "override", "sentence"), ERRORS)
def test_wrong_task_sections(recipe: Path, body: str, override: str, sentence: str) -> None:
    recipe.write_text(body or "[run]\nsteps = 2\n")  # a recipe without a key is refused
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [override] if override else [], RunConfig)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_table_of_recipes_has_every_key_of_a_run() -> None:
    """docs/recipes.md: `section.key`, and `.key` of the section named before it. Other tasks are in tasks.md."""
    named, before = set(), ""
    for line in (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines():
        for key in re.findall(r"`([^`]+)`", line.split(" | ")[0]) if line.startswith("| `") else ():
            key = before + key if key.startswith(".") else key
            before = key.rpartition(".")[0]
            named.add(key)

    def keys(values: dict[str, Any], prefix: str = "") -> list[str]:
        pairs = ((f"{prefix}{k}", v) for k, v in values.items())
        return [key for k, v in pairs for key in (keys(v, f"{k}.") if isinstance(v, dict) else [k])]

    groups = tuple(key.removesuffix("*") for key in named if key.endswith(".*"))
    assert [k for k in keys(RunConfig().model_dump()) if k not in named and not k.startswith(groups)] == []


def test_the_documented_keys_are_the_configs() -> None:
    """docs/recipes.md names every key of every section, docs/tasks.md every task."""
    docs = Path(__file__).parents[2] / "docs"
    recipes, tasks = (docs / "recipes.md").read_text(), (docs / "tasks.md").read_text()
    for name, field in type(RunConfig().sampling).model_fields.items():
        assert f"`sampling.{name}`" in recipes or f"`.{name}`" in recipes, (name, field)
    from tracefp4.tasks import TASKS
    from tracefp4.tasks.calculator import CalculatorConfig
    from tracefp4.tasks.reasoning import ReasoningGymConfig
    from tracefp4.tasks.text_search import TextSearchConfig

    for config in (RunningSumsConfig, DatasetConfig, ReasoningGymConfig, CalculatorConfig, TextSearchConfig):
        for name in config.model_fields:
            assert f"`{name}`" in tasks, (config, name)
    for task in TASKS:
        assert f"## {task}" in tasks
