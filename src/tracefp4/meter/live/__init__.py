"""Trainer and rollout engine on the same tokens, one site and layer switched at a time."""
