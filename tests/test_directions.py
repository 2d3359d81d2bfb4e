"""Imports point one way: formats -> kernels -> guidance -> nn -> {rollout, train} -> {adapters, cli}."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "tracefp4"

LEAVES = {"types", "config", "config_problems", "device", "errors", "files", "lazy", "signals", "terminal", "options"}
CORE = LEAVES | {"formats", "kernels", "recipe"}

ALLOWED: dict[str, set[str]] = {
    "__init__": set(),
    "types": LEAVES,
    "config": LEAVES,
    "config_problems": LEAVES,
    "device": LEAVES,
    "errors": LEAVES,
    "files": LEAVES,
    "lazy": set(),
    "signals": LEAVES,
    "options": LEAVES,
    "terminal": LEAVES,
    "saves": LEAVES,
    "formats": LEAVES,
    "kernels": LEAVES | {"formats"},
    "recipe": LEAVES | {"formats"},
    "guidance": CORE,
    "nn": CORE | {"guidance"},
    "rollout": CORE | {"guidance", "nn"},
    # tasks: the supervised warm start makes its own examples; align: the trainer logs the mismatch figures.
    "train": CORE | {"guidance", "nn", "tasks", "align"},
    "methods": LEAVES | {"recipe", "nn", "formats"},
    "tasks": LEAVES,
    "align": CORE | {"guidance"},
    "report": LEAVES,
    "assets": LEAVES | {"tasks"},
    "loop": CORE | {"guidance", "nn", "rollout", "train", "methods", "tasks", "align", "report", "assets", "saves"},
    "asynchronous": CORE | {"guidance", "loop", "report", "tasks", "train", "rollout", "saves", "align"},
    "bench": CORE | {"guidance", "nn", "rollout"},
    "compare": LEAVES | {"report"},
    "evaluate": CORE | {"guidance", "nn", "rollout", "methods", "tasks", "align", "report", "loop", "saves"},
    "meter": CORE | {"guidance", "nn", "rollout", "train", "methods", "tasks", "align", "report", "loop", "saves"},
    "gap": CORE | {"nn", "rollout", "tasks", "align", "report", "assets"},
    "reproduce": LEAVES
    | {"compare", "evaluate", "loop", "methods", "tasks", "rollout", "train", "align", "report", "saves"},
    "cli": LEAVES
    | {"loop", "asynchronous", "compare", "methods", "train", "report", "formats", "guidance", "recipe", "saves"}
    | {"guidance_cli", "evaluate", "bench", "meter", "gap", "reproduce"},
    "guidance_cli": LEAVES | {"guidance"},
    # Two paths inside another framework's processes; not the loop, which the framework has itself.
    "adapters": CORE | {"guidance", "nn", "rollout", "train", "methods", "align"},
    "__main__": {"cli"},
}
"""What each top-level module may import besides itself. `from tracefp4 import __version__` is free."""

ADAPTERS_ONLY = {"vllm", "sglang", "verl", "megatron", "trl", "ray"}


def top_modules() -> list[str]:
    """The packages and modules that exist so far."""
    folders = [path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    return sorted(folders + [path.stem for path in PACKAGE.glob("*.py")])


def files_of(module: str) -> list[Path]:
    path = PACKAGE / module
    return sorted(path.rglob("*.py")) if path.is_dir() else [PACKAGE / f"{module}.py"]


def imported_names(source: str, package: list[str]) -> set[str]:
    """Absolute dotted names of all imports, also inside functions and under TYPE_CHECKING.

    `package` is the dotted package the file lies in, for relative imports.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{prefix}.{alias.name}" for alias in node.names}
    return names


def imports_of(file: Path) -> set[str]:
    package = ["tracefp4", *file.relative_to(PACKAGE).parent.parts]
    return imported_names(file.read_text(encoding="utf-8"), package)


def test_every_module_has_a_rule() -> None:
    assert set(top_modules()) <= set(ALLOWED)


@pytest.mark.parametrize("module", top_modules())
def test_imports_point_one_way(module: str) -> None:
    existing = set(top_modules())
    wrong = [
        f"{file.relative_to(PACKAGE)} imports tracefp4.{target}"
        for file in files_of(module)
        for name in sorted(imports_of(file))
        if name.startswith("tracefp4.")
        for target in [name.split(".")[1]]
        if target in existing and target != module and target not in ALLOWED[module]
    ]
    assert wrong == []


def test_the_two_paths_never_meet() -> None:
    assert not ALLOWED["rollout"] & {"train"}
    assert not ALLOWED["train"] & {"rollout"}
    below = ("formats", "kernels", "guidance", "nn", "rollout", "train")
    assert not any(ALLOWED[module] & {"loop", "cli", "compare"} for module in below)


def test_nothing_imports_the_adapters() -> None:
    assert not any("adapters" in allowed for allowed in ALLOWED.values())


@pytest.mark.parametrize("module", top_modules())
def test_engines_are_imported_by_adapters_alone(module: str) -> None:
    if module != "adapters":
        roots = {name.split(".")[0] for file in files_of(module) for name in imports_of(file)}
        assert not roots & ADAPTERS_ONLY


def test_the_parser_sees_every_kind_of_import() -> None:
    source = """
import tracefp4.a as x
from tracefp4 import b
from tracefp4.c.d import e
from . import f
from ..g import h
if TYPE_CHECKING:
    from tracefp4.i import j
def late():
    import tracefp4.k
"""
    assert imported_names(source, ["tracefp4", "nn"]) == {
        "tracefp4.a",
        "tracefp4.b",
        "tracefp4.c.d.e",
        "tracefp4.nn.f",
        "tracefp4.g.h",
        "tracefp4.i.j",
        "tracefp4.k",
    }
