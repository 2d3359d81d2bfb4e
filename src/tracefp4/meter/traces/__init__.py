"""Two log-probs per token from files: what they say about each other, and which fault their pattern is that of."""
