"""Settings of all tests."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: with one thread each they do not wait for each other. Children inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Without a GPU, Triton's kernels run under its interpreter. It must know before its first import, which importing
    # transformers brings about, so this stands here and not beside the tests of the kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")
