"""What the trainer's modules consult in a forward: which recipe, which micro-batch, which rows.

Modules never own guidance. They ask the context by (site, layer) for the armed micro-batch, any number of times, so
that a forward repeated by gradient checkpointing sees the very same rows; and every call of the model carries the
micro-batch's key, so that a recomputation under another micro-batch is an error and not a quiet wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from tracefp4.guidance import CompactGuidance, GuidanceError, decode, encode, full_bits
from tracefp4.nn.observe import SiteObserver
from tracefp4.nn.rounding import AUTO, fake_quantize, guided_round
from tracefp4.recipe import QuantRecipe, TrainerForward


@dataclass
class MicroBatch:
    """Records of one padded micro-batch of B x T positions, flattened to N = B * T rows.

    key: unique within a trainer. guidance: per (site, layer) a record of N rows, invalid on padding, on last tokens
    and wherever a row is missing. experts: per layer (int64 [N, K], bool [N] valid). probe: full-width records of the
    rows that diagnostics look at, with the row numbers int64 [n] they belong to. decoded: None decodes in every
    forward; a dict keeps what the first forward decoded, as full codes, for all later ones: the slots then stay as the
    weights move.
    """

    key: int
    guidance: dict[tuple[str, int], CompactGuidance] = field(default_factory=dict)
    experts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    probe: dict[tuple[str, int], CompactGuidance] = field(default_factory=dict)
    probe_rows: Tensor | None = None
    decoded: dict[tuple[str, int], CompactGuidance] | None = None

    def probed(self, site: str) -> Tensor:
        """int64 [n]: the rows of this micro-batch that the site's records in ``probe`` are of."""
        assert self.probe_rows is not None
        return self.probe_rows


class GuidanceContext:
    """Shared by all hooked modules of one model. Disarmed, the forward rounds to nearest and replays nothing.

    backend: of the roundings, see ``nn.rounding``; products: of the experts, see ``nn.dispatch``. keep_weights: whether
    fake-quantized weights stay in memory from one micro-batch to the next, see ``nn.weights``.
    """

    def __init__(
        self,
        recipe: QuantRecipe,
        forward: TrainerForward,
        backend: str = AUTO,
        products: str = "auto",
        keep_weights: bool = True,
    ) -> None:
        self.recipe = recipe
        self.forward = forward
        self.backend, self.products, self.keep_weights = backend, products, keep_weights
        self.weight_epoch = 0
        self._recipe_hash = recipe.hash  # a hash of JSON, once and not at every site
        self.observer: SiteObserver | None = None
        self._current: MicroBatch | None = None

    @property
    def current(self) -> MicroBatch | None:
        return self._current

    @contextmanager
    def armed(self, micro_batch: MicroBatch, observer: SiteObserver | None = None) -> Iterator[dict[str, int]]:
        """Arms a micro-batch for its forward AND backward; yields the kwargs the model must be called with.

        Raises GuidanceError when another one is armed.
        """
        if self._current is not None:
            raise GuidanceError(f"micro-batch {self._current.key} is still armed; leave it before arming another")
        self._current, self.observer = micro_batch, observer
        try:
            yield {"guidance_key": micro_batch.key}
        finally:
            self._current, self.observer = None, None

    def weights_changed(self) -> None:
        """Forgets the fake-quantized weights. Needed only where parameters were changed behind autograd's back, by
        writing into ``parameter.data`` in place; any other change is noticed."""
        self.weight_epoch += 1

    def check(self, key: int | None) -> None:
        """Raises GuidanceError where a forward runs under another micro-batch than it was called for."""
        armed = None if self._current is None else self._current.key
        if key != armed:
            raise GuidanceError(
                f"the forward was called for micro-batch {key}, but {armed} is armed; run model and backward inside "
                "`with context.armed(micro_batch) as kwargs` and pass the kwargs to the model"
            )

    def quantizes(self, site: str) -> bool:
        on = self.forward.activations if site == "expert_input" else self.forward.kv
        return on and self.recipe.site_format(site) is not None

    def round_site(self, site: str, layer: int, x_NK: Tensor) -> Tensor:
        """x [N, K] at a recorded site -> what the layer goes on with; gradient straight through."""
        mb = self._current
        name = self.recipe.site_format(site)
        if name is None:
            return x_NK
        own = self.recipe.site_encode_scale(site)
        guidance = mb.guidance.get((site, layer)) if mb is not None and self.forward.guided else None
        if self.observer is not None and mb is not None and (site, layer) in mb.probe:
            probed = mb.probed(site)
            used = None if guidance is None else guidance.select(probed)
            rows, applied = x_NK.detach()[probed], self.quantizes(site)
            self.observer.observe(
                site, layer, rows, mb.probe[site, layer], used, own, self.recipe.rule, applied, self.recipe.band
            )
        if not self.quantizes(site):
            return x_NK
        if guidance is None:
            return fake_quantize(x_NK, name, own, self.backend, clipped=self.forward.clipped)
        rule, band = self.recipe.rule, self.recipe.band
        if mb is not None and mb.decoded is not None:
            guidance = self._decoded_once(mb.decoded, (site, layer), guidance, x_NK.detach())
            rule, band = "cell", None
        clipped = self.forward.clipped
        return guided_round(x_NK, guidance, rule, self._recipe_hash, own, self.backend, clipped=clipped, band=band)

    def _decoded_once(
        self,
        held: dict[tuple[str, int], CompactGuidance],
        where: tuple[str, int],
        guidance: CompactGuidance,
        x_NK: Tensor,
    ) -> CompactGuidance:
        """Full codes of the first decoding at a site; rows without a record stay invalid and round to nearest."""
        if where not in held:
            own = self.recipe.site_encode_scale(where[0])
            chosen, guided = decode(guidance, x_NK, self.recipe.rule, self._recipe_hash, own, self.recipe.band)
            held[where] = encode(chosen, full_bits(chosen.format), self._recipe_hash, guided)
        return held[where]

    def round_activation(self, x: Tensor) -> Tensor:
        """The unrecorded activation site (input of the down projection): nearest rounding."""
        if not self.forward.activations or self.recipe.activations is None:
            return x
        own = self.recipe.site_encode_scale("expert_input")
        return fake_quantize(x, self.recipe.activations, own, self.backend, clipped=self.forward.clipped)

    @property
    def weight_format(self) -> str | None:
        return self.recipe.weights if self.forward.weights else None
