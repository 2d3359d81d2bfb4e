"""Kernels that may start before their predecessor has ended wait for it before anything else."""

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "src/tracefp4/kernels"
FUNCTIONS = [
    (path.relative_to(KERNELS).as_posix(), node)
    for path in sorted(KERNELS.rglob("triton*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and "PDL" in [a.arg for a in node.args.args] and node.name != "follow"
]


def test_a_decode_step_is_covered() -> None:
    names = {node.name for _, node in FUNCTIONS}
    step = {"_add_norm", "_norm_rotate", "_write_kv", "_attend", "_attend_evenly", "_combine", "_choose_experts"}
    assert step | {"_quantize_rows", "_route", "_operand_rows", "products_fp4", "_weighted_sum"} <= names


@pytest.mark.parametrize(("path", "node"), FUNCTIONS, ids=[f"{path}:{node.name}" for path, node in FUNCTIONS])
def test_the_wait_comes_first(path: str, node: ast.FunctionDef) -> None:
    """Before any load, and on every way out: the kernel after the next relies on this one having waited."""
    first = node.body[1] if ast.get_docstring(node) is not None else node.body[0]
    assert ast.unparse(first) == "follow(PDL)"


def test_launches_say_so() -> None:
    """Launch option and constant go together, and only where the switch is on."""
    pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
    from tracefp4.kernels import triton_math

    assert triton_math.following() == {"PDL": False}
    triton_math.use_dependent_launch(True)
    try:
        assert triton_math.following() == {"PDL": True, "launch_pdl": True}
    finally:
        triton_math.use_dependent_launch(False)
