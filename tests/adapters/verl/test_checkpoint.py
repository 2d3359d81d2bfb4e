"""What a checkpoint says of the run that goes on from it; runs without verl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracefp4.adapters.verl.checkpoint import NAME, check, write
from tracefp4.adapters.verl.settings import KEY, read_settings
from tracefp4.errors import TracefpError
from tracefp4.recipe import QuantRecipe


def recipe(method: str = "trace", band: float | str | None = None) -> QuantRecipe:
    settings = read_settings(
        {"model_config": {}, "tracefp4": {"method": method, "guidance": {"url": "g", "band": band}}}
    )
    assert settings is not None
    return settings.recipe(4)


@pytest.mark.parametrize("band", [None, 0.03, "none"])
def test_a_run_goes_on_under_its_own_band(tmp_path: Path, band: float | str | None) -> None:
    write(str(tmp_path), "trace", recipe(band=band), 7)
    said = check(str(tmp_path), "trace", recipe(band=band))
    assert said == f"policy version 7 goes on under method trace, recipe {recipe().hash}"


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [(None, "none", ("0.06", "none")), ("none", None, ("none", "0.06")), (0.03, 0.06, ("0.03", "0.06"))],
)
def test_another_band_is_refused_with_the_key(
    tmp_path: Path, before: float | str | None, now: float | str | None, said: tuple[str, str]
) -> None:
    write(str(tmp_path), "trace", recipe(band=before), 7)
    with pytest.raises(TracefpError) as error:
        check(str(tmp_path), "trace", recipe(band=now))
    assert f"with {KEY}.guidance.band at {said[0]}, and now it is {said[1]}" in str(error.value)
    assert f"resume with {KEY}.guidance.band={said[0]}" in str(error.value)


def test_a_checkpoint_that_does_not_name_its_band_goes_on_and_the_log_says_so(tmp_path: Path) -> None:
    for method, noted in (("trace", True), ("trace-paper", False), ("qat", False)):
        own = recipe(method)
        (tmp_path / NAME).write_text(json.dumps({"method": method, "recipe": own.hash, "version": 3}))
        said = check(str(tmp_path), method, own)
        assert said.startswith(f"policy version 3 goes on under method {method}, recipe {own.hash}")
        assert ("does not name the band it had, now it is 0.06" in said) == noted


def test_a_method_without_records_has_no_band(tmp_path: Path) -> None:
    write(str(tmp_path), "qat", recipe("qat", band=0.03), 1)
    assert "policy version 1 goes on" in check(str(tmp_path), "qat", recipe("qat"))


@pytest.mark.parametrize("band", ["wide", [1]])
def test_a_damaged_band_is_a_damaged_file(tmp_path: Path, band: object) -> None:
    held = {"method": "trace", "recipe": recipe().hash, "version": 1, "band": band}
    (tmp_path / NAME).write_text(json.dumps(held))
    with pytest.raises(TracefpError, match=r"tracefp4\.json is damaged"):
        check(str(tmp_path), "trace", recipe())
