"""benchmarks/h200_experts_parts.py: its variants are changes of the sources as they are."""

import ast
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scripts import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "benchmarks" / "h200_experts_parts.py")


def test_every_variant_is_a_source_of_its_own(script: ModuleType, tmp_path: Path) -> None:
    seen = set()
    for name, edits in script.VARIANTS.items():
        path = tmp_path / name / script.PRODUCTS
        path.parent.mkdir(parents=True)
        shutil.copy(ROOT / "src" / script.PRODUCTS, path)
        script.write_variant(tmp_path / name, edits)
        seen.add(ast.dump(ast.parse(path.read_text(encoding="utf-8"))))
    assert len(seen) == len(script.VARIANTS)


def test_a_change_of_what_is_no_longer_there_is_refused(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / script.PRODUCTS
    path.parent.mkdir(parents=True)
    path.write_text("def products_fp4(): ...\n")
    with pytest.raises(ValueError, match="no longer has"):
        script.write_variant(tmp_path, script.TWO_TILES)
    assert path.read_text() == "def products_fp4(): ...\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["h200_experts_parts.py", "--out", str(tmp_path / "out")])
    assert script.main() == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
