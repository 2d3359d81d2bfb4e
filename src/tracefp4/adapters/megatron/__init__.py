"""The guided forward inside Megatron-core's GPTModel (docs/verl.md, section Megatron)."""
