"""What `tracefp4.guidance` exports."""

from tracefp4.guidance.codec import DECODE_RULES, decode, encode, pack_rows
from tracefp4.guidance.schema import (
    FORMAT_VERSION,
    SUPPORTED_BITS,
    CompactGuidance,
    GuidanceError,
    GuidanceHeader,
    PlaneLayout,
    full_bits,
    plane_layout,
    row_bytes,
    site_bits,
)

__all__ = [
    "DECODE_RULES",
    "FORMAT_VERSION",
    "SUPPORTED_BITS",
    "CompactGuidance",
    "GuidanceError",
    "GuidanceHeader",
    "PlaneLayout",
    "decode",
    "encode",
    "full_bits",
    "pack_rows",
    "plane_layout",
    "row_bytes",
    "site_bits",
]
