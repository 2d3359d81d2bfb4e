"""Which commit is written where the code lies in no checkout of its own."""

import importlib
from pathlib import Path

import pytest

provenance = importlib.import_module("tracefp4.report.provenance")  # the package's name is the function's


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tree without its history: what a container image holds."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "tracefp4"\n')
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "src" / "tracefp4" / "report" / "provenance.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


@pytest.mark.parametrize("said", ["0123abc", None, ""])
def test_a_copy_without_history_says_what_the_environment_says(
    image: Path, monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    monkeypatch.delenv("TRACEFP4_COMMIT", raising=False)
    if said is not None:
        monkeypatch.setenv("TRACEFP4_COMMIT", said)
    assert provenance.commit() == (said or None)


def test_a_checkout_speaks_for_itself_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (Path(__file__).parents[2] / ".git").exists():
        pytest.skip("not a checkout")
    monkeypatch.delenv("TRACEFP4_COMMIT", raising=False)
    assert len((provenance.commit() or "").removesuffix("-dirty")) == 40
    monkeypatch.setenv("TRACEFP4_COMMIT", "0123abc")
    assert provenance.commit() == "0123abc"
