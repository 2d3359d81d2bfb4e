"""Weight-only quantization: activations stay in the compute dtype on both sides."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import TrainerForward

_FORMATS = {"activations": "none"}

W4A16 = register(
    Method(
        "w4a16",
        "weights (and KV) in FP4, trainer fake-quantizes weights",
        quantized=True,
        forward=TrainerForward(weights=True),
        formats=_FORMATS,
    )
)

W4A16_KV = register(
    Method(
        "w4a16-kv",
        "weights and KV in FP4, trainer fake-quantizes weights and KV",
        quantized=True,
        forward=TrainerForward(weights=True, kv=True),
        formats=_FORMATS,
    )
)
