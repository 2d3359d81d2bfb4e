"""What a mode is: what the rollout quantizes and records, how much the trainer mirrors, which loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tracefp4.config import StrictModel, did_you_mean
from tracefp4.errors import TracefpError
from tracefp4.formats.names import element_bits
from tracefp4.recipe import Compensation, QuantRecipe, TrainerForward, resolve_guided_layers

Band = Annotated[float, Field(gt=0, le=1)] | Literal["none"] | None
"""Of a setting: how many slots about a rounding border a record of older weights counts in; "none": everywhere. None
leaves the mode's own."""


class QuantConfig(StrictModel):
    """Formats of a quantized rollout; modes that do not quantize ignore them.

    weights, activations: of the routed experts, or of a dense model's MLP, which counts as one expert. kv: of the
    cache. "none" leaves a part in the compute dtype.
    encode_scale: "row" or "row-pow2". kv_encode_scale: static encode scale S of K and V.
    """

    weights: str = "nvfp4"
    activations: str = "nvfp4"
    kv: str = "nvfp4"
    encode_scale: Literal["row", "row-pow2"] = "row-pow2"
    kv_encode_scale: float = Field(1.0, ge=1e-6, le=1e6)

    @field_validator("weights", "activations", "kv")
    @classmethod
    def _known_format(cls, name: str) -> str:
        if name != "none":
            element_bits(name)  # raises by name
        return name

    @field_validator("kv")
    @classmethod
    def _four_bits(cls, name: str) -> str:
        if name != "none" and element_bits(name) != 4:
            raise ValueError(f"the KV cache holds four-bit formats, not {name}: set quant.kv to one, or to none")
        return name


class CompensationConfig(StrictModel):
    """Of ``quads`` and ``resq``. share: of the input channels, by the L2 norm of their residual. select: "channels",
    one choice for all rows of a rollout step, as the methods are published; "row", each row's own, which does not
    depend on the batch; "2:4", the two largest of every four values, for which share says nothing."""

    select: Literal["channels", "row", "2:4"] = "channels"
    share: float = Field(0.5, gt=0, le=1)


class MethodConfig(StrictModel):
    """name: a mode, see ``tracefp4 methods``; "NAME@FORMATS" runs it in other formats (``list_presets``).

    layers, bits, rule: of the record, in place of the guided mode's own (bits: of the NVFP4 record; MX takes its
    counterpart, see ``Guidance``). band: a record of older weights than the trainer's counts only within so many slots
    of a rounding border, so that it does not hold back what the weights have learned since; "none": everywhere. Modes
    that record nothing ignore these. compensation: of the modes that have one.
    """

    name: str = "trace"
    layers: Literal["all", "deeper-half", "deeper-quarter", "deeper-eighth"] | None = None
    bits: float | None = None
    rule: Literal["cell", "bracket"] | None = None
    band: Band = None
    compensation: CompensationConfig = CompensationConfig()

    @field_validator("bits")
    @classmethod
    def _known_width(cls, bits: float | None) -> float | None:
        if bits is not None and bits not in _BITS:
            raise ValueError(f"method.bits must be one of {', '.join(f'{b:g}' for b in _BITS)}, got {bits:g}")
        return bits


_BITS = (4.5, 1.5, 1.125, 1.0625, 0.5, 0.125)


@dataclass(frozen=True)
class Guidance:
    """What a guided mode records: layers ("all", "deeper-half", "-quarter" or "-eighth"), bits per NVFP4 value (.5 and
    .125: scales only), decoding rule, and the band that the rule holds in (None: everywhere)."""

    layers: str
    bits: float
    rule: str
    band: float | None = None

    def bits_for(self, formats: list[str]) -> float:
        """Bits of the same kind of record in these formats: MX blocks hold 32 values, and one low scale bit is enough.

        Raises TracefpError where NVFP4 and MX are mixed: a record has one width.
        """
        mx = {name.startswith("mx") for name in formats}
        if len(mx) > 1:
            raise TracefpError(
                f"a guided mode needs quant.activations and quant.kv of one family, got {' and '.join(formats)}"
            )
        if mx != {True}:
            return self.bits
        wide = max(element_bits(name) for name in formats)
        return wide + 0.25 if self.bits > 4 else _MX_BITS[self.bits]


_MX_BITS = {1.125: 1.03125, 1.0625: 1.03125, 1.5: 1.25, 0.5: 0.25, 0.125: 0.03125}


