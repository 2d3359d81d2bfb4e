"""Benchmarks of the kernels: `python -m tracefp4.bench.kernels`."""
