"""What a verl user can get wrong, said in one sentence; runs without verl."""

from __future__ import annotations

from typing import Any

import pytest

from tracefp4.adapters.verl.sampling import RequestSeeds, to_sampling_params
from tracefp4.adapters.verl.settings import KEY, read_settings
from tracefp4.adapters.verl.versions import check_verl_version
from tracefp4.errors import TracefpError


@pytest.mark.parametrize("version", ["0.9.1", "0.9.2", "0.9.1+cpu"])
def test_the_supported_range(version: str) -> None:
    check_verl_version(version)


@pytest.mark.parametrize("version", ["0.9.0", "0.8.3", "0.10.0", "1.0.0", "0.9.2.dev0", "0.9.1rc1", "main"])
def test_another_verl_is_refused_by_name(version: str) -> None:
    with pytest.raises(TracefpError, match=rf"from 0\.9\.1 up to, not including, 0\.10\.0 .* verl {version} is inst"):
        check_verl_version(version)


def settings(**tracefp4: Any) -> Any:
    return read_settings({"model_config": {}, "tracefp4": tracefp4})


def test_no_settings_is_none() -> None:
    assert read_settings(None) is None
    assert read_settings({"attn_implementation": "eager"}) is None


def test_both_sides_derive_the_same_recipe() -> None:
    a, b = (settings(method="trace", guidance={"url": "g"}) for _ in range(2))
    assert a.recipe(4).hash == b.recipe(4).hash
    assert a.recipe(4).guided_layers == (2, 3)
    assert settings(method="bf16").recipe(4).hash != a.recipe(4).hash


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"method": "trase", "guidance": {"url": "g"}}, "unknown method 'trase'; did you mean trace"),
        ({"metod": "bf16"}, r"metod in .*override_config\.tracefp4; did you mean method"),
        ({"method": "bf16", "guidance": {"lost_after_step": 3}}, "lost_after_step.*lost_after_steps"),
        ({"method": "trace"}, "method trace needs .*guidance.url"),
    ],
)
def test_wrong_settings_name_the_key(data: dict[str, Any], words: str) -> None:
    with pytest.raises(TracefpError, match=words):
        settings(**data)


@pytest.mark.parametrize(
    ("method", "why"),
    [("score_centering", "weighs each token by the rollout's likeliest ones"), ("ptq:nvfp4", "after training")],
)
def test_what_verls_interfaces_do_not_carry_is_refused_by_name(method: str, why: str) -> None:
    with pytest.raises(TracefpError, match=rf"method {method} .*{why}.*; use one of .*bf16.*qarl.*trace.*triage"):
        settings(method=method)


def test_losses_take_the_settings_of_the_built_in_trainer() -> None:
    assert settings(method="qarl", tbpo={"eps_low": 0.01}).tbpo.eps_low == 0.01
    with pytest.raises(TracefpError, match=r"gate_segmen.*gate_segment"):
        settings(method="triage", triage={"gate_segmen": 8})
    with pytest.raises(TracefpError, match=r"^triage: severe_below must not lie above mild_below \(in "):
        settings(method="triage", triage={"severe_below": -0.1})


def test_probes_need_a_folder_that_both_sides_reach() -> None:
    with pytest.raises(TracefpError, match=r"probe\.every needs .*guidance\.url"):
        settings(method="qat", probe={"every": 1})
    assert settings(method="bf16", probe={"every": 1}).probe.every == 1


def with_band(method: str, **guidance: Any) -> Any:
    return settings(method=method, guidance={"url": "g", **guidance})


def test_the_band_of_older_records_is_the_methods_own_or_the_users() -> None:
    assert with_band("trace").recipe(4).band == with_band("trace", band=None).recipe(4).band == 0.06
    assert with_band("trace-paper").recipe(4).band is None
    assert with_band("trace", band="none").recipe(4).band is None
    for method in ("trace", "trace-all", "trace-paper", "trace@mxfp4-w4a4"):
        assert with_band(method, band=0.03).recipe(4).band == 0.03
        same = {with_band(method, **given).recipe(4).hash for given in ({}, {"band": 0.03}, {"band": "none"})}
        assert len(same) == 1, "replica and trainer make and read the same records with any band"
    for method in ("qat", "quads", "bf16"):  # they read none
        assert with_band(method, band=0.03).recipe(4) == with_band(method).recipe(4)


