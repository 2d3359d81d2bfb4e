"""Rollout and trainer as separate processes, with bounded staleness."""
