"""FP4 rollouts with guidance in verl (docs/verl.md). verl loads ``plugin``; this package itself imports nothing."""
