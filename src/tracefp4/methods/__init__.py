"""Every mode of METHODS section 2 that this version runs, one small file each."""

from tracefp4.methods import bf16, fp32, naive, qat, trace
from tracefp4.methods.base import Method, QuantConfig, get_method, list_methods

__all__ = ["Method", "QuantConfig", "bf16", "fp32", "get_method", "list_methods", "naive", "qat", "trace"]
