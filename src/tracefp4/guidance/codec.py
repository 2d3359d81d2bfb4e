"""Encoding the rollout's slots into compact guidance, and resolving it against the trainer's activations.

Along the signed grid of E2M1 (-6 -4 -3 -2 -1.5 -1 -.5 0 .5 1 ... 6) the mantissa bit alternates, so one bit
tells a slot from both of its neighbours; the lowest mantissa bit does so along the grid of E4M3 (MXFP8). The
scale of a block is named the same way: its lowest bits, resolved against the trainer's own unrounded scale.
Everything here is plain torch, vectorised and deterministic; it is the reference the kernels are compared with, bit for
bit.

Shapes: N rows (product of all axes but the last), K values per row, B values per block.
"""

import functools
import math
from typing import cast

import torch
from torch import Tensor

from tracefp4.formats import (
    Format,
    Mx,
    QuantizedBlocks,
    e4m3_index,
    encode_e8m0,
    get_format,
)
from tracefp4.formats.spec import EncodeScale
from tracefp4.guidance.schema import (
    CompactGuidance,
    GuidanceError,
    GuidanceHeader,
    pack_bits,
    plane_layout,
    unpack_bits,
)

DECODE_RULES = ("cell", "bracket")

_MAX_E4M3_CODE = 0x7E  # 448; 0x7F is NaN and is never produced
_MAX_E8M0_CODE = 0xFE  # 0xFF is NaN


@functools.cache
def _outward_from(fmt: Format, device: torch.device) -> Tensor:
    """Per magnitude index, the |z| from which the outward neighbour's rounding cell is the nearer one; f32 [n].

    It is the middle of the own cell. For E2M1 cells end at .25 .75 1.25 1.75 2.5 3.5 5, and cell 0 reaches from -.25 to
    .25. At the middle itself both neighbours are equally near, and the side of the own grid value on which z lies
    decides: outward where the middle lies beyond the value (2 and 4: 2.125, 4.25; in general a power of two, whose
    outward step is the larger), toward zero where it is the value itself (.5 1 1.5 3), so those thresholds are the next
    float up. 0 always goes outward, the largest value never (a comparison with NaN is false), nor does E4M3's NaN.
    """
    with torch.inference_mode(False):
        values = fmt.magnitudes(torch.device("cpu"))
        ends = (values[:-1] + values[1:]) / 2
        middles = torch.cat([torch.zeros(1), (ends[:-1] + ends[1:]) / 2, torch.full((1,), math.nan)])
        beyond = torch.nextafter(middles, torch.tensor(math.inf))
        outward = torch.where((middles == values) & (values > 0), beyond, middles)
        return torch.nn.functional.pad(outward, (0, _code_count(fmt) - len(values)), value=math.nan).to(device)


@functools.cache
def _magnitudes(fmt: Format, device: torch.device) -> Tensor:
    """f32 [n]: the value of each magnitude index, NaN for the code of NaN where there is one."""
    with torch.inference_mode(False):
        values = fmt.magnitudes(torch.device("cpu"))
        return torch.nn.functional.pad(values, (0, _code_count(fmt) - len(values)), value=math.nan).to(device)


def _code_count(fmt: Format) -> int:
    """Codes without their sign bit: 8 or 128."""
    return 1 << (fmt.element_bits - 1)


# --- encoding ------------------------------------------------------------


