"""Each mode is what docs/methods.md says of it."""

import math
from pathlib import Path

import pytest

from tracefp4.config import ConfigError
from tracefp4.errors import TracefpError
from tracefp4.loop import RunConfig
from tracefp4.methods import Method, MethodConfig, QuantConfig, get_method, list_methods, list_presets
from tracefp4.methods.base import register
from tracefp4.nn import TrainerForward
from tracefp4.recipe import Compensation, QuantRecipe, resolve_guided_layers
from tracefp4.train.losses import LOSSES

PLAIN, QAT = TrainerForward(), TrainerForward(weights=True, activations=True, kv=True)
WEIGHTS = TrainerForward(weights=True)
GUIDED = TrainerForward(weights=True, activations=True, kv=True, guided=True)

# name -> (rollout in FP4, trainer's forward, guided layers of 5, bits, rule)
MODES: dict[str, tuple[bool, TrainerForward, tuple[int, ...], float, str]] = {
    "fp32": (False, PLAIN, (), 1.125, "cell"),
    "bf16": (False, PLAIN, (), 1.125, "cell"),
    "naive": (True, PLAIN, (), 1.125, "cell"),
    "qat": (True, QAT, (), 1.125, "cell"),
    "trace": (True, GUIDED, (3, 4), 1.125, "cell"),
    "trace-all": (True, GUIDED, (0, 1, 2, 3, 4), 1.125, "cell"),
    "trace-paper": (True, GUIDED, (3, 4), 1.5, "bracket"),
    "trace-full": (True, GUIDED, (0, 1, 2, 3, 4), 4.5, "cell"),
    "qarl": (True, QAT, (), 1.125, "cell"),
    "quads": (True, WEIGHTS, (), 1.125, "cell"),
    "quads-kv": (True, TrainerForward(weights=True, kv=True), (), 1.125, "cell"),
    "resq": (True, QAT, (), 1.125, "cell"),
    "score_centering": (True, QAT, (), 1.125, "cell"),
    "triage": (True, QAT, (), 1.125, "cell"),
    "w4a16": (True, WEIGHTS, (), 1.125, "cell"),
    "w4a16-kv": (True, TrainerForward(weights=True, kv=True), (), 1.125, "cell"),
    "ptq:nvfp4": (False, PLAIN, (), 1.125, "cell"),
    "ptq:4over6": (False, PLAIN, (), 1.125, "cell"),
    "ptq:hscale": (False, PLAIN, (), 1.125, "cell"),
}

# What else sets a mode apart: (loss, compensation, activations of the rollout)
OTHERWISE = {
    "qarl": ("tbpo", None, "nvfp4"),
    "quads": ("grpo", Compensation("quads", "channels", 0.5), "nvfp4"),
    "quads-kv": ("grpo", Compensation("quads", "channels", 0.5), "nvfp4"),
    "resq": ("grpo", Compensation("resq", "channels", 0.5), "nvfp4"),
    "score_centering": ("score_centering", None, "nvfp4"),
    "triage": ("triage", None, "nvfp4"),
    "w4a16": ("grpo", None, None),
    "w4a16-kv": ("grpo", None, None),
}


def test_the_table_lists_every_mode() -> None:
    assert {m.name for m in list_methods()} == set(MODES)
    assert all(m.description for m in list_methods())


@pytest.mark.parametrize("name", MODES)
def test_mode(name: str) -> None:
    fp4, forward, layers, bits, rule = MODES[name]
    method = get_method(name)
    assert method.forward == forward
    assert forward.replay, "R3 runs in every mode"
    part = "nvfp4" if fp4 else None
    loss, compensation, activations = OTHERWISE.get(name, ("grpo", None, part))
    assert method.loss == loss
    assert method.recipe(QuantConfig(), 5) == QuantRecipe(
        num_layers=5,
        weights=part,
        activations=activations,
        kv=part,
        guided_layers=layers,
        bits=bits,
        rule=rule,
        band=0.06 if name in ("trace", "trace-all") else None,
        compensation=compensation,
    )


def test_every_loss_is_a_modes() -> None:
    assert {m.loss for m in list_methods()} == set(LOSSES)


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("ptq:nvfp4", ("nvfp4", "nvfp4", "nvfp4")),
        ("ptq:4over6", ("nvfp4-4over6", "nvfp4-4over6", "nvfp4")),
        ("ptq:hscale", ("nvfp4", "nvfp4", "nvfp4")),
        ("qat", ("nvfp4", "nvfp4", "nvfp4")),
        ("bf16", (None, None, None)),
    ],
)
def test_the_form_that_is_evaluated(name: str, formats: tuple[str | None, ...]) -> None:
    method = get_method(name)
    recipe = method.deployed_recipe(QuantConfig(), 3)
    assert (recipe.weights, recipe.activations, recipe.kv) == formats
    assert method.calibrated == (name == "ptq:hscale")
    if not name.startswith("ptq"):
        assert recipe == method.recipe(QuantConfig(), 3)


