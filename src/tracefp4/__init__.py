"""FP4 rollouts for LLM reinforcement learning, with the trainer rounding as the rollout did."""

__version__ = "0.1.0"
