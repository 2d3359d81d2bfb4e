"""QuantRecipe: the numeric contract that rollout and trainer share.

Both paths hold the same recipe; its hash is in every record, checkpoint and run header, and a mismatch is
refused by name. The recipe says what the *rollout* does; how much of it the trainer's forward mirrors is the
method's choice (``tracefp4.methods``).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tracefp4 import formats
from tracefp4.errors import TracefpError
from tracefp4.formats.names import element_bits

if TYPE_CHECKING:
    from torch import Tensor

    from tracefp4.formats import QuantizedBlocks

ENCODE_SCALES = ("row", "row-pow2")
GUIDED_LAYERS = ("none", "deeper-eighth", "deeper-quarter", "deeper-half", "all")
RULES = ("cell", "bracket")
COMPENSATIONS = ("quads", "resq")
SELECTIONS = ("channels", "row", "2:4")


@dataclass(frozen=True)
class Compensation:
    """A second product that gives back part of what the rollout's activations lost in rounding.

    rule: "quads", Q(R_C) Q(W)^T, or "resq", S(Q(R)) Q(W)^T; R = X - Q(X), Q the activations' format. select: what C
    or S keeps: "channels", the share of input channels whose residual has the largest L2 norm over the rows of a step;
    "row", the same for each row by itself; "2:4", the two largest of every four channels of a row. share: in (0, 1].
    """

    rule: str
    select: str = "channels"
    share: float = 0.5

    def __post_init__(self) -> None:
        for name, value, known in (("rule", self.rule, COMPENSATIONS), ("select", self.select, SELECTIONS)):
            if value not in known:
                raise TracefpError(f"compensation {name} must be one of {', '.join(known)}, got {value!r}")
        if not 0 < self.share <= 1:
            raise TracefpError(f"compensation share must be in (0, 1], got {self.share}")


@dataclass(frozen=True)
class QuantRecipe:
    """Frozen and hashable.

    weights, activations, kv: format names (``tracefp4.formats.list_formats``) of the routed experts' weights,
    of their inputs (gate/up and down projection) and of the KV cache; None leaves that part in the compute dtype.
    encode_scale: "row" or "row-pow2": one scale per row of activations and one per expert of weights, as they come or
    rounded down to a power of two (then a dequantized value is exact in BF16). kv_encode_scale: static S of K and V;
    belongs to a policy version. num_layers: decoder layers of the model. guided_layers: 0-based layers whose
    rows are recorded, ascending. bits: stored bits per guided value. rule: "cell" or "bracket". band: of
    ``guidance.decode``, None to follow every record. compensation: of the experts' activations in the rollout.
    """

    num_layers: int
    weights: str | None = None
    activations: str | None = None
    kv: str | None = None
    encode_scale: str = "row-pow2"
    kv_encode_scale: float = 1.0
    guided_layers: tuple[int, ...] = ()
    bits: float = 1.125
    rule: str = "cell"
    band: float | None = None
    compensation: Compensation | None = None

    def __post_init__(self) -> None:
        for name in (self.weights, self.activations, self.kv):
            if name is not None:
                element_bits(name)  # raises by name
        if self.kv is not None and element_bits(self.kv) != 4:
            raise TracefpError(f"the KV cache holds four-bit formats, not {self.kv}")
        if self.encode_scale not in ENCODE_SCALES:
            raise TracefpError(f"encode_scale must be one of {', '.join(ENCODE_SCALES)}, got {self.encode_scale!r}")
        if self.rule not in RULES:
            raise TracefpError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if self.band is not None and not 0 < self.band <= 1:
            raise TracefpError(f"band must lie in (0, 1] slots, or be none, got {self.band}")
        object.__setattr__(self, "kv_encode_scale", float(self.kv_encode_scale))  # 1 and 1.0 must hash alike
        object.__setattr__(self, "bits", float(self.bits))
        if self.num_layers < 1:
            raise TracefpError(f"num_layers must be >= 1, got {self.num_layers}")
        if not self.kv_encode_scale > 0:
            raise TracefpError(f"kv_encode_scale must be > 0, got {self.kv_encode_scale}")
        bad = [i for i in self.guided_layers if not 0 <= i < self.num_layers]
        if bad or list(self.guided_layers) != sorted(set(self.guided_layers)):
            raise TracefpError(f"guided_layers must ascend within 0..{self.num_layers - 1}, got {self.guided_layers}")
        if self.compensation is not None and (self.activations is None or self.weights is None):
            raise TracefpError(
                "compensation of activations needs quantized activations and weights: set quant.activations and "
                "quant.weights, or another method.name"
            )

    @property
    def quantized(self) -> bool:
        return not (self.weights is None and self.activations is None and self.kv is None)

    @property
    def pow2(self) -> bool:
        return self.encode_scale == "row-pow2"

    @cached_property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the recipe, ``band`` left out, as canonical JSON; made once."""
        fields = asdict(self)
        del fields["band"]  # of reading: the same records are made with any
        if self.compensation is None:  # what is not there changes no hash of earlier versions
            del fields["compensation"]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def site_format(self, site: str) -> str | None:
        """Format name at a recorded site ("expert_input", "key" or "value")."""
        return self.activations if site == "expert_input" else self.kv

    def site_encode_scale(self, site: str) -> str | float | None:
        """``encode_scale`` argument for ``Format.quantize`` at a recorded site; None for MX formats."""
        name = self.site_format(site)
        if name is None or formats.get_format(name).scale_kind != "e4m3":
            return None
        return self.encode_scale if site == "expert_input" else self.kv_encode_scale


