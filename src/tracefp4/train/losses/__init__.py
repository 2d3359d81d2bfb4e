"""Policy losses, one file a method. Each takes token tensors [B, T - 1] and returns a sum over tokens."""

from tracefp4.train.losses.grpo import LossTerms, grpo_loss

__all__ = ["LossTerms", "grpo_loss"]
