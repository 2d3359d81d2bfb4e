"""A rollout server in this process, for the tests that need verl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """Of the tiny model in mode trace-all, without weights; its store is at tmp_path / "g"."""
    from verl_server import make_server

    server = make_server(tmp_path)
    yield server
    server.host.close()
