"""Settings of all tests."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from report.browser import Page, browser

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: with one thread each they do not wait for each other. Children inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Without a GPU, Triton's kernels run under its interpreter. It must know before its first import, which importing
    # transformers brings about, so this stands here and not beside the tests of the kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts this in the background, or under nohup, leaves SIGINT or SIGHUP ignored. Children inherit that,
# and tests that send these signals would wait for ever.
if threading.current_thread() is threading.main_thread():
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A tab of a headless Chromium."""
    profile = tmp_path_factory.mktemp("profile")
    with browser(profile) as page:
        yield page
    shutil.rmtree(profile, ignore_errors=True)
