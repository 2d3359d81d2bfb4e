"""The deployment check: two forms of a model on the same inquiries. See docs/gap.md."""
