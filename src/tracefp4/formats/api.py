"""What `tracefp4.formats` exports."""

from tracefp4.formats.e2m1 import (
    E2M1_VALUES,
    decode_e2m1,
    decode_packed,
    encode_e2m1,
    pack_codes,
    unpack_codes,
)
from tracefp4.formats.fouroversix import FourOverSix
from tracefp4.formats.mx import Mx
from tracefp4.formats.mxfp4 import MxFp4
from tracefp4.formats.mxfp8 import MxFp8
from tracefp4.formats.nvfp4 import NvFp4
from tracefp4.formats.scales import (
    decode_e4m3,
    decode_e8m0,
    e4m3_index,
    encode_e4m3,
    encode_e8m0,
)
from tracefp4.formats.spec import Format, FormatError, QuantizedBlocks, get_format, list_formats

__all__ = [
    "E2M1_VALUES",
    "Format",
    "FormatError",
    "FourOverSix",
    "Mx",
    "MxFp4",
    "MxFp8",
    "NvFp4",
    "QuantizedBlocks",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "decode_packed",
    "e4m3_index",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "get_format",
    "list_formats",
    "pack_codes",
    "unpack_codes",
]
