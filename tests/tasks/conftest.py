"""What tests that run programs need."""

import os

import pytest

from tracefp4.tasks.sandbox import sandbox_support


@pytest.fixture
def isolated() -> None:
    """Skips where programs cannot be isolated; in CI as root they must be."""
    support = sandbox_support()
    if not support.full:
        message = f"programs cannot be isolated here, which lacks: {', '.join(support.missing)}"
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            pytest.fail(message)
        pytest.skip(message)