@dataclass(frozen=True)
class TrainerForward:
    """How much of the recipe the trainer's forward mirrors.

    weights, activations, kv: fake-quantize that part as the rollout quantizes it. guided: round recorded rows to the
    rollout's slots; else to nearest. replay: send tokens to the experts the rollout chose (R3). clipped: no gradient to
    activations, K and V beyond what their block's scale represents; else the gradient of the identity everywhere.
    """

    weights: bool = False
    activations: bool = False
    kv: bool = False
    guided: bool = False
    replay: bool = True
    clipped: bool = False


def resolve_guided_layers(which: str, num_layers: int) -> tuple[int, ...]:
    """Layer numbers of "none", "all", or "deeper-half", "-quarter", "-eighth": the floor(N/2), floor(N/4) or floor(N/8)
    deepest of N, at least one.

    Raises TracefpError for another word.
    """
    if which not in GUIDED_LAYERS:
        raise TracefpError(f"guided layers must be one of {', '.join(GUIDED_LAYERS)}, got {which!r}")
    parts = {"deeper-half": 2, "deeper-quarter": 4, "deeper-eighth": 8, "all": 1}
    count = 0 if which == "none" else max(1, num_layers // parts[which])
    return tuple(range(num_layers - count, num_layers))


def quantize_expert_weights(w_EOI: Tensor, format_name: str, pow2: bool = False) -> QuantizedBlocks:
    """Quantizes stacked expert weights [E, out, in] along ``in``, with one encode scale per expert.

    Rollout and trainer both call this on the same BF16 values, so at the same policy version they agree bit for
    bit. Gate and up lie stacked in ``out`` and thus share the expert's scale. Raises FormatError where ``in`` is
    no multiple of the block. pow2: round the expert's scale down to a power of two.
    """
    fmt = formats.get_format(format_name)
    if fmt.scale_kind != "e4m3":
        return fmt.quantize(w_EOI)
    scale_E1 = fmt.resolve_encode_scale(w_EOI.flatten(1), "row-pow2" if pow2 else "row")
    assert scale_E1 is not None
    return fmt.quantize(w_EOI, encode_scale=scale_E1[:, :, None])
