"""Each mode is what METHODS section 2 and the named settings of the design say."""

import math

import pytest

from tracefp4.config import ConfigError
from tracefp4.errors import TracefpError
from tracefp4.methods import Method, QuantConfig, get_method, list_methods
from tracefp4.methods.base import register
from tracefp4.nn import TrainerForward
from tracefp4.recipe import QuantRecipe

PLAIN, QAT = TrainerForward(), TrainerForward(weights=True, activations=True, kv=True)
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
    assert method.recipe(QuantConfig(), 5) == QuantRecipe(
        num_layers=5, weights=part, activations=part, kv=part, guided_layers=layers, bits=bits, rule=rule
    )


@pytest.mark.parametrize(("name", "bits"), [("trace", 1.03125), ("trace-paper", 1.25), ("trace-full", 4.25)])
def test_guided_modes_take_the_mx_width_of_the_same_record(name: str, bits: float) -> None:
    mx = QuantConfig(weights="mxfp4-rceil", activations="mxfp4-rceil", kv="mxfp4-rceil")
    assert get_method(name).recipe(mx, 4).bits == bits


def test_guided_modes_refuse_what_one_record_cannot_hold() -> None:
    with pytest.raises(TracefpError, match=r"quant.activations and quant.kv of one family, got mxfp4-even and nvfp4"):
        get_method("trace").recipe(QuantConfig(activations="mxfp4-even"), 4)
    with pytest.raises(TracefpError, match="has nothing to guide"):
        get_method("trace").recipe(QuantConfig(activations="none", kv="none"), 4)


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


@pytest.mark.parametrize(("name", "near"), [("tracee", "trace"), ("trace_all", "trace-all"), ("qad", "qat")])
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