def encode(
    blocks: QuantizedBlocks, bits: float = 1.125, recipe_hash: str = "", valid: Tensor | None = None
) -> CompactGuidance:
    """Record the slots of quantized blocks.

    blocks       the rollout's QuantizedBlocks of shape [..., K]
    bits         stored bits per value, one of SUPPORTED_BITS for the format
    recipe_hash  hash of the rollout's recipe; `decode` refuses another one
    valid        bool of N elements (any shape of the leading axes); None means every row is usable

    Raises GuidanceError for an unsupported width or a mask of the wrong size.
    """
    header = GuidanceHeader(
        recipe_hash=recipe_hash,
        format=blocks.format,
        bits=bits,
        shape=tuple(blocks.shape),
        block_size=get_format(blocks.format).block_size,
    )
    scale = blocks.encode_scale
    if scale is not None and scale.ndim:
        scale = scale.expand(*header.shape[:-1], 1).reshape(header.rows, 1)
    payload = pack_rows(blocks, bits)
    if valid is None:
        valid = torch.ones(header.rows, dtype=torch.bool, device=payload.device)
    elif valid.numel() != header.rows:
        raise GuidanceError(f"valid has {valid.numel()} elements for {header.rows} rows")
    return CompactGuidance(header, payload, scale, valid.reshape(-1).to(torch.bool))


def pack_rows(blocks: QuantizedBlocks, bits: float) -> Tensor:
    """Payload uint8 [N, row_bytes] of quantized blocks: the recorder's hot path, about ten small operations.

    Layout: see `tracefp4.guidance.schema`. Raises GuidanceError for an unsupported width.
    """
    layout = plane_layout(blocks.format, bits)
    packed = blocks.codes.reshape(-1, blocks.codes.shape[-1])
    scales = blocks.scales.reshape(-1, blocks.scales.shape[-1])
    if blocks.element_bits == 4:
        planes = [_code_plane(packed, bit) for bit in range(layout.code_bits)]
    else:
        planes = [pack_bits((packed >> bit) & 1) for bit in range(layout.code_bits)]
    if layout.choice_bits:
        choice = cast(Tensor, get_format(blocks.format).choice(blocks)).reshape(scales.shape)
        # A scale of 448 may be a saturated 4-choice whose maximum shows as 6. Resolving it against the larger
        # unrounded scale finds 448 in either case.
        planes.append(pack_bits(choice | (scales == _MAX_E4M3_CODE).to(torch.uint8)))
    planes += [pack_bits((scales >> bit) & 1) for bit in range(layout.scale_bits)]
    return torch.cat(planes, dim=-1)


def _code_plane(packed: Tensor, bit: int) -> Tensor:
    """One bit of every code, packed: uint8 [N, K/2] (two codes a byte) -> uint8 [N, K/8].

    Works on 8 codes at once in a little-endian int32: keep the wanted bit of each nibble, close the gap
    inside each byte (two neighbouring bits), then gather the four pairs with one multiplication; its cross
    terms land outside bits 18..25 and carry nothing into them.
    """
    packed = packed.contiguous()
    if packed.storage_offset() % 4:
        packed = packed.clone()
    nibbles = (packed.view(torch.int32) >> bit) & 0x11111111
    pairs = (nibbles | (nibbles >> 3)) & 0x03030303
    gathered = pairs * ((1 << 18) | (1 << 12) | (1 << 6) | 1)
    return ((gathered >> 18) & 0xFF).to(torch.uint8)


# --- decoding ------------------------------------------------------------


