"""What a mode is: what the rollout quantizes and records, how much the trainer mirrors, which loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from tracefp4.config import StrictModel, did_you_mean
from tracefp4.errors import TracefpError
from tracefp4.formats import get_format
from tracefp4.nn import TrainerForward
from tracefp4.recipe import QuantRecipe, resolve_guided_layers


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
            get_format(name)  # raises by name
        return name


@dataclass(frozen=True)
class Guidance:
    """What a guided mode records: layers ("deeper-half" or "all"), bits per NVFP4 value, decoding rule."""

    layers: str
    bits: float
    rule: str

    def bits_for(self, formats: list[str]) -> float:
        """Bits of the same kind of record in these formats: MX blocks hold 32 values, and one low scale bit is enough.

        Raises TracefpError where NVFP4 and MX are mixed: a record has one width.
        """
        mx = {name.startswith("mxfp4") for name in formats}
        if len(mx) > 1:
            raise TracefpError(
                f"a guided mode needs quant.activations and quant.kv of one family, got {' and '.join(formats)}"
            )
        return _MX_BITS[self.bits] if mx == {True} else self.bits


_MX_BITS = {1.125: 1.03125, 1.5: 1.25, 4.5: 4.25}


@dataclass(frozen=True)
class Method:
    """One mode of the trainer.

    quantized: the rollout runs in FP4. forward: what the trainer mirrors. guidance: None records nothing. dtype: set
    where the mode is about the compute dtype of both paths; None takes rollout.dtype and train.dtype.
    """

    name: str
    description: str
    quantized: bool
    forward: TrainerForward
    guidance: Guidance | None = None
    dtype: str | None = None

    def recipe(self, quant: QuantConfig, num_layers: int) -> QuantRecipe:
        """The numeric contract of a run of this mode."""
        if not self.quantized:
            return QuantRecipe(num_layers=num_layers)
        part = {k: None if getattr(quant, k) == "none" else getattr(quant, k) for k in ("weights", "activations", "kv")}
        g = self.guidance
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
        )


_METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    if method.name in _METHODS:
        raise ValueError(f"method {method.name} is registered twice")
    _METHODS[method.name] = method
    return method


def get_method(name: str) -> Method:
    """Raises TracefpError with the nearest name for an unknown one."""
    if name not in _METHODS:
        raise TracefpError(f"unknown method {name!r}{did_you_mean(name, list(_METHODS))}")
    return _METHODS[name]


def list_methods() -> list[Method]:
    return list(_METHODS.values())
