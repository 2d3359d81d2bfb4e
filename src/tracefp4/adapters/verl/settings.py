"""What a verl user sets, under the one key that rollout and trainer workers both receive.

verl hands ``rollout.custom`` to the rollout alone; ``model.override_config`` reaches both sides, so that the two cannot
be configured apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from tracefp4.config import ConfigError, StrictModel
from tracefp4.config_problems import Explainer, coerced_values, joined
from tracefp4.errors import TracefpError
from tracefp4.guidance.disk import GuidanceStoreConfig
from tracefp4.methods import Band, Method, MethodConfig, QuantConfig, get_method, list_methods
from tracefp4.recipe import QuantRecipe
from tracefp4.train.losses.tbpo import TBPOConfig
from tracefp4.train.losses.triage import TriageConfig

KEY = "actor_rollout_ref.model.override_config.tracefp4"


class GuidanceSettings(GuidanceStoreConfig):
    """The guidance store, and when its loss ends the run.

    url: a folder or fsspec URL that every rollout and trainer process reaches; required by guided methods.
    max_version_diff: guidance of weights older than this many versions falls back to nearest rounding. band: of the
    records of older weights that remain, in how many slots about a rounding border they count; "none": everywhere;
    None: as the method does (docs/decisions/0008-stale-records-have-a-band.md). Unguided methods ignore it.
    lost_below: a step whose share of guided rows is smaller counts as lost. lost_after_steps: this many lost steps in a
    row end the run with an error; 0 only logs the share.
    """

    wait_seconds: float = Field(2.0, ge=0)
    keep_gb: float = Field(16.0, ge=0)
    max_version_diff: int = Field(3, ge=0, lt=2**30)
    band: Band = None
    lost_below: float = Field(0.5, ge=0, le=1)
    lost_after_steps: int = Field(3, ge=0)


class ProbeSettings(StrictModel):
    """Responses whose full codes are kept in all layers, for the metrics ``code_mismatch/*``.

    every: probe under every n-th policy version, 0 never. responses: of a replica under such a version, each of another
    prompt. A row costs 4.5 bits for every value of every recorded site and layer.
    """

    every: int = Field(0, ge=0)
    responses: int = Field(4, ge=1)


class AdapterSettings(StrictModel):
    """method: a mode of ``tracefp4`` ("bf16", "qat", "trace", ...). quant: formats of a quantized rollout.
    tbpo, triage: of the losses of these names, which the method chooses."""

    method: str = "trace"
    quant: QuantConfig = QuantConfig()
    guidance: GuidanceSettings = GuidanceSettings()
    probe: ProbeSettings = ProbeSettings()
    tbpo: TBPOConfig = TBPOConfig()
    triage: TriageConfig = TriageConfig()

    @property
    def mode(self) -> Method:
        return get_method(self.method).configured(MethodConfig(name=self.method, band=self.guidance.band))

    def recipe(self, num_layers: int) -> QuantRecipe:
        return self.mode.recipe(self.quant, num_layers)

    def described(self, recipe: QuantRecipe) -> str:
        """For the log: the method and what its recipe came to."""
        band = f", band {band_name(recipe.band)}" if self.mode.guidance else ""
        return f"method {self.method}, recipe {recipe.hash}{band}"

    def dtype(self, configured: str) -> Literal["bfloat16", "float32"]:
        """Compute dtype of both paths, given ``rollout.dtype``. Raises TracefpError for one that the engine lacks."""
        name = self.mode.dtype or configured
        if name not in ("bfloat16", "float32"):
            raise TracefpError(f"actor_rollout_ref.rollout.dtype must be bfloat16 or float32, got {configured}")
        return "float32" if name == "float32" else "bfloat16"


def band_name(band: float | None) -> str:
    """A recipe's band as ``guidance.band`` says it."""
    return "none" if band is None else f"{band:g}"


def read_settings(override_config: Mapping[str, Any] | None) -> AdapterSettings | None:
    """The settings in ``actor_rollout_ref.model.override_config``; None where it has no ``tracefp4``.

    Raises TracefpError naming the key that is unknown, wrong, or missing.
    """
    data = (override_config or {}).get("tracefp4")
    if data is None:
        return None
    if "model_config" not in (override_config or {}):
        raise TracefpError(
            f"{KEY} needs actor_rollout_ref.model.override_config.model_config beside it (it may be empty): without it "
            "verl writes every override into the checkpoint's own config"
        )
    plain = _plain(data)
    explainer = Explainer(KEY, {}, plain, AdapterSettings)
    try:
        settings = AdapterSettings.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(explainer.explain(error)) from None
    # Text may be a number here, as YAML's ${oc.env:...} gives it; true is none.
    if wrong := [found for found in coerced_values(plain, settings) if isinstance(found[1], bool)]:
        raise ConfigError(joined([explainer.wrong_type(*found) for found in wrong]))
    if why := _why_not_in_verl(settings.mode):
        names = ", ".join(m.name for m in list_methods() if not _why_not_in_verl(m))
        raise TracefpError(f"method {settings.method} {why}; use one of {names}")
    if settings.guidance.url.partition(":")[0] == "memory":
        folder = f"{KEY}.guidance.url, a folder or URL that rollout and trainer both reach"
        if settings.mode.guidance is not None:
            raise TracefpError(f"method {settings.method} needs {folder}")
        if settings.probe.every and settings.mode.quantized:
            raise TracefpError(f"{KEY}.probe.every needs {folder}")
    return settings


def _why_not_in_verl(method: Method) -> str:
    """What of a mode verl's interfaces do not carry; empty where it runs."""
    if method.loss == "score_centering":
        return "weighs each token by the rollout's likeliest ones at its position, which verl's rollouts do not report"
    if method.deployed is not None or method.calibrated:
        return "quantizes the policy after training, which is no step of verl's"
    return ""


def _plain(data: Any) -> Any:
    """Dicts and lists of plain values, whatever mapping they came as."""
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    return [_plain(v) for v in data] if isinstance(data, list | tuple) else data
