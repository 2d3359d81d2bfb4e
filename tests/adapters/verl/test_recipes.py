"""Every key of the recipes is one that verl, or this package, reads. Composition only; skipped without verl."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiny import tiny_checkpoint, tiny_config

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

import ray
import verl.trainer.config
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.utils.config import omega_conf_to_dataclass, validate_config

from tracefp4.adapters.verl.engine import _refuse_unsupported
from tracefp4.adapters.verl.losses import select_loss
from tracefp4.adapters.verl.settings import KEY, read_settings
from tracefp4.errors import TracefpError

RECIPES = Path(__file__).parents[3] / "recipes" / "verl"
LARGE = ["qwen3_30b_a3b_1node", "qwen3_30b_a3b_multinode"]
ENVIRONMENT = ["MODEL", "TRAIN_FILES", "VAL_FILES", "GUIDANCE", "CHECKPOINTS"] + [
    f"SUMS_{name}" for name in ("MODEL", "DATA", "OUT", "RECIPE")
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def composed(name: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(RECIPES), version_base=None):
        return compose(name, overrides=list(overrides))


@cache
def stock() -> dict[str, Any]:
    """verl's own defaults, with nothing of ours."""
    with initialize_config_dir(str(Path(verl.trainer.config.__file__).parent), version_base=None):
        return OmegaConf.to_container(compose("ppo_trainer"), resolve=False)  # type: ignore[return-value]


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def written(name: str) -> list[tuple[str, ...]]:
    data = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    return [path for path in leaves(data) if path[0] not in ("hydra", "defaults")]


def unknown(paths: list[tuple[str, ...]]) -> list[str]:
    """Keys that neither verl's defaults nor what is known of their free parts has."""
    defaults, out = stock(), []
    ours, ray_init = tuple(KEY.split(".")), ("ray_kwargs", "ray_init")
    for path in paths:
        if path[: len(ours)] == ours:  # read_settings checks those
            continue
        if path[:2] == ray_init and path[2] in inspect.signature(ray.init).parameters:
            continue
        if path[:-1] == ours[:-1] and path[-1] in ("attn_implementation", "model_config"):
            continue
        if path[:3] == ("reward", "custom_reward_function", "path"):
            continue
        node: Any = defaults
        for key in path:
            if not isinstance(node, dict) or key not in node:
                out.append(".".join(path))
                break
            node = node[key]
    return out


@pytest.mark.parametrize("name", ["cpu", "qwen3_30b_a3b", *LARGE])
def test_every_key_is_verls_or_ours(name: str) -> None:
    paths = written(name)
    assert paths
    assert unknown(paths) == []


def test_a_key_that_verl_does_not_have_is_found() -> None:
    assert unknown([("actor_rollout_ref", "rollout", "temprature")]) == ["actor_rollout_ref.rollout.temprature"]
    assert unknown([("trainer", "v1", "sampler", "max_version_diff")]) == ["trainer.v1.sampler.max_version_diff"]


@pytest.mark.parametrize("name", ["cpu", *LARGE])
def test_verls_config_classes_and_our_settings_accept_it(name: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "tiny", tiny_config())
    config = composed(name, f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.tokenizer_path=null")
    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    ref = config.actor_rollout_ref
    actor, rollout = omega_conf_to_dataclass(ref.actor), omega_conf_to_dataclass(ref.rollout)
    hf_model = omega_conf_to_dataclass(ref.model)
    for part in ("algorithm", "trainer.v1.separate_async.hybrid_rollout"):
        omega_conf_to_dataclass(OmegaConf.select(config, part))
    settings = read_settings(ref.model.override_config)
    assert settings is not None
    assert settings.recipe(48).guided_layers == tuple(range(24, 48))
    _refuse_unsupported(hf_model, actor.engine)
    assert actor.use_dynamic_bsz == rollout.log_prob_use_dynamic_bsz  # as verl's worker asserts
    assert rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size == 1
    assert rollout.max_model_len >= rollout.prompt_length + rollout.response_length
    assert config.trainer.v1.trainer_mode.startswith("tracefp4_")
    assert config.trainer.v1.trainer_mode in TRAINER_REGISTRY
    assert select_loss(config, settings.mode) == ""


@pytest.mark.parametrize("name", LARGE)
def test_the_papers_settings(name: str) -> None:
    c = composed(name)
    settings = read_settings(c.actor_rollout_ref.model.override_config)
    assert settings is not None
    assert (c.data.train_batch_size, c.actor_rollout_ref.rollout.n) in {(256, 16), (128, 16), (64, 16), (64, 8)}
    assert c.data.train_batch_size % c.actor_rollout_ref.actor.ppo_mini_batch_size == 0
    assert c.algorithm.adv_estimator == "grpo"
    correction = c.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 5.0)
    assert settings.guidance.max_version_diff == 3
    assert c.trainer.v1.sampler.max_off_policy_threshold == settings.guidance.max_version_diff + 1
    assert settings.mode.forward.replay
    assert c.trainer.total_training_steps in (400, 50)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", *LARGE])
def test_every_line_with_a_value_says_what_it_is(name: str) -> None:
    lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    values = [line for line in lines if re.match(r"\s*[\w.]+:\s+[^#\s]", line)]
    assert values
    assert [line for line in values if "  # " not in line and " # " not in line] == []


def test_another_method_is_one_key(tmp_path: Path) -> None:
    for method in ("bf16", "naive", "qat", "qarl", "quads", "resq", "triage", "w4a16", "trace-all"):
        config = composed(LARGE[0], f"{KEY}.method={method}")
        settings = read_settings(config.actor_rollout_ref.model.override_config)
        assert settings is not None
        select_loss(config, settings.mode)


def test_the_band_is_set_on_the_command_line_as_every_key_is() -> None:
    def band(name: str, *overrides: str) -> float | None:
        settings = read_settings(composed(name, *overrides).actor_rollout_ref.model.override_config)
        assert settings is not None
        return settings.recipe(48).band

    for name, plus in (("cpu", "+"), (LARGE[0], "")):
        key = f"{plus}{KEY}.guidance.band"
        assert band(name) == band(name, f"{key}=null") == 0.06
        assert band(name, f"{key}=none") is None
        assert band(name, f"{key}=0.03") == 0.03
        assert band(name, f"{KEY}.method=trace-paper") is None
        with pytest.raises(TracefpError, match=r"guidance\.band must be greater than 0 and at most 1"):
            band(name, f"{key}=2")


def test_a_misspelt_setting_in_a_recipe_is_refused() -> None:
    config = composed("cpu", f"+{KEY}.guidance.lost_after=3")
    with pytest.raises(TracefpError, match=r"guidance\.lost_after in .*did you mean .*lost_after_steps"):
        read_settings(config.actor_rollout_ref.model.override_config)
