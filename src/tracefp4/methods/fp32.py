"""Both paths in FP32 without quantization: the control that tells a rounding difference from a bug."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import TrainerForward

FP32 = register(
    Method("fp32", "FP32 rollout and trainer: the control", quantized=False, forward=TrainerForward(), dtype="float32")
)