@pytest.mark.parametrize(
    ("band", "said"),
    [
        (0, "greater than 0 and at most 1 or 'none', got 0"),
        (1.5, "greater than 0 and at most 1 or 'none', got 1.5"),
        (-0.06, "greater than 0 and at most 1 or 'none', got -0.06"),
        ("nan", "a finite number or 'none', got \"nan\""),
        ("wide", "a number or 'none', got \"wide\""),
        (True, "a number, got true"),
        ([0.06], "a number or 'none', got [0.06]"),
    ],
)
def test_a_band_that_is_none_is_refused_in_one_sentence(band: Any, said: str) -> None:
    with pytest.raises(TracefpError) as error:
        with_band("trace", band=band)
    assert str(error.value) == f"guidance.band must be {said} in {KEY}"


def test_a_band_under_another_key_is_refused_with_the_right_one() -> None:
    with pytest.raises(TracefpError, match=r"^unknown key guidance\.bands in \S+; did you mean guidance\.band\?$"):
        with_band("trace", bands=0.06)
    with pytest.raises(TracefpError, match=r"^unknown key band in \S+; it exists as guidance\.band$"):
        settings(method="trace", guidance={"url": "g"}, band=0.06)


def test_true_is_no_number_in_any_setting_and_a_number_may_be_text() -> None:
    assert with_band("trace", keep_gb="2").guidance.keep_gb == 2  # what ${oc.env:...} gives
    with pytest.raises(TracefpError, match=r"guidance\.keep_gb must be a number, got true"):
        with_band("trace", keep_gb=True)


def test_the_compute_dtype_is_the_rollouts_unless_the_method_is_about_it() -> None:
    assert settings(method="bf16").dtype("bfloat16") == "bfloat16"
    assert settings(method="fp32").dtype("bfloat16") == "float32"
    with pytest.raises(TracefpError, match=r"rollout\.dtype must be bfloat16 or float32, got float16"):
        settings(method="bf16").dtype("float16")


def test_settings_that_verl_would_write_into_the_checkpoint_are_refused() -> None:
    with pytest.raises(TracefpError, match=r"override_config\.model_config beside it"):
        read_settings({"tracefp4": {"method": "bf16"}})


def params(**given: Any) -> Any:
    return to_sampling_params(given, prompt_tokens=10, max_tokens=20, max_model_len=40, stop=(1,), seed=7)


def test_sampling_parameters_as_verl_sends_them() -> None:
    p = params(temperature=0.7, top_p=1, top_k=-1, repetition_penalty=1.0, logprobs=True)
    assert (p.temperature, p.top_p, p.max_new_tokens, p.stop_token_ids, p.seed) == (0.7, 1.0, 20, (1,), 7)
    assert params(max_tokens=5).max_new_tokens == 5
    assert params(max_new_tokens=99).max_new_tokens == 30  # what is left of the model's length


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"top_k": 20}, "has no top_k; leave .*rollout.top_k at -1, got 20"),
        ({"repetition_penalty": 1.1}, "has no repetition_penalty"),
        ({"min_p": 0.1}, "'min_p' is not supported"),
    ],
)
def test_what_the_engine_does_not_have_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TracefpError, match=words):
        params(**given)


def test_a_prompt_that_fills_the_model_is_refused() -> None:
    with pytest.raises(TracefpError, match="a prompt of 40 tokens leaves no room in 40"):
        to_sampling_params({}, 40, 20, 40, (1,), 0)


def test_seeds_do_not_depend_on_arrival() -> None:
    a, b = RequestSeeds(0), RequestSeeds(0)
    first = {p: a.next(0, p) for p in [(1, 2), (3,)]}
    second = {p: b.next(0, p) for p in [(3,), (1, 2)]}
    assert first == second
    assert a.next(0, (3,)) != first[3,]  # another sample of the prompt
    assert a.next(1, (3,)) not in first.values()  # and another under new weights
    assert RequestSeeds(1).next(0, (3,)) != first[3,]
