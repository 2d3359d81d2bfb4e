"""What must answer at once imports no torch: reading a recipe, refusing one, listing methods, help."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tracefp4.formats import get_format, list_formats
from tracefp4.formats.names import ELEMENT_BITS

HEAVY = ("torch", "transformers", "tensorboard", "reasoning_gym", "pyarrow", "matplotlib", "math_verify", "jsonschema")
LAZY = ("formats", "guidance", "loop", "evaluate")

PROGRAM = """
import sys
from tracefp4.cli import main
for line in sys.argv[2:]:
    try:
        main(line.split())
    except SystemExit as end:
        print(line, "->", end.code)
print(*(name for name in sys.argv[1].split(",") if name in sys.modules), file=sys.stderr)
"""


def test_commands_that_do_no_work_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nlrr = 1e-4\n")
    (tmp_path / "good.toml").write_text('[method]\nname = "trace@mxfp4-w4a8"\n[quant]\nkv = "nvfp4"\n')
    lines = [
        "--version",
        "--help",
        "train --help",
        "methods",
        "train bad.toml --out o",
        "train good.toml run.steps=0 --out o",
        "train good.toml quant.kv=mxfp8-rceil --out o",
        "compare bad.toml --out o",
        "eval bad.toml --out o",
        "meter bad.toml --out o",
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(HEAVY), *lines], cwd=tmp_path, capture_output=True, text=True
    )
    codes = [line.rsplit(" -> ", 1)[1] for line in done.stdout.splitlines() if " -> " in line]
    assert codes == ["0"] * 4 + ["2"] * 6, done.stderr
    *errors, heavy = done.stderr.splitlines()
    assert errors == [
        "error: unknown key train.lrr in bad.toml; did you mean train.lr?",
        "error: run.steps must be at least 1, got 0 in the override 'run.steps=0'",
        "error: quant.kv: the KV cache holds four-bit formats, not mxfp8-rceil: set quant.kv to one, or to none "
        "(in the override 'quant.kv=mxfp8-rceil')",
        *["error: unknown key train.lrr in bad.toml; did you mean train.lr?"] * 3,
    ]
    assert heavy == ""


def test_names_are_those_of_the_registry() -> None:
    assert {name: get_format(name).element_bits for name in list_formats()} == ELEMENT_BITS


@pytest.mark.parametrize("package", LAZY)
def test_a_lazy_package_has_the_names_it_exports(package: str) -> None:
    module = importlib.import_module(f"tracefp4.{package}")
    assert module.__all__
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing
    with pytest.raises(AttributeError, match="__wrapped__"):
        _ = module.__wrapped__