# -- formats behind an @ --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "formats", "bits"),
    [
        ("trace@mxfp4-w4a4", ("mxfp4-rceil", "mxfp4-rceil", "mxfp4-rceil"), 1.03125),
        ("trace@mxfp4-w4a8", ("mxfp4-rceil", "mxfp8-rceil", "mxfp4-rceil"), 1.03125),
        ("trace-paper@mxfp4-w4a8", ("mxfp4-rceil", "mxfp8-rceil", "mxfp4-rceil"), 1.25),
        ("trace-full@mxfp4-w4a4", ("mxfp4-rceil", "mxfp4-rceil", "mxfp4-rceil"), 4.25),
        ("trace-full@mxfp4-w4a8", ("mxfp4-rceil", "mxfp8-rceil", "mxfp4-rceil"), 8.25),
        ("w4a16@mxfp4-w4a8", ("mxfp4-rceil", None, "mxfp4-rceil"), 1.125),
        ("qat@nvfp4", ("nvfp4", "nvfp4", "nvfp4"), 1.125),
    ],
)
def test_any_quantized_mode_runs_in_other_formats(name: str, formats: tuple[str | None, ...], bits: float) -> None:
    method = get_method(name)
    base = get_method(name.partition("@")[0])
    assert method.name == name
    assert (method.forward, method.loss, method.guidance) == (base.forward, base.loss, base.guidance)
    recipe = method.recipe(QuantConfig(weights="nvfp4-exact"), 4)
    assert (recipe.weights, recipe.activations, recipe.kv) == formats
    assert recipe.bits == bits


def test_unknown_formats_and_modes_without_any_are_refused() -> None:
    assert list_presets() == ["nvfp4", "mxfp4-w4a4", "mxfp4-w4a8"]
    with pytest.raises(TracefpError, match="unknown formats 'mxfp4-w4a6' in the method"):
        get_method("qat@mxfp4-w4a6")
    with pytest.raises(TracefpError, match="method bf16 quantizes nothing"):
        get_method("bf16@mxfp4-w4a4")
    with pytest.raises(TracefpError, match="unknown method 'qatt'; did you mean qat"):
        get_method("qatt@mxfp4-w4a4")


def test_the_cache_holds_four_bits() -> None:
    with pytest.raises((ConfigError, ValueError), match="the KV cache holds four-bit formats, not mxfp8-rceil"):
        QuantConfig(kv="mxfp8-rceil")


# -- ablations ------------------------------------------------------------------------------------------------------


def test_settings_of_the_record() -> None:
    config = MethodConfig(layers="deeper-quarter", bits=1.0625, rule="bracket")
    recipe = get_method("trace-all").configured(config).recipe(QuantConfig(), 8)
    assert (recipe.guided_layers, recipe.bits, recipe.rule) == ((6, 7), 1.0625, "bracket")
    assert get_method("trace").configured(MethodConfig()) == get_method("trace")
    assert get_method("qat").configured(config) == get_method("qat"), "modes that record nothing ignore them"
    bands = {given: get_method("trace").configured(MethodConfig(band=given)) for given in (None, 0.2, "none")}
    assert [bands[given].recipe(QuantConfig(), 8).band for given in bands] == [0.06, 0.2, None]
    for bad in (0, 1.5, "some"):
        with pytest.raises((ConfigError, ValueError), match="band"):
            MethodConfig(band=bad)  # type: ignore[arg-type]
    with pytest.raises((ConfigError, ValueError), match=r"method.bits must be one of 4.5, 1.5, .* got 2"):
        MethodConfig(bits=2)


@pytest.mark.parametrize(
    ("bits", "mx4", "mx8"),
    [
        (4.5, 4.25, 8.25),
        (1.5, 1.25, 1.25),
        (1.125, 1.03125, 1.03125),
        (1.0625, 1.03125, 1.03125),
        (0.5, 0.25, 0.25),
        (0.125, 0.03125, 0.03125),
    ],
)
def test_every_width_has_an_mx_counterpart(bits: float, mx4: float, mx8: float) -> None:
    config = MethodConfig(bits=bits)
    for preset, want in (("nvfp4", bits), ("mxfp4-w4a4", mx4), ("mxfp4-w4a8", mx8)):
        recipe = get_method(f"trace@{preset}").configured(config).recipe(QuantConfig(), 2)
        assert recipe.bits == want


@pytest.mark.parametrize(
    ("layers", "of_24", "of_2"),
    [("all", 24, 2), ("deeper-half", 12, 1), ("deeper-quarter", 6, 1), ("deeper-eighth", 3, 1), ("none", 0, 0)],
)
def test_guided_layers(layers: str, of_24: int, of_2: int) -> None:
    assert resolve_guided_layers(layers, 24) == tuple(range(24 - of_24, 24))
    assert resolve_guided_layers(layers, 2) == tuple(range(2 - of_2, 2))


