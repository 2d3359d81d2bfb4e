"""Which site, in which layer, the distance comes from: each is switched alone, from both ends.

From the method as it is, a site is aligned: what the distance falls by is "removed". From all sites aligned, it is
given back to the method: what the distance rises by is "alone". Where the two differ, sites interact: what one leaves
another adds to, or hides. A site that the method has aligned already is made raw in both directions instead, which says
what aligning it is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tracefp4.meter.findings import number, percent
from tracefp4.meter.live.scoring import Conditions, prefill_logprobs
from tracefp4.meter.live.switches import ALIGNED, METHOD, OUTSIDE, RAW, SITES, TITLES, Switches

if TYPE_CHECKING:
    from tracefp4.meter.live.plan import LiveRequest
    from tracefp4.meter.live.run import Setup

LARGE = 0.1
"""Share of the distance from which a site counts as a cause."""


@dataclass(frozen=True)
class Distance:
    """Mean |log-prob difference|; sums and counts f64 [responses] of |difference| and tokens."""

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]

    @staticmethod
    def of(train: Sequence[Tensor], rollout: Sequence[Tensor]) -> Distance:
        sums = np.array([float((a - b).abs().sum()) for a, b in zip(train, rollout, strict=True)])
        return Distance(sums, np.array([float(len(a)) for a in train]))

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True)
class Switched:
    """One site. removed: what the distance falls by where the site is aligned; alone: what it rises by over all sites
    aligned where it is not. aligned_by_method: the method leaves nothing to align here, and both are of the raw
    site."""

    site: str
    title: str
    layer: int | None
    removed: float
    alone: float
    aligned_by_method: bool = False
    note: str = ""


@dataclass
class Attribution:
    """clean: distance with every site aligned. sites: all layers at once; layers: all sites of one layer; grid: one
    site of one layer. causes: sentences, largest first."""

    full: float
    clean: float
    sites: list[Switched] = field(default_factory=list)
    layers: list[Switched] = field(default_factory=list)
    grid: list[Switched] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "full": self.full,
            "clean": self.clean,
            "causes": self.causes,
            "sites": [vars(s) for s in self.sites],
            "layers": [vars(s) for s in self.layers],
            "grid": [vars(s) for s in self.grid],
        }


class _Meter:
    """Distances under switches; ``train`` under the method itself is known."""

    def __init__(self, setup: Setup, train: list[Tensor], conditions: Conditions) -> None:
        self.setup, self.train, self.conditions = setup, train, conditions
        recipe = setup.parts.recipe
        self.layers = list(range(recipe.num_layers))
        self.full = self.distance(Switches(METHOD)).mean
        self.clean = self.distance(Switches(ALIGNED)).mean

    def logprobs(self, switches: Switches) -> list[Tensor]:
        return self.setup.scorer.score(switches, self.conditions)

    def distance(self, switches: Switches) -> Distance:
        return Distance.of(self.logprobs(switches), self.setup.rollout)

    def sites(self) -> list[str]:
        """Sites that this model and recipe have."""
        recipe, shape = self.setup.parts.recipe, self.setup.engine.shape
        present = {
            "weights": True,
            "codes": recipe.activations is not None,
            "scales": recipe.activations is not None,
            "down_input": recipe.activations is not None,
            "kv": recipe.kv is not None,
            "router": shape.routed_layers > 0,
            "prompt_rows": recipe.quantized,
        }
        return [site for site in SITES if present[site]]

    def switched(self, sites: Sequence[str], layers: Sequence[int], title: str, layer: int | None) -> Switched:
        """Sites of layers, switched together."""
        of_full, of_clean = Switches(METHOD), Switches(ALIGNED)
        for site in sites:
            where = [OUTSIDE] if site == "prompt_rows" else list(layers)
            of_full = of_full.with_site(site, ALIGNED, where)
            of_clean = of_clean.with_site(site, METHOD, where)
        aligned = self.logprobs(of_full)
        unchanged = all(bool((a == b).all()) for a, b in zip(aligned, self.train, strict=True))
        if unchanged:
            for site in sites:
                where = [OUTSIDE] if site == "prompt_rows" else list(layers)
                of_full, of_clean = of_full.with_site(site, RAW, where), of_clean.with_site(site, RAW, where)
            removed = self.distance(of_full).mean - self.full
        else:
            removed = self.full - Distance.of(aligned, self.setup.rollout).mean
        alone = self.distance(of_clean).mean - self.clean
        return Switched("+".join(sites) if len(sites) > 1 else sites[0], title, layer, removed, alone, unchanged)


def attribute(
    setup: Setup,
    train: list[Tensor],
    full: Distance,
    conditions: Conditions,
    request: LiveRequest,
    say: Callable[[str], None],
) -> Attribution:
    """Switches everything there is to switch."""
    meter = _Meter(setup, train, conditions)
    out = Attribution(meter.full, meter.clean)
    sites = meter.sites()
    everywhere = [OUTSIDE, *meter.layers]
    for site in sites:
        say(f"switching {TITLES[site]}")
        out.sites.append(meter.switched([site], everywhere, TITLES[site], None))
    out.sites += _conditions(meter, request)
    if request.layers:
        _by_layer(meter, out, sites, say)
    out.causes = causes_of(out)
    return out


def _by_layer(meter: _Meter, out: Attribution, sites: list[str], say: Callable[[str], None]) -> None:
    open_sites = [s.site for s in out.sites if s.site in sites and not s.aligned_by_method and s.site != "prompt_rows"]
    if not open_sites:
        return
    for layer in [OUTSIDE, *meter.layers]:
        mine = ["weights"] if layer == OUTSIDE else open_sites
        if not set(mine) & set(open_sites):
            continue
        title = "embedding and head" if layer == OUTSIDE else f"layer {layer}"
        say(f"switching {title}")
        out.layers.append(meter.switched(mine, [layer], title, layer))
        for site in mine:
            if len(mine) == 1:
                out.grid.append(replace(out.layers[-1], site=site, title=f"{TITLES[site]}, {title}"))
            else:
                out.grid.append(meter.switched([site], [layer], f"{TITLES[site]}, {title}", layer))


def _conditions(meter: _Meter, request: LiveRequest) -> list[Switched]:
    """What is not a site of a layer: log-prob mode, batch size, kernels."""
    setup, c = meter.setup, meter.conditions
    full, clean = Switches(METHOD), Switches(ALIGNED)

    def effect(site: str, title: str, other: Conditions, note: str) -> Switched:
        """other: the conditions under which the asymmetry is gone."""
        scored = [Distance.of(setup.scorer.score(s, other), setup.rollout).mean for s in (full, clean)]
        return Switched(site, title, None, meter.full - scored[0], meter.clean - scored[1], note=note)

    out = []
    out.append(_logprob_mode(meter, request, effect))
    size = setup.parts.config.train.micro_batch_size
    note = f"the trainer one sequence at a time, in place of micro-batches of {size}"
    out.append(effect("batch_size", "batch size", replace(c, alone=True), note))
    note = "the trainer's attention by plain products, in place of torch's fused kernel"
    out.append(effect("trainer_kernel", "trainer's attention kernel", replace(c, math=True), note))
    again = [
        prefill_logprobs(setup.engine, t, 1.0 if request.rollout_logprobs == "raw" else setup.temperature)
        for t in setup.trajectories
    ]
    changes = [
        base - Distance.of(setup.scorer.score(s, c), again).mean
        for s, base in ((full, meter.full), (clean, meter.clean))
    ]
    itself = Distance.of(again, setup.rollout).mean
    note = f"the engine's prefill in place of its decode steps; the engine differs from itself by {number(itself)}"
    out.append(Switched("engine_kernel", "engine's decode and batch", None, changes[0], changes[1], note=note))
    return out


def _logprob_mode(
    meter: _Meter, request: LiveRequest, effect: Callable[[str, str, Conditions, str], Switched]
) -> Switched:
    setup, c = meter.setup, meter.conditions
    title = "log-prob mode"
    if setup.temperature == 1:
        return Switched("logprob_mode", title, None, 0.0, 0.0, True, "temperature 1: raw and processed are the same")
    if request.train_logprobs != request.rollout_logprobs:
        same = 1.0 if request.rollout_logprobs == "raw" else setup.temperature
        note = (
            f"the trainer's log-probs {request.rollout_logprobs} as the rollout's, in place of {request.train_logprobs}"
        )
        return effect("logprob_mode", title, replace(c, temperature=same), note)
    other = 1.0 if request.train_logprobs == "processed" else setup.temperature
    turned = effect("logprob_mode", title, replace(c, temperature=other), "")
    note = f"both {request.train_logprobs}; what it would cost if only the rollout's were"
    return replace(turned, removed=-turned.removed, alone=-turned.alone, aligned_by_method=True, note=note)


def causes_of(out: Attribution) -> list[str]:
    """The open sites from the largest on, each with its worst layer."""
    causes = []
    whole = max(out.full, 1e-300)
    for s in sorted((s for s in out.sites if not s.aligned_by_method), key=lambda s: -s.removed):
        if s.removed < LARGE * whole:
            continue
        text = f"{s.title}: aligned, the distance falls by {percent(s.removed / whole)} of {number(out.full)}"
        text += f"; alone it makes {number(s.alone)}"
        # Of a layer that is aligned already, "removed" is what undoing that would cost: no part of this distance.
        mine = [g for g in out.grid if g.site == s.site and not g.aligned_by_method and g.removed > 0.5 * s.removed]
        worst = max(mine, key=lambda g: g.removed, default=None)
        if worst is not None and len(out.layers) > 2:
            where = "the embedding or head" if worst.layer == OUTSIDE else f"layer {worst.layer}"
            text += f"; {where} has {percent(min(1.0, worst.removed / s.removed))} of it"
        causes.append(text)
    singles = sum(
        s.removed for s in out.sites if s.site in SITES and s.site != "prompt_rows" and not s.aligned_by_method
    )
    together = out.full - out.clean
    if causes and together > LARGE * whole and abs(singles - together) > 0.25 * together:
        how = "hide one another" if singles < together else "add to one another"
        causes.append(
            f"sites interact: all aligned together take away {number(together)}, one by one {number(singles)} in "
            f"sum: they {how}"
        )
    if not causes:
        causes.append("no site stands out: what is left is the difference of the two implementations")
    return causes
