"""Settings of all tests."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: with one thread each they do not wait for each other. Children inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
