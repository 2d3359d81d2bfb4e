"""Every mode of docs/methods.md, one small file each."""

from tracefp4.methods import (
    bf16,
    fp32,
    naive,
    ptq,
    qarl,
    qat,
    quads,
    resq,
    score_centering,
    trace,
    triage,
    w4a16,
)
from tracefp4.methods.base import (
    Band,
    CompensationConfig,
    Method,
    MethodConfig,
    QuantConfig,
    get_method,
    list_methods,
    list_presets,
)

__all__ = [
    "Band",
    "CompensationConfig",
    "Method",
    "MethodConfig",
    "QuantConfig",
    "bf16",
    "fp32",
    "get_method",
    "list_methods",
    "list_presets",
    "naive",
    "ptq",
    "qarl",
    "qat",
    "quads",
    "resq",
    "score_centering",
    "trace",
    "triage",
    "w4a16",
]