@dataclass(frozen=True)
class Method:
    """One mode of the trainer.

    quantized: the rollout runs in FP4. forward: what the trainer mirrors. guidance: None records nothing. dtype: set
    where the mode is about the compute dtype of both paths; None takes rollout.dtype and train.dtype. loss: one of
    ``tracefp4.train.losses.LOSSES``. formats: parts ("weights", "activations", "kv") whose format the mode itself sets.
    compensation: the rule of a second product in the rollout. deployed: formats that the policy is quantized to after
    training, and evaluated in; None evaluates in the rollout's own form. calibrated: that quantization chooses its
    block scales on calibration data (H-Scale).
    """

    name: str
    description: str
    quantized: bool
    forward: TrainerForward
    guidance: Guidance | None = None
    dtype: str | None = None
    loss: str = "grpo"
    formats: Mapping[str, str] | None = None
    compensation: Compensation | None = None
    deployed: Mapping[str, str] | None = None
    calibrated: bool = False

    def recipe(self, quant: QuantConfig, num_layers: int) -> QuantRecipe:
        """The numeric contract of a run of this mode."""
        if not self.quantized:
            return QuantRecipe(num_layers=num_layers)
        part = _parts(quant, self.formats)
        g = self.guidance
        if not any(part.values()):
            raise TracefpError(
                f"method {self.name} has nothing to quantize: quant.weights, quant.activations and quant.kv leave all "
                "in the compute dtype; set one of them, or take method bf16"
            )
        recorded = [name for name in (part["activations"], part["kv"]) if name is not None]
        if g is not None and not recorded:
            raise TracefpError(f"method {self.name} has nothing to guide: quant.activations and quant.kv are both none")
        return QuantRecipe(
            num_layers=num_layers,
            **part,
            encode_scale=quant.encode_scale,
            kv_encode_scale=quant.kv_encode_scale,
            guided_layers=resolve_guided_layers(g.layers if g else "none", num_layers),
            bits=g.bits_for(recorded) if g else 1.125,
            rule=g.rule if g else "cell",
            band=g.band if g else None,
            compensation=self.compensation,
        )

    def deployed_recipe(self, quant: QuantConfig, num_layers: int) -> QuantRecipe:
        """The form in which the trained policy is evaluated: the rollout's, unless it is quantized after training."""
        if self.deployed is None:
            return self.recipe(quant, num_layers)
        return QuantRecipe(
            num_layers=num_layers,
            **_parts(quant, self.deployed),
            encode_scale=quant.encode_scale,
            kv_encode_scale=quant.kv_encode_scale,
        )

    def configured(self, config: MethodConfig) -> Method:
        """This mode with the settings of ``config`` that concern it."""
        guidance, compensation = self.guidance, self.compensation
        if guidance is not None:
            given = {key: getattr(config, key) for key in ("layers", "bits", "rule", "band")}
            guidance = replace(guidance, **{key: value for key, value in given.items() if value is not None})
            if config.band == "none":
                guidance = replace(guidance, band=None)
        if compensation is not None:
            c = config.compensation
            compensation = replace(compensation, select=c.select, share=c.share)
        return replace(self, guidance=guidance, compensation=compensation)


def _parts(quant: QuantConfig, formats: Mapping[str, str] | None) -> dict[str, Any]:
    """Format name of each part, None where it stays unquantized."""
    named = {part: (formats or {}).get(part, getattr(quant, part)) for part in ("weights", "activations", "kv")}
    return {part: None if name == "none" else name for part, name in named.items()}


_METHODS: dict[str, Method] = {}

_PRESETS = {
    "nvfp4": {"weights": "nvfp4", "activations": "nvfp4", "kv": "nvfp4"},
    "mxfp4-w4a4": {"weights": "mxfp4-rceil", "activations": "mxfp4-rceil", "kv": "mxfp4-rceil"},
    "mxfp4-w4a8": {"weights": "mxfp4-rceil", "activations": "mxfp8-rceil", "kv": "mxfp4-rceil"},
}
"""What stands behind the @ of a method's name: formats of weights, activations and KV cache."""


def register(method: Method) -> Method:
    if method.name in _METHODS:
        raise ValueError(f"method {method.name} is registered twice")
    _METHODS[method.name] = method
    return method


def get_method(name: str) -> Method:
    """The mode of a name; "NAME@FORMATS" is the mode NAME in the formats of a preset.

    Raises TracefpError with the nearest name for an unknown one.
    """
    base, at, preset = name.partition("@")
    if base not in _METHODS:
        raise TracefpError(f"unknown method {base!r}{did_you_mean(base, list(_METHODS))}")
    method = _METHODS[base]
    if not at:
        return method
    if preset not in _PRESETS:
        raise TracefpError(f"unknown formats {preset!r} in the method {name!r}{did_you_mean(preset, list(_PRESETS))}")
    if not method.quantized:
        raise TracefpError(f"method {base} quantizes nothing: name it without @{preset}")
    # What the mode leaves unquantized (w4a16's activations) stays so.
    formats = {**_PRESETS[preset], **(method.formats or {})}
    return replace(method, name=name, description=f"{method.description}, in {preset}", formats=formats)


def list_methods() -> list[Method]:
    return list(_METHODS.values())


def list_presets() -> list[str]:
    """The formats that may follow an @."""
    return list(_PRESETS)