@pytest.mark.parametrize(("name", "bits"), [("trace", 1.03125), ("trace-paper", 1.25), ("trace-full", 4.25)])
def test_guided_modes_take_the_mx_width_of_the_same_record(name: str, bits: float) -> None:
    mx = QuantConfig(weights="mxfp4-rceil", activations="mxfp4-rceil", kv="mxfp4-rceil")
    assert get_method(name).recipe(mx, 4).bits == bits


def test_guided_modes_refuse_what_one_record_cannot_hold() -> None:
    with pytest.raises(TracefpError, match=r"quant.activations and quant.kv of one family, got mxfp4-even and nvfp4"):
        get_method("trace").recipe(QuantConfig(activations="mxfp4-even"), 4)
    with pytest.raises(TracefpError, match="has nothing to guide"):
        get_method("trace").recipe(QuantConfig(activations="none", kv="none"), 4)


@pytest.mark.parametrize("name", ["naive", "qat", "w4a16", "w4a16@nvfp4"])
def test_a_quantized_mode_refuses_to_quantize_nothing(name: str) -> None:
    quant = QuantConfig(weights="none", activations="none", kv="none")
    if "@" in name:  # the formats behind the @ replace those of [quant]
        assert get_method(name).recipe(quant, 4).quantized
        return
    with pytest.raises(TracefpError, match=f"method {name} has nothing to quantize: quant.weights"):
        get_method(name).recipe(quant, 4)


@pytest.mark.parametrize("name", ["naive", "qat", "trace-all"])
def test_formats_come_from_the_config(name: str) -> None:
    quant = QuantConfig(
        weights="nvfp4-exact", activations="none", kv="nvfp4-4over6", encode_scale="row", kv_encode_scale=3.0
    )
    recipe = get_method(name).recipe(quant, 4)
    assert (recipe.weights, recipe.activations, recipe.kv) == ("nvfp4-exact", None, "nvfp4-4over6")
    assert (recipe.encode_scale, recipe.kv_encode_scale) == ("row", 3.0)


def test_bf16_ignores_the_formats() -> None:
    bf16 = get_method("bf16")
    assert bf16.recipe(QuantConfig(weights="mxfp4-rceil"), 4).hash == bf16.recipe(QuantConfig(), 4).hash


@pytest.mark.parametrize(("name", "near"), [("tracee", "trace"), ("trace_all", "trace-all"), ("qatt", "qat")])
def test_unknown_name_gives_the_nearest(name: str, near: str) -> None:
    with pytest.raises(TracefpError, match=f"unknown method '{name}'; did you mean {near}"):
        get_method(name)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="method qat is registered twice"):
        register(Method("qat", "another", True, PLAIN))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf])
def test_scale_is_checked(scale: float) -> None:
    with pytest.raises((ConfigError, ValueError)):
        QuantConfig(kv_encode_scale=scale)


def test_docs_describe_every_mode_and_key() -> None:
    from tracefp4.methods import CompensationConfig
    from tracefp4.report import catalog
    from tracefp4.train.losses import ScoreCenteringConfig, TBPOConfig, TriageConfig
    from tracefp4.train.trainer import TrainConfig

    docs = Path(__file__).parents[2] / "docs"
    methods, recipes = (docs / "methods.md").read_text(), (docs / "recipes.md").read_text()
    for method in list_methods():
        assert f"`{method.name}`" in methods, method.name
        assert (method.name in catalog.NOT_QUANTIZED) == (not method.quantized), method.name
        assert not method.quantized or (method.name in catalog.NOT_GUIDED) == (method.guidance is None), method.name
        assert (method.name in catalog.NOT_ROUNDED) == (
            method.quantized and not (method.forward.activations or method.forward.kv)
        ), method.name
    for preset in list_presets():
        assert f"`{preset}`" in methods
    for config in (TBPOConfig, ScoreCenteringConfig, TriageConfig):
        for key in config.model_fields:
            assert f"{key}`" in methods or f"{key} =" in methods, key
    assert "`run.lag`" in recipes
    for config in (TrainConfig, MethodConfig, CompensationConfig):
        for key in config.model_fields:
            assert f".{key}`" in recipes or f".{key}.*`" in recipes or key == "compensation", key


@pytest.mark.parametrize(("name", "refused"), [("bf16", False), ("qat", False), ("trace", True)])
def test_only_a_mode_that_records_is_bound_by_the_age_of_records(name: str, refused: bool) -> None:
    run = {"method": {"name": name}, "run": {"lag": 4}}
    if refused:
        with pytest.raises(ValueError, match=r"run.lag 4 exceeds train.max_version_diff 3"):
            RunConfig.model_validate(run)
    else:
        assert RunConfig.model_validate(run).run.lag == 4