def decode(
    guidance: CompactGuidance,
    x_train: Tensor,
    rule: str = "cell",
    recipe_hash: str | None = None,
    own_encode_scale: EncodeScale = "row",
    band: float | None = None,
) -> tuple[QuantizedBlocks, Tensor]:
    """The slots the rollout chose, as far as the recorded bits and the trainer's activations tell.

    guidance          record of N rows
    x_train           the trainer's activations, of exactly the record's shape [..., K]; any float dtype
    rule              "cell" or "bracket" (see `decode_codes`)
    recipe_hash       of the trainer's recipe; None skips the comparison
    own_encode_scale  encode scale of rows without a valid record, which are rounded to nearest: what
                      `Format.quantize` takes, or a float; ignored by MX formats
    band              in rows that the record calls stale a recorded slot counts only where x lies within so much of
                      the border to it, in distances of the two slots; None: everywhere (see `decode_codes`)

    Returns (QuantizedBlocks of x_train's shape, guided bool [N]). The encode scale is the rollout's, [] or
    [..., 1]; rows that are not guided carry their own.
    Raises GuidanceError for another recipe, another shape, an unknown rule or a band that is not positive.
    """
    header = guidance.header
    check_request(guidance, x_train, rule, recipe_hash, band)
    fmt = get_format(header.format)
    if guidance.payload.device != x_train.device:
        guidance = guidance.to(x_train.device)
    x = x_train.detach().reshape(header.rows, header.k)
    S = guidance.encode_scale
    bad = torch.nonzero(~guidance.valid).flatten()
    own = None
    if bad.numel():
        S, own = _own_rows(fmt, x_train.detach(), S, bad, own_encode_scale)
    code_bits, choice, scale_bits = unpack_rows(guidance)
    scales = decode_scales(fmt, x, S, scale_bits, header.layout.scale_bits, choice)
    if header.layout.code_bits:
        full = header.layout.code_bits == fmt.element_bits
        in_band = None if guidance.stale is None else band
        codes = decode_codes(fmt, x, scales, S, code_bits, full, rule, in_band, guidance.stale)
    else:
        codes = fmt.round_with_scales(x, scales, S)
    packed = fmt.pack(codes)
    if own is not None:
        packed[bad], scales[bad] = own.codes, own.scales
    lead = header.shape[:-1]
    blocks = QuantizedBlocks(
        codes=packed.reshape(*lead, packed.shape[-1]),
        scales=scales.reshape(*lead, scales.shape[-1]),
        encode_scale=S if S is None or S.ndim == 0 else S.reshape(*lead, 1),
        format=header.format,
        shape=header.shape,
    )
    return blocks, guidance.valid


def check_request(
    guidance: CompactGuidance, x: Tensor, rule: str, recipe_hash: str | None, band: float | None = None
) -> None:
    """What `decode` refuses. Raises GuidanceError."""
    header = guidance.header
    if rule not in DECODE_RULES:
        raise GuidanceError(f"unknown decoding rule {rule!r}; valid rules: {', '.join(DECODE_RULES)}")
    if band is not None and not band > 0:
        raise GuidanceError(f"a band must be positive, got {band}: give None to follow every record")
    if recipe_hash is not None and recipe_hash != header.recipe_hash:
        raise GuidanceError(
            f"guidance was recorded under recipe {header.recipe_hash!r}, the trainer holds {recipe_hash!r}"
        )
    if tuple(x.shape) != header.shape:
        raise GuidanceError(f"guidance is of shape {list(header.shape)}, the activations are {list(x.shape)}")


def _own_rows(
    fmt: Format, x_train: Tensor, S: Tensor | None, bad: Tensor, own_encode_scale: EncodeScale
) -> tuple[Tensor | None, QuantizedBlocks]:
    """Round the rows `bad` (int64) to nearest at the trainer's own encode scale.

    Returns the encode scale of all rows (the recorded one with those rows replaced) and the blocks of those
    rows.
    """
    x = x_train.reshape(-1, x_train.shape[-1])
    if S is None:
        return None, fmt.quantize(x[bad], encode_scale=None)
    # Resolved over all rows: "tensor" is a maximum over them, and a given tensor has their shape.
    own_S = cast(Tensor, fmt.resolve_encode_scale(x_train, own_encode_scale))
    own_S = own_S.to(x.device).expand(*x_train.shape[:-1], 1).reshape(-1, 1)[bad]
    S = S.expand(x.shape[0], 1).clone()
    S[bad] = own_S
    return S, fmt.quantize(x[bad], encode_scale=own_S)


def unpack_rows(guidance: CompactGuidance) -> tuple[Tensor, Tensor | None, Tensor]:
    """Split a payload into (code bits, choice, scale bits), each as integers.

    Returns uint8 [N, K] with the recorded low bits of each code (none, 1 or all), uint8 [N, K/B] with 4over6's
    choice or None, and uint8 [N, K/B] with the recorded low bits of each scale byte.
    """
    header, layout = guidance.header, guidance.header.layout
    blocks = header.k // header.block_size
    code_plane, block_plane = layout.plane_bytes(header.k, header.block_size)
    at = 0

    def take(count: int, width: int, n: int) -> Tensor:
        nonlocal at
        total = torch.zeros(header.rows, n, dtype=torch.uint8, device=guidance.payload.device)
        for bit in range(count):
            total |= unpack_bits(guidance.payload[:, at : at + width], n) << bit
            at += width
        return total

    codes = take(layout.code_bits, code_plane, header.k)
    choice = take(1, block_plane, blocks) if layout.choice_bits else None
    return codes, choice, take(layout.scale_bits, block_plane, blocks)


