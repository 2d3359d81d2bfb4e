"""BF16 training, quantized afterwards: what FP4 costs a policy that never met it. Evaluated in FP4."""

from tracefp4.methods.base import Method, register
from tracefp4.recipe import TrainerForward


def _ptq(name: str, description: str, formats: dict[str, str], calibrated: bool = False) -> Method:
    description = f"BF16 rollout and trainer, quantized afterwards: {description}"
    return register(
        Method(
            f"ptq:{name}",
            description,
            quantized=False,
            forward=TrainerForward(),
            deployed=formats,
            calibrated=calibrated,
        )
    )


PTQ_NVFP4 = _ptq("nvfp4", "NVFP4", {"weights": "nvfp4", "activations": "nvfp4", "kv": "nvfp4"})
PTQ_4OVER6 = _ptq("4over6", "4over6", {"weights": "nvfp4-4over6", "activations": "nvfp4-4over6", "kv": "nvfp4"})
PTQ_HSCALE = _ptq(
    "hscale",
    "NVFP4 with H-Scale weights",
    {"weights": "nvfp4", "activations": "nvfp4", "kv": "nvfp4"},
    calibrated=True,
)
