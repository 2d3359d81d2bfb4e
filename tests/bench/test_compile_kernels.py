"""benchmarks/compile_kernels.py: real launchers, Triton's compiler, no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: its kernels are not compiled")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/compile_kernels.py"


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT / "src")} | more
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=SCRIPT.parent)


def test_compiles_and_counts_what_does_not_fit(tmp_path: Path) -> None:
    code = """
import sys, compile_kernels
sys.argv = ["compile_kernels", "--only", "router"]
first = compile_kernels.main()
compile_kernels.SHARED_LIMIT[90] = -1
print(first, compile_kernels.main())
"""
    done = run("-c", code, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("registers") == 4, done.stdout  # with and without dependent launch, twice
    assert "2 kernels, 0 failures" in done.stdout
    assert "2 kernels, 2 failures" in done.stdout
    assert "_choose_experts wants" in done.stdout
    assert done.stdout.endswith("0 1\n")


def test_products_wait_for_dots_that_read_registers(tmp_path: Path) -> None:
    """Two tiles of inputs: without `settled` the first one's last dot runs on while the second one is unpacked."""
    done = run(str(SCRIPT), "--only", "W4A4 31 rows of 256, row-pow2, None", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "products_fp4" in done.stdout
    assert "num_warps=4" in done.stdout


def test_refuses_what_it_cannot_compile_for() -> None:
    unknown = run(str(SCRIPT), "--target", "sm_42", TRITON_INTERPRET="1")
    assert unknown.returncode == 2
    assert "--target is one of sm_80" in unknown.stderr
    interpreted = run(str(SCRIPT), TRITON_INTERPRET="1")
    assert interpreted.returncode == 2
    assert "TRITON_INTERPRET" in interpreted.stderr