def decode_scales(
    fmt: Format, x: Tensor, S: Tensor | None, low_bits: Tensor, width: int, choice: Tensor | None = None
) -> Tensor:
    """Scale bytes uint8 [N, K/B] from their recorded lowest `width` bits, `low_bits` uint8 [N, K/B].

    8 bits are the byte itself. Fewer are resolved against the block amax of the trainer's x [N, K].
    E4M3: among the codes 0..0x7E with those low bits, the one nearest to the unrounded scale, measured in
    code index (`e4m3_index`); of two equally near the lower. The unrounded scale uses the rollout's encode
    scale S and, for 4over6, the recorded choice (1: the maximum is mapped to 4). E8M0: see `_nearest_e8m0`.
    """
    if width == 8:
        return low_bits.clone()
    amax = fmt.block_amax(x)
    if isinstance(fmt, Mx):
        return _nearest_e8m0(fmt, amax, low_bits)
    index = e4m3_index(fmt.unrounded_scale(amax, S, choice)).nan_to_num(0.0)
    step = 1 << width
    low = low_bits.to(torch.float32)
    below = low + step * torch.floor((index - low) / step)
    above = below + step
    take_above = (below < 0) | (((above - index) < (index - below)) & (above <= _MAX_E4M3_CODE))
    nearest = torch.where(take_above, above, below)
    # index <= 0x7E, so only 0x7F itself (all low bits set, index right at the top) can still lie outside.
    return torch.where(nearest > _MAX_E4M3_CODE, nearest - step, nearest).to(torch.uint8)


def _nearest_e8m0(fmt: Mx, amax: Tensor, low_bits: Tensor) -> Tensor:
    """E8M0 bytes [N, K/B] of the recorded parity: the own one, or the neighbour whose cell is nearer to amax.

    A byte's rounding cell is one octave of amax; "nearer" is the half of that octave, in log2, in which amax
    lies. The octave begins at a power of two (floor, ceil), at 1.75 times one (even; 1.9375 for E4M3 elements) or at
    the largest element times one (rceil); ceil and rceil include its upper end instead of its lower. Only significands
    are compared, so nothing depends on a rounded log2. No amax lies exactly in the middle, which is irrational.
    """
    own, mode = encode_e8m0(amax, fmt.mode, fmt.element_range), fmt.mode
    if mode == "rceil":
        amax = amax * fmt.element_range.reciprocal_max
    significand = torch.frexp(amax).mantissa * 2  # [1, 2)
    half = math.sqrt(2.0)
    if mode == "even":
        begin = 2 - 2.0 ** -(fmt.element_range.mantissa_bits + 1)
        upward = (significand > begin / 2 * half) & (significand < begin)
    elif mode == "floor":
        upward = significand > half
    else:
        upward = (significand > half) | (significand == 1.0)
    upward = ((own == 0) | upward) & (own < _MAX_E8M0_CODE)
    neighbour = torch.where(upward, own + 1, own - 1)
    return torch.where((own & 1) == low_bits, own, neighbour)


