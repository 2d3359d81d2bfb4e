"""benchmarks/mutations.toml against the sources and tests as they are: a mutation whose text is gone checks nothing."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from scripts import load_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "mutations.py"
ROWS = tomllib.loads(SCRIPT.with_suffix(".toml").read_text(encoding="utf-8"))["mutation"]
NAMES = [f"{row['event']}: {row['removes']}" for row in ROWS]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_a_mutation_applies_and_its_tests_are_there(row: dict, script: ModuleType, tmp_path: Path) -> None:
    mutation = script.Mutation(**row)
    source = ROOT / "src" / "tracefp4" / mutation.file
    copy = tmp_path / "tracefp4" / mutation.file
    copy.parent.mkdir(parents=True)
    copy.write_bytes(source.read_bytes())
    mutation.apply(tmp_path)
    mutated = ast.parse(copy.read_text(encoding="utf-8"))
    assert ast.dump(mutated) != ast.dump(ast.parse(source.read_text(encoding="utf-8")))
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        found = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")).body
        assert name in {f.name for f in found if isinstance(f, ast.FunctionDef)}, test


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("text", ["not in any file", "import"])
def test_a_text_that_is_not_there_once_is_refused(text: str, script: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "tracefp4" / "a.py"
    file.parent.mkdir()
    file.write_text("import this\nimport that\n")
    with pytest.raises(ValueError, match=r"its text is in a\.py"):
        script.Mutation("event", "removes", "a.py", text, "", ["a.py::test"]).apply(tmp_path)
    assert file.read_text() == "import this\nimport that\n"
