"""Benchmarks of the kernels: `tracefp4 bench {kernels, rollout, train}`."""
