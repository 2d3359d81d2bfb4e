"""Config, extraction, and the kinds exact and numeric."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.config import ConfigError, StrictModel, load_config
from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks import CheckConfig, make_check
from tracefp4.tasks.checks.config import KEYS
from tracefp4.tasks.checks.extract import boxed, extract
from tracefp4.tasks.checks.numeric import last_number


class Recipe(StrictModel):
    check: CheckConfig = CheckConfig()


def load(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text("[check]\n" + text)
    return load_config(path, [], Recipe).check


def score(answer, response, **config):
    with make_check(CheckConfig(**config)) as check:
        prompt = Prompt("p", "", answer)
        check.validate([prompt])
        return check.score_batch([prompt], [response])[0]


# Config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "maths"', "check.kind must be one of .*did you mean math"),
        ("time_out = 3", "unknown key check.time_out .*did you mean check.timeout"),
        ('kind = "exact"\npattern = "a"', 'pattern does nothing with kind = "exact"; it belongs to kind = "regex"'),
        ('kind = "exact"\nworkers = 2', "workers does nothing with"),
        ('kind = "python"', 'needs the key function, e.g. function = "rewards.py:score"'),
        ('kind = "python"\nfunction = "rewards.py"', "must be written as path.py:function"),
        ('kind = "python"\nfunction = "a:b:c"', "must be written as path.py:function"),
        ("timeout = 0", "check.timeout must be greater than 0"),
        ('kind = "program"\nisolation = "none"', "check.isolation must be one of"),
        ('kind = "program"\nprocesses = 1', "check.processes must be at least 4"),
        ('kind = "numeric"\nrel_tol = inf', "check.rel_tol"),
    ],
)
def test_config_refuses_in_one_sentence(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_config_reads_every_kind(tmp_path):
    for kind in ("math", "exact", "numeric", "regex", "program"):
        assert load(tmp_path, f'kind = "{kind}"').kind == kind
    config = load(tmp_path, 'kind = "python"\nfunction = "rewards.py:score"\ntimeout = 2')
    assert (config.function, config.seconds) == ("rewards.py:score", 2.0)


def test_a_resolved_config_is_read_again():
    for kind in ("math", "exact", "numeric", "regex", "program"):
        config = CheckConfig(kind=kind)
        assert CheckConfig(**config.model_dump(mode="json")) == config


def test_every_key_has_kinds():
    assert set(KEYS) | {"kind"} == set(CheckConfig.model_fields)


# Extraction


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{3}", "3"),
        (r"a \boxed{1} b \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed 3$", "3"),
        (r"\boxed{3", None),
        (r"\boxed", None),
        (r"\boxed{}", ""),
        ("3", None),
        ("\\boxed{\\", None),
    ],
)
def test_boxed(text, expected):
    assert boxed(text) == expected


@pytest.mark.parametrize(
    ("where", "text", "expected"),
    [
        ("whole", "a\nb", "a\nb"),
        ("last_line", "a\nb \n\n", "b"),
        ("last_line", "  \n", None),
        ("marker", "#### 1\nx\n#### 2\nmore", "2"),
        ("marker", "1", None),
        ("marker", "1 ####", ""),
        ("answer_tag", "<answer>1</answer> <ANSWER> 2\n</ANSWER>", "2"),
        ("answer_tag", "<answer>1</answer><answer>2", None),
        ("answer_tag", "2", None),
    ],
)
def test_extract(where, text, expected):
    assert extract(text, where, "####") == expected


# Exact


@pytest.mark.parametrize(
    ("response", "config", "expected"),
    [
        ("thinking\n#### Paris", {}, 1),
        ("#### Rome\nParis", {}, 0),
        ("thinking\n Paris  ", {}, 1),
        ("Paris\nthinking", {}, 0),
        ("paris", {}, 0),
        ("PARIS", {"casefold": True}, 1),
        ("Paris.", {}, 0),
        ("'Paris'.", {"strip_punctuation": True}, 1),
        ("Answer: Paris", {"marker": "Answer:"}, 1),
        ("<answer>Paris</answer>", {"extract": "answer_tag"}, 1),
        ("Paris", {"extract": "answer_tag"}, 0),
        ("Paris", {"extract": "marker"}, 0),
        ("x\nParis", {"extract": "whole"}, 0),
        ("\\boxed{Paris}", {"extract": "boxed"}, 1),
        ("", {}, 0),
    ],
)
def test_exact(response, config, expected):
    assert score("Paris", response, kind="exact", **config) == expected


def test_exact_collapses_white_space_and_unicode_forms():
    assert score("New  York", "####  New\tYork ", kind="exact") == 1
    assert score("caf\u00e9", "cafe\u0301", kind="exact") == 1


def test_exact_refuses_an_empty_answer():
    with pytest.raises(TracefpError, match=r"problem p, '\?', is empty after normalization"):
        score("?", "x", kind="exact", strip_punctuation=True)


# Numeric


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$1,234.50", "1234.5"), ("1e3", "1000"), ("1.5E-2", ".015"), ("3/4", "3/4"), ("3 / 4", "3/4"),
        ("-$5", "-5"), ("$-5", "-5"), ("\u22124", "-4"), ("+2", "2"), (".5", ".5"), ("x=5.", "5"), ("5-3", "3"),
        ("7km", "7"), ("12,345,678", "12345678"), ("1,23", "23"), (r"\frac{3}{4}", "3/4"), (r"-\dfrac{1}{2}", "-1/2"),
        ("50%", "50"), ("v2", None), ("nan", None), ("inf", None), ("-infinity", None), ("1/0", None), ("", None),
        ("1e999999999", None), ("9" * 5000, None), ("7 apples and 9 pears", "9"), (r"\$3", "3"), ("\u00bd", None),
    ],
)  # fmt: skip
def test_last_number(text, expected):
    assert last_number(text) == (None if expected is None else Fraction(expected))


def test_percent_is_a_choice():
    assert last_number("50%", percent=True) == Fraction(1, 2)
    assert last_number(r"12.5\%", percent=True) == Fraction(1, 8)
    assert score("0.5", "#### 50%", kind="numeric", percent=True) == 1
    assert score("50", "#### 50%", kind="numeric") == 1


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_read_back(value):
    assert last_number(f"the answer is {value}.") == value


@given(st.integers(-(10**30), 10**30))
def test_thousands_separators_are_read_back(value):
    assert last_number(f"{value:,}") == value


@pytest.mark.parametrize(
    ("response", "config", "expected"),
    [
        ("so it is 18 dollars", {}, 1),
        ("18 of 20", {}, 0),
        (r"\boxed{18} out of 20", {}, 1),
        ("#### 18\nthat is 2 * 9", {}, 1),
        ("18.01", {}, 0),
        ("18.01", {"abs_tol": 0.02}, 1),
        ("18.01", {"rel_tol": 0.001}, 1),
        ("18.1", {"rel_tol": 0.001}, 0),
        ("nan", {"abs_tol": 1e300}, 0),
        ("#### inf", {"abs_tol": 1e300}, 0),
        ("18", {"extract": "boxed"}, 0),
        ("no number", {}, 0),
        ("\x00\ud800", {}, 0),
    ],
)
def test_numeric(response, config, expected):
    assert score("18", response, kind="numeric", **config) == expected


def test_numeric_tells_large_integers_apart():
    assert score(str(10**40), str(10**40 + 1), kind="numeric", rel_tol=0) == 0
    assert score(f"#### {10**40:,}", str(10**40), kind="numeric", rel_tol=0) == 1


def test_numeric_refuses_an_answer_without_a_number():
    with pytest.raises(TracefpError, match="answer of problem p, 'none', holds no number"):
        score("none", "1", kind="numeric")


def test_no_response_makes_the_search_slow():
    start = time.monotonic()
    for text in ("1,111" * 20000, "9" * 100000, "1," * 50000, "$ " * 50000, "1/" * 50000, "1 " * 50000):
        last_number(text)
        boxed("\\boxed{" * 15000)
        extract("<answer>" * 12000, "answer_tag", "####")
    assert time.monotonic() - start < 10


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=80))
def test_rules_never_raise_on_a_response(text):
    for kind in ("exact", "numeric"):
        assert score("1", text, kind=kind) in (0.0, 1.0)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="zip"):
        make_check(CheckConfig(kind="exact")).score_batch([], ["x"])
