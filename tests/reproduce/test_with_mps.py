"""benchmarks/with_mps.sh with a made-up service: what the command sees, its exit code and end, what is left."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "with_mps.sh"
SERVICE = """#!/bin/sh
[ "$1" = -d ] && echo started >> "$SAID" && exit 0
read -r word && echo "$word" >> "$SAID"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    service = tmp_path / "bin" / "nvidia-cuda-mps-control"
    service.parent.mkdir()
    service.write_text(SERVICE)
    service.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    path = f"{service.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "SAID": str(tmp_path / "said"), "TMPDIR": str(tmp_path / "tmp")}


@pytest.mark.parametrize(("client", "pipe"), [("true", True), ("false", False)])
def test_a_command_runs_under_the_service_or_without(
    environment: dict[str, str], tmp_path: Path, client: str, pipe: bool
) -> None:
    """client: stands in for the interpreter that tries the service."""
    command = [str(SCRIPT), "sh", "-c", 'echo "pipe:$CUDA_MPS_PIPE_DIRECTORY"; exit 7']
    done = subprocess.run(command, env={**environment, "PYTHON": client}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert (done.stdout.strip() != "pipe:") == pipe
    assert ("runs without" in done.stderr) == (not pipe)
    said = (tmp_path / "said").read_text().split()
    assert said[0] == "started"
    assert said[-1] == "quit"
    assert not list((tmp_path / "tmp").iterdir())


def test_a_signal_ends_the_command_first(environment: dict[str, str], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    inner = f'trap "echo saved; exit 5" TERM; touch {ready}; while :; do sleep 0.05; done'
    process = subprocess.Popen(
        [str(SCRIPT), "bash", "-c", inner], env={**environment, "PYTHON": "true"}, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out.strip()) == (5, "saved")
    assert (tmp_path / "said").read_text().split()[-1] == "quit"


def test_inside_a_service_the_command_joins_it(environment: dict[str, str], tmp_path: Path) -> None:
    inner = [str(SCRIPT), "sh", "-c", 'echo "$CUDA_MPS_PIPE_DIRECTORY"; exit 4']
    outer = [str(SCRIPT), "sh", "-c", 'echo "$CUDA_MPS_PIPE_DIRECTORY"; "$@"', "sh", *inner]
    done = subprocess.run(outer, env={**environment, "PYTHON": "true"}, capture_output=True, text=True, timeout=60)
    first, second = done.stdout.split()
    assert (done.returncode, first) == (4, second)
    assert (tmp_path / "said").read_text().split() == ["started", "quit"]


def test_without_the_service_the_command_runs_alone(tmp_path: Path) -> None:
    if Path("/usr/local/nvidia/bin/nvidia-cuda-mps-control").exists():
        pytest.skip("the service is installed here")
    done = subprocess.run(
        ["/bin/bash", str(SCRIPT), "/bin/sh", "-c", "exit 3"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert "is not installed; runs without" in done.stderr