def decode_codes(
    fmt: Format,
    x: Tensor,
    scales: Tensor,
    S: Tensor | None,
    bits: Tensor,
    full: bool,
    rule: str,
    band: float | None = None,
    stale: Tensor | None = None,
) -> Tensor:
    """Codes uint8 [N, K] from the recorded bits uint8 [N, K] (mantissa bits; whole codes when `full`).

    z = x times the format's multiplier at `scales`; own = what the format itself rounds z to.

    "cell": the own code where its mantissa bit fits, else the neighbouring slot whose rounding cell is
    nearer to z (ties: `_outward_from`); whole codes are returned as they are.
    "bracket" (the paper's): of the two grid values around min(|z|, 6) - the largest one not above it and the
    next one; at 6 those are 4 and 6 - the one with the recorded mantissa bit; with whole codes the one
    nearest to the rollout's value. With E4M3 elements 448 stands for 6.

    Beyond 6 a 0 bit therefore means 4. Signs, that of a chosen zero included, are those of z. Blocks whose
    scale byte is an E4M3 zero have the value 0 whatever the code: they get the format's own code (or the
    recorded whole code under "cell"). z = NaN counts as the format's own code of NaN and never raises.

    band: the own code stands unless the chosen one is the next slot and z lies within `band` times the distance of the
    two grid values of their middle. Two copies of one activation differ by far less than a slot, so what a narrow band
    gives up is what has moved since: the trainer's weights are newer than the rollout's (docs/decisions/0008).
    stale: bool [N], the rows that have it; None: all.
    """
    if full and rule == "cell" and band is None:
        return bits
    own = fmt.round_with_scales(x, scales, S)
    sign_bit = _code_count(fmt)
    if full and rule == "cell":
        return _within_band(fmt, fmt.scaled(x, scales, S), own, bits, cast(float, band), stale)
    magnitude, sign = own & (sign_bit - 1), own & sign_bit
    z = fmt.scaled(x, scales, S).abs()
    if rule == "cell":
        outward = z >= _outward_from(fmt, z.device)[magnitude.to(torch.int32)]
        neighbour = torch.where(outward, magnitude + 1, magnitude - 1)
        chosen = torch.where((magnitude & 1) == bits, magnitude, neighbour)
    else:
        below_own = ~(z >= _magnitudes(fmt, z.device)[magnitude.to(torch.int32)])  # true for NaN
        largest = len(fmt.magnitudes(torch.device("cpu"))) - 1
        lower = torch.where(below_own, magnitude - 1, magnitude).clamp_(max=largest - 1)
        if full:
            # magnitude index of the rollout's code as seen in the direction of z's sign
            rollout = (bits & (sign_bit - 1)).to(torch.int8)
            rollout = torch.where((bits & sign_bit) == sign, rollout, -rollout)
            chosen = lower + (rollout > lower.to(torch.int8)).to(torch.uint8)
        else:
            chosen = torch.where((lower & 1) == bits, lower, lower + 1)
    if band is not None:
        chosen = _within_band(fmt, z, magnitude, chosen, band, stale)
    codes = chosen | sign
    if fmt.scale_kind == "e4m3":
        empty = (scales == 0).repeat_interleave(fmt.block_size, dim=-1)
        codes = torch.where(empty, own, codes)
    return codes


def _within_band(fmt: Format, z: Tensor, own: Tensor, chosen: Tensor, band: float, stale: Tensor | None) -> Tensor:
    """`chosen` where it is the slot next to `own` or `own` itself and z is near their border, else `own`; uint8 codes.
    `chosen` everywhere in rows that are not stale.

    A zero has one slot, so codes of another sign are next to each other only across it. NaN lies near every border.
    """
    a, b = (_slots(fmt, codes) for codes in (own, chosen))
    values = _magnitudes(fmt, z.device)
    va, vb = (torch.copysign(values[n.abs().long()], n.float()) for n in (a, b))
    far = (z - (va + vb) / 2).abs() > band * (va - vb).abs()
    given_up = (a != b) & (far | ((a - b).abs() > 1))
    if stale is not None:
        given_up &= stale[:, None]
    return torch.where(given_up, own, chosen)


def _slots(fmt: Format, codes: Tensor) -> Tensor:
    """Signed places int16 of codes along the grid; both zeros are 0."""
    magnitude = (codes & (_code_count(fmt) - 1)).short()
    return torch.where((codes & _code_count(fmt)) != 0, -magnitude, magnitude)
