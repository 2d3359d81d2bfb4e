"""A store on disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tracefp4.guidance.disk import ShardStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "guidance"


@pytest.fixture
def store(folder: Path) -> Iterator[ShardStore]:
    with ShardStore(str(folder), commit_seconds=0.01, wait_seconds=0.0) as opened:
        yield opened
