"""H-Scale (arXiv 2608.28113): NVFP4 weights whose block scales are chosen on calibration data.

Of the E4M3 scales near a block's own one, the one that minimises ||(w - w_hat) sqrt(h)||^2, h the diagonal of X^T X:
the error of the layer's output where input channels are uncorrelated. The values remain plain NVFP4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.formats.e2m1 import pack_codes
from tracefp4.formats.nvfp4 import NvFp4
from tracefp4.formats.scales import E4M3_MAX_BYTE
from tracefp4.formats.spec import EncodeScale, FormatError, QuantizedBlocks, get_format

UP, DOWN = 6, 9
"""How many E4M3 codes above and below the own scale are tried."""


def quantize_hscale(
    w: Tensor, importance: Tensor, format_name: str = "nvfp4", encode_scale: EncodeScale = "row"
) -> QuantizedBlocks:
    """Quantizes weights at the best of UP + DOWN + 1 scales a block.

    Args:
        w: floating [..., I].
        importance: h, sums of squares of each input channel over calibration data; broadcastable to w, not negative.
        format_name: "nvfp4" or "nvfp4-exact".
        encode_scale: as `Format.quantize` takes it.

    Returns:
        QuantizedBlocks of that format. The own scale is kept where no other is strictly better, of two equally good
        ones the nearer to it; a block without importance is rounded as usual.

    Raises:
        FormatError: another format, or what `Format.quantize` raises.
    """
    fmt = get_format(format_name)
    if type(fmt) is not NvFp4:
        raise FormatError(f"H-Scale chooses E4M3 scales of plain NVFP4 blocks, not of {format_name!r}")
    own = fmt.quantize(w, encode_scale=encode_scale)
    w, S = w.float(), own.encode_scale
    h = importance.to(w).expand(w.shape)
    best_scales, best_codes = own.scales, own.unpacked_codes()
    best_error = _error(fmt, w, h, best_scales, best_codes, S)
    for offset in sorted(range(-DOWN, UP + 1), key=abs):
        scales = (own.scales.int() + offset).clamp(0, E4M3_MAX_BYTE).to(torch.uint8)
        codes = fmt.round_with_scales(w, scales, S)
        error = _error(fmt, w, h, scales, codes, S)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scales = torch.where(better, scales, best_scales)
        best_codes = torch.where(better.repeat_interleave(fmt.block_size, -1), codes, best_codes)
    return QuantizedBlocks(pack_codes(best_codes), best_scales, S, fmt.name, own.shape)


def _error(fmt: NvFp4, w: Tensor, h: Tensor, scales: Tensor, codes: Tensor, encode_scale: Tensor | None) -> Tensor:
    """f32 [..., I/B]: each block's weighted squared error."""
    blocks = QuantizedBlocks(pack_codes(codes), scales, encode_scale, fmt.name, tuple(w.shape))
    return ((w - fmt.dequantize(blocks)).square() * h).unflatten(-1, (-1, fmt.block_size)).sum(-1)
